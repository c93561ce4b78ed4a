"""What goes wrong with a store is said in words that tell what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepinfer_prep.cli.main import main
from deepinfer_prep.remote import s3
from tests.remote.buckets import upload
from tests.remote.s3_server import BUCKET, S3Server


def failed(*arguments: str) -> str:
    """What a command that fails says."""
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 1, result.output
    return " ".join(result.stderr.split())


def test_a_bucket_that_is_not_there(server: S3Server) -> None:
    assert "there is no bucket 'no-such-bucket'" in failed("inspect", "s3://no-such-bucket/model")


def test_a_prefix_that_is_empty(server: S3Server) -> None:
    assert f"s3://{BUCKET}/nothing does not exist" in failed("inspect", f"s3://{BUCKET}/nothing")


def test_a_listing_that_is_denied(server: S3Server) -> None:
    server.rule = lambda request: "403"
    told = failed("inspect", f"s3://{BUCKET}/model")
    assert f"needs s3:ListBucket on arn:aws:s3:::{BUCKET}/" in told


def test_a_bucket_of_another_region(server: S3Server) -> None:
    server.rule = lambda request: "region"
    assert "lies in another region" in failed("inspect", f"s3://{BUCKET}/model")


def test_a_store_that_asks_to_slow_down_for_ever(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *arguments: 0.001)
    server.rule = lambda request: "503"
    assert "asks to slow down" in failed("inspect", f"s3://{BUCKET}/model")


def test_an_endpoint_that_cannot_be_reached(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3._client.cache_clear()
    assert "the store cannot be reached" in failed("inspect", f"s3://{BUCKET}/model")


def test_a_store_that_goes_away_before_the_first_write(
    server: S3Server, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3._client.cache_clear()
    server.rule = lambda request: "drop request" if request.method == "PUT" else None
    assert "the store cannot be reached" in failed("convert", str(source), f"s3://{BUCKET}/out", "--quiet")


def test_no_credentials(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    s3._client.cache_clear()
    assert "no credentials were found" in failed("inspect", f"s3://{BUCKET}/model")


def test_a_body_that_never_comes_whole_is_given_up(server: S3Server, client: Any, source: Path) -> None:
    remote = upload(client, source, "source")
    server.rule = lambda request: "truncate" if request.action == "Get" and "model-1" in request.path else None
    assert "could not be read in" in failed("inspect", remote)


def test_names_that_could_leave_a_folder_are_refused(server: S3Server, client: Any, source: Path) -> None:
    remote = upload(client, source, "source")
    client.put_object(Bucket=BUCKET, Key="source/a/../../x", Body=b"")
    assert "has a name that no file below a folder can have" in failed("inspect", remote)


def test_a_name_that_is_a_file_and_a_folder_is_refused(server: S3Server, client: Any, source: Path) -> None:
    remote = upload(client, source, "source")
    client.put_object(Bucket=BUCKET, Key="source/config.json/x", Body=b"")
    assert "lies below a name that is a file as well" in failed("inspect", remote)


@pytest.mark.parametrize(
    ("url", "words"),
    [("s3://", "names no bucket"), ("gs://bucket/x", "the scheme 'gs' is not known")],
)
def test_a_url_that_is_not_understood(url: str, words: str) -> None:
    assert words in failed("inspect", url)


def test_without_the_extra_a_url_says_which_to_install_and_nothing_of_it_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['boto3'] = None\n"
        "from click.testing import CliRunner\nfrom deepinfer_prep.cli.main import main\n"
        "result = CliRunner().invoke(main, ['inspect', 's3://bucket/model'])\n"
        "assert result.exit_code == 1\nprint(result.stderr)\n"
        f"CliRunner().invoke(main, ['inspect', {str(tmp_path)!r}])\n"
        "assert not {'botocore', 'awscrt', 'huggingface_hub', 'ray'} & set(sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'deepinfer-prep[s3]'" in ended.stdout
