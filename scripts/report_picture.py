"""Make the picture of a report that the README shows: the top of the sample checkpoint's page, as a small PNG.

    python scripts/report_picture.py docs/report.png

Needs Chromium (Debian: apt-get install chromium) and the extra `report`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import click
from make_checkpoint import SampleOptions, write_checkpoint
from PIL import Image

from deepinfer_prep.report import build_report, render_page

_WIDTH, _HEIGHT = 1180, 1750
_COLORS = 240
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    # Figures are drawn by the page's script: the picture is taken after five seconds of the page's own clock.
    "--virtual-time-budget=5000",
)


@click.command()
@click.argument("picture", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="What to show. Default: a sample of 64 MB.")
def main(picture: Path, checkpoint: Path | None) -> None:
    """Write PICTURE, the top of a checkpoint's report."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if checkpoint is None:
            checkpoint = folder / "DeepSeek-V4.1-sample"
            write_checkpoint(checkpoint, SampleOptions(size=64_000_000))
        page = folder / "report.html"
        page.write_text(render_page(build_report(checkpoint)), encoding="utf-8", newline="\n")
        _take(page, folder / "picture.png", folder / "profile")
        with Image.open(folder / "picture.png") as image:
            image.convert("RGB").quantize(_COLORS).save(picture, optimize=True)
    click.echo(f"{picture}: {picture.stat().st_size:,} bytes")


def _take(page: Path, picture: Path, profile: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise click.ClickException("chromium is not installed. On Debian: apt-get install chromium")
    command = [chromium, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={_WIDTH},{_HEIGHT}"]
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=300)


if __name__ == "__main__":
    main()
