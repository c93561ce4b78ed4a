"""Arguments and options that commands share: how each is written, checked, and explained."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer_prep.cli.console import reported_errors

if TYPE_CHECKING:
    from deepinfer_prep.options import ActivationScaleRule, ImplausibleRule, UnscaledRule, WeightOrder


class _PlaceType(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.4 on
    """A path, or the URL of a store."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The place that was written; errors end the command as those of the work do."""
        from deepinfer_prep.remote.places import to_place

        with reported_errors(as_json=False):
            return to_place(value)


PLACE = _PlaceType()
_MIN_CHUNK = 64 * 1024


def _parse_chunk(ctx: click.Context, param: click.Parameter, value: str) -> int:
    from deepinfer_prep.files.sizes import parse_size

    try:
        size = parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if size < _MIN_CHUNK:
        raise click.BadParameter(f"{value} is too small; 64KiB is the least")
    return size


def examples(text: str) -> str:
    """An epilog that keeps its line breaks."""
    return "Examples:\n\n\b\n" + text


with_workers = click.option(
    "--workers", type=click.IntRange(1, 256), help="Threads. Default: twice the processors, at most 8; 12 with a store."
)
with_engine = click.option(
    "--engine",
    type=click.Choice(["threads", "ray"]),
    default="threads",
    show_default=True,
    help="What computes: threads of this process, or the nodes of a Ray cluster (--workers: threads of each task).",
)
with_ray_address = click.option(
    "--ray-address",
    metavar="HOST:PORT",
    help="Head node of the Ray cluster. Default: RAY_ADDRESS, else the cluster that this machine is part of.",
)
with_chunk_size = click.option(
    "--chunk-size",
    callback=_parse_chunk,
    default="8MiB",
    show_default=True,
    help="Bytes that a thread holds at a time.",
)
with_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
with_quiet = click.option("--quiet", is_flag=True, help="No progress on stderr.")
with_report = click.option(
    "--report", type=click.Path(path_type=Path, dir_okay=False), help="Also write the result as JSON to this file."
)
with_follow_links = click.option(
    "--follow-links",
    is_flag=True,
    help="Also take files of the checkpoint that are links out of its folder. Those of a hub cache need no option.",
)
with_strict = click.option("--strict", is_flag=True, help="Refuse NaN codes in fp8 weights instead of keeping them.")


def _parse_maps(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    from deepinfer_prep.families.user_map import parse_map

    try:
        for text in value:
            parse_map(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _parse_blocks(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    from deepinfer_prep.families.user_map import parse_block

    try:
        for text in value:
            parse_block(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


_PLAN_OPTIONS = (
    click.option(
        "--map",
        "maps",
        metavar="WEIGHT=SCALE",
        multiple=True,
        callback=_parse_maps,
        help="Pair weights and scales by name patterns, before any rule of a family. * stands for any characters; the "
        "n-th * of SCALE takes what the n-th * of WEIGHT matched: '*.weight=*.weight_qscale'. :e8m0 after SCALE says "
        "that its U8 bytes are exponents. May be repeated.",
    ),
    click.option(
        "--block",
        "blocks",
        metavar="WEIGHT=ROWSxCOLUMNS",
        multiple=True,
        callback=_parse_blocks,
        help="State how many rows and columns of a weight one value of its scale covers, where no config does: "
        "'*.down_proj.weight=128x128'. May be repeated.",
    ),
    click.option(
        "--unscaled",
        type=click.Choice(["refuse", "copy-if-safe"]),
        default="refuse",
        show_default=True,
        help="What to do with fp8 tensors without a scale: copy-if-safe copies them if no code lies above 240.",
    ),
    click.option(
        "--split",
        metavar="PATTERN",
        multiple=True,
        help="Split more F32 matrices into bf16 halves: '*hc_head_fn'. May be repeated.",
    ),
    click.option(
        "--activation-scales",
        type=click.Choice(["keep", "double"]),
        default="double",
        show_default=True,
        help="What to do with static scales of e4m3 activations and of an fp8 KV cache.",
    ),
    click.option(
        "--implausible-scales",
        type=click.Choice(["refuse", "accept"]),
        default="refuse",
        show_default=True,
        help="What to do where scale x code gives weights of a size that no model has.",
    ),
    click.option(
        "--layout",
        type=click.Choice(["stored", "kernel"]),
        default="stored",
        show_default=True,
        help="In which order to write the bytes of weights: as they are stored, which every loader of the original "
        "reads, or as the GEMM kernels read them, which only this package's loader does.",
    ),
)


def with_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that change what is planned; the command gets them as one `options`."""

    @wraps(command)
    def with_options(
        *,
        maps: tuple[str, ...],
        blocks: tuple[str, ...],
        unscaled: UnscaledRule,
        split: tuple[str, ...],
        activation_scales: ActivationScaleRule,
        implausible_scales: ImplausibleRule,
        layout: WeightOrder,
        strict: bool = False,
        **arguments: object,
    ) -> None:
        from deepinfer_prep.options import Options

        options = Options(
            strict=strict,
            maps=maps,
            blocks=blocks,
            unscaled=unscaled,
            split=split,
            activation_scales=activation_scales,
            implausible_scales=implausible_scales,
            layout=layout,
        )
        command(options=options, **arguments)

    for option in reversed(_PLAN_OPTIONS):
        with_options = option(with_options)
    return with_options
