"""What holds where Ray is not asked for, or is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_prep.cli.main import main
from tests.hostile.checkpoints import write_checkpoint


def test_without_the_extra_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "deepinfer_prep.engines.ray_engine", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path), "--engine", "ray"])
    assert ended.value.code == 1
    assert "pip install 'deepinfer-prep[ray]'" in capfd.readouterr().err


def test_threads_import_nothing_of_ray(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    script = (
        "import sys; from deepinfer_prep.cli.main import main; "
        f"main(['convert', {str(source)!r}, {str(tmp_path / 'out')!r}, '--quiet'], standalone_mode=False); "
        "assert not {'ray', 'deepinfer_prep.engines.ray_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
