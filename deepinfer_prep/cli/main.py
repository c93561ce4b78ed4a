"""The commands: each parses its arguments, calls one public function and prints the result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepinfer_prep._version import __version__
from deepinfer_prep.cli.arguments import (
    PLACE,
    examples,
    with_chunk_size,
    with_engine,
    with_follow_links,
    with_json,
    with_plan_options,
    with_quiet,
    with_ray_address,
    with_report,
    with_strict,
    with_workers,
)
from deepinfer_prep.cli.console import (
    EXIT_FAILED,
    check_report,
    emit,
    prepare_process,
    progress_display,
    reported_errors,
    tell,
    write_text,
)
from deepinfer_prep.cli.printable import printable

if TYPE_CHECKING:
    from deepinfer_prep.engines import EngineName
    from deepinfer_prep.files.storage import Place
    from deepinfer_prep.options import Options

_RESUMABLE = "No incomplete output was published. Run the same command again to resume."


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="deepinfer-prep")
def main() -> None:
    """Prepare fp8 checkpoints for AWS Trainium2: exact, offline, streamed, verified.

    Weights in e4m3fn (largest value 448) are halved and their scales doubled, so that the hardware's e4m3
    (largest value 240) computes the same numbers.
    """
    prepare_process()
    # numpy, once imported, starts a thread for each processor, which spins for linear algebra that never comes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@main.command(
    short_help="Say what is in a checkpoint and what convert would do.",
    epilog=examples(
        "  deepinfer-prep inspect DeepSeek-V4.1-Flash\n"
        "  deepinfer-prep inspect model.safetensors --scan\n"
        "  deepinfer-prep inspect Model-FP8 --map '*.weight=*.weight_qscale'\n"
        "  deepinfer-prep inspect DeepSeek-V4.1-Flash --json | jq .refusals"
    ),
)
@click.argument("checkpoint", type=PLACE)
@click.option("--scan", is_flag=True, help="Also read the fp8 weights and count the codes that matter.")
@with_plan_options
@with_follow_links
@with_workers
@with_chunk_size
@with_json
@with_quiet
def inspect(
    checkpoint: Place,
    scan: bool,
    options: Options,
    follow_links: bool,
    workers: int | None,
    chunk_size: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Tell what is in CHECKPOINT, what convert would do, and what stands in the way.

    CHECKPOINT is a folder or one .safetensors file, here or at s3://bucket/prefix. Only headers are read,
    unless --scan is given. The exit status is 1 where convert would refuse.
    """
    with reported_errors(as_json), progress_display(quiet) as progress:
        from deepinfer_prep.cli.render import inspection_text
        from deepinfer_prep.inspect import inspect_checkpoint

        result = inspect_checkpoint(
            checkpoint,
            options=options,
            scan=scan,
            workers=workers,
            chunk_size=chunk_size,
            follow_links=follow_links,
            progress=progress,
        )
    emit(result, inspection_text, as_json, None)
    if result.refusals:
        raise SystemExit(EXIT_FAILED)


