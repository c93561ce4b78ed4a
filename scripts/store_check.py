"""Try an object store: everything that conversions and loading need of it, with a small checkpoint.

    export AWS_ENDPOINT_URL=http://store:9000    # and credentials, as for every S3 tool
    python scripts/store_check.py s3://BUCKET/SCRATCH FOLDER

FOLDER takes a sample checkpoint and its output; SCRATCH is a prefix of which everything is removed. The bucket's policy
is replaced and removed for the check of errors. Exit status 1 if something was found wrong.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click
from make_checkpoint import SampleOptions, write_checkpoint
from store_checks import checks
from store_checks.bucket import Prefix, folder_digests
from store_checks.runs import run

from deepinfer_prep.files.sizes import parse_size

_CHECKS = {
    check.__name__: check
    for check in (
        checks.combinations,
        checks.inspection,
        checks.requests,
        checks.overwriting,
        checks.discarding,
        checks.simultaneous,
        checks.errors,
        checks.loading,
        checks.kills,
    )
}


def prepare(scratch: str, folder: Path, size: str, kills: int, workers: int) -> checks.Place:
    """Make the sample, convert it locally and upload it, as far as that is not done."""
    source, converted = folder / "source", folder / "converted"
    if not source.exists():
        write_checkpoint(source, SampleOptions(size=parse_size(size)))
    shutil.rmtree(converted, ignore_errors=True)
    ended = run("convert", str(source), str(converted), "--quiet")
    if ended.status:
        raise click.ClickException(ended.output)
    bucket, _, key = scratch.removeprefix("s3://").strip("/").partition("/")
    remote = Prefix(bucket, f"{key}/source")
    if remote.digests() != folder_digests(source):
        remote.upload(source)
    outputs = Prefix(bucket, f"{key}/outputs")
    outputs.empty()
    return checks.Place(source, converted, folder_digests(converted), remote, outputs, kills, workers)


@click.command()
@click.argument("scratch")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default="600MB", show_default=True, help="Size of the sample checkpoint.")
@click.option("--kills", default=20, show_default=True, type=click.IntRange(1), help="How many runs are killed.")
@click.option("--workers", default=4, show_default=True, help="Workers of the run whose memory is measured.")
@click.option("--only", multiple=True, type=click.Choice(list(_CHECKS)), help="Only this check; may be repeated.")
def main(scratch: str, folder: Path, size: str, kills: int, workers: int, only: tuple[str, ...]) -> None:
    """Check the store below the prefix SCRATCH."""
    place, wrong = prepare(scratch, folder, size, kills, workers), 0
    for name in only or _CHECKS:
        for found in _CHECKS[name](place):
            wrong += not found.is_right
            click.echo(f"{'right' if found.is_right else 'WRONG'}  {name}: {found.text}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