@main.command(
    short_help="Write the converted checkpoint.",
    epilog=examples(
        "  deepinfer-prep convert DeepSeek-V4.1-Flash DeepSeek-V4.1-Flash-neuron\n"
        "  deepinfer-prep convert DeepSeek-V4.1-Flash OUT --dry-run\n"
        "  deepinfer-prep convert DeepSeek-V4-Flash OUT --split '*hc_head_fn'\n"
        "  deepinfer-prep convert DeepSeek-V4.1-Flash OUT --layout kernel\n"
        "  deepinfer-prep convert model.safetensors OUT --workers 4 --chunk-size 16MiB --report report.json\n"
        "  deepinfer-prep convert s3://models/V4.1 s3://models/V4.1-neuron --engine ray --ray-address head:6379"
    ),
)
@click.argument("checkpoint", type=PLACE)
@click.argument("out", type=PLACE)
@click.option("--dry-run", is_flag=True, help="Make every check and say what would be done; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace the output, or the safetensors files, that OUT holds.")
@with_strict
@with_plan_options
@with_follow_links
@with_engine
@with_ray_address
@with_workers
@with_chunk_size
@with_report
@with_json
@with_quiet
def convert(
    checkpoint: Place,
    out: Place,
    dry_run: bool,
    overwrite: bool,
    options: Options,
    follow_links: bool,
    engine: EngineName,
    ray_address: str | None,
    workers: int | None,
    chunk_size: int,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Convert CHECKPOINT into the folder OUT; either may be s3://bucket/prefix.

    CHECKPOINT is a folder or one .safetensors file; it is only read. An interrupted run is resumed by the
    same command, and nothing has its final name before it is complete.
    """
    check_report(report, as_json, checkpoint, out)
    if dry_run:
        _dry_run(checkpoint, out, options, overwrite, follow_links, workers, chunk_size, report, as_json, quiet)
        return
    with reported_errors(as_json, _RESUMABLE), progress_display(quiet) as progress:
        from deepinfer_prep.cli.render import conversion_text
        from deepinfer_prep.convert import convert_checkpoint
        from deepinfer_prep.engines import open_engine

        with open_engine(engine, ray_address, workers) as opened:
            result = convert_checkpoint(
                checkpoint,
                out,
                options=options,
                workers=workers,
                chunk_size=chunk_size,
                overwrite=overwrite,
                follow_links=follow_links,
                engine=opened,
                progress=progress,
                warn=None if quiet else lambda warning: tell(f"warning: {warning}"),
            )
    emit(result, conversion_text, as_json, report)


def _dry_run(
    checkpoint: Place,
    out: Place,
    options: Options,
    overwrite: bool,
    follow_links: bool,
    workers: int | None,
    chunk_size: int,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    with reported_errors(as_json), progress_display(quiet) as progress:
        from deepinfer_prep.cli.render import inspection_text
        from deepinfer_prep.convert import rehearse_conversion

        result = rehearse_conversion(
            checkpoint,
            out,
            options=options,
            workers=workers,
            chunk_size=chunk_size,
            overwrite=overwrite,
            follow_links=follow_links,
            progress=progress,
        )
    emit(
        result, lambda found: f"{inspection_text(found)}\n{printable(f'nothing was written to {out}')}", as_json, report
    )


@main.command(
    short_help="Prove that an output is complete and correct.",
    epilog=examples(
        "  deepinfer-prep verify DeepSeek-V4.1-Flash-neuron\n"
        "  deepinfer-prep verify DeepSeek-V4.1-Flash-neuron --source DeepSeek-V4.1-Flash\n"
        "  deepinfer-prep verify /shared/V4.1-neuron --source /shared/V4.1 --engine ray"
    ),
)
@click.argument("out", type=PLACE)
@click.option("--source", type=PLACE, help="The checkpoint it was converted from: recompute every byte.")
@with_follow_links
@with_engine
@with_ray_address
@with_workers
@with_chunk_size
@with_report
@with_json
@with_quiet
def verify(
    out: Place,
    source: Place | None,
    follow_links: bool,
    engine: EngineName,
    ray_address: str | None,
    workers: int | None,
    chunk_size: int,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove that OUT is a complete and correct output; exit status 1 on any difference."""
    check_report(report, as_json, out, *([source] if source is not None else []))
    with reported_errors(as_json), progress_display(quiet) as progress:
        from deepinfer_prep.cli.render import verification_text
        from deepinfer_prep.engines import open_engine
        from deepinfer_prep.verify import verify_checkpoint

        with open_engine(engine, ray_address, workers) as opened:
            result = verify_checkpoint(
                out,
                source=source,
                workers=workers,
                chunk_size=chunk_size,
                follow_links=follow_links,
                engine=opened,
                progress=progress,
            )
    emit(result, verification_text, as_json, report)
    if not result.ok:
        raise SystemExit(EXIT_FAILED)


def _parse_page(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    # A slip of the finger must not write a page over a shard.
    if value is not None and value.suffix.lower() not in (".html", ".htm"):
        raise click.BadParameter(f"{value} does not end in .html")
    return value


@main.command(
    short_help="Show a checkpoint or an output as one HTML page.",
    epilog=examples(
        "  deepinfer-prep report DeepSeek-V4.1-Flash -o report.html\n"
        "  deepinfer-prep report DeepSeek-V4.1-Flash -o report.html --headers-only\n"
        "  deepinfer-prep report DeepSeek-V4.1-Flash -o report.html --tensor 'layers.7.*'\n"
        "  deepinfer-prep report DeepSeek-V4.1-Flash-neuron -o report.html --verification verify.json\n"
        "  deepinfer-prep report s3://bucket/DeepSeek-V4.1-Flash -o report.html\n"
        "  deepinfer-prep report DeepSeek-V4.1-Flash --json | jq .verdict"
    ),
)
@click.argument("path", type=PLACE)
@click.option(
    "-o",
    "--output",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_parse_page,
    help="The page to write, a name that ends in .html. May be left out with --json.",
)
@click.option("--headers-only", is_flag=True, help="Read headers alone: seconds, but no figures of codes and scales.")
@click.option(
    "--tensor",
    "tensors",
    metavar="PATTERN",
    multiple=True,
    help="Show these tensors too, whatever their size; * stands for any characters. May be repeated.",
)
@click.option(
    "--verification",
    type=click.Path(path_type=Path, dir_okay=False),
    help="For an output: what `verify --report FILE` wrote, so that the page says when it was verified.",
)
@with_plan_options
@with_follow_links
@with_workers
@with_chunk_size
@with_json
@with_quiet
def report(
    path: Place,
    page: Path | None,
    headers_only: bool,
    tensors: tuple[str, ...],
    verification: Path | None,
    options: Options,
    follow_links: bool,
    workers: int | None,
    chunk_size: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show PATH, a checkpoint or an output of convert, as one HTML page that needs nothing else.

    A checkpoint is shown as it is, with what convert would do; an output with what was done. The fp8 data is read
    once. Drawing needs plotly: pip install 'deepinfer-prep[report]'. The exit status is 0 once the page is
    written, whatever it says; `inspect` and `verify` have one that tells.
    """
    if page is None and not as_json:
        raise click.UsageError("Say where to write the page, -o report.html, or ask for --json.")
    with reported_errors(as_json), progress_display(quiet) as progress:
        from deepinfer_prep.report.build import build_report
        from deepinfer_prep.report.page import render_page, require_plotly

        if page is not None:
            require_plotly()
        result = build_report(
            path,
            options=options,
            headers_only=headers_only,
            tensors=tensors,
            verification=verification,
            workers=workers,
            chunk_size=chunk_size,
            follow_links=follow_links,
            progress=progress,
        )
        if page is not None:
            write_text(page, render_page(result))
    emit(result, lambda found: f"{printable(found.verdict.sentence)}\n{printable(str(page))}", as_json, None)


@main.command(
    short_help="End an unfinished conversion and remove what it wrote.",
    epilog=examples(
        "  deepinfer-prep discard DeepSeek-V4.1-Flash-neuron\n  deepinfer-prep discard s3://bucket/DeepSeek-V4.1-neuron"
    ),
)
@click.argument("out", type=PLACE)
@with_json
def discard(out: Place, as_json: bool) -> None:
    """End the unfinished conversion in OUT: its files are removed, and in an object store its uploads are aborted.

    What is published in OUT already, such as an older output, stays.
    """
    with reported_errors(as_json):
        from deepinfer_prep.convert import discard_unfinished

        found = discard_unfinished(out)
    text = "the unfinished conversion was removed" if found else "no unfinished conversion is there"
    emit({"output": str(out), "discarded": found}, lambda result: printable(f"{out}: {text}"), as_json, None)
