"""Loading a model from a prepared checkpoint, and iterating over one for loaders that bring their own rules."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from tqdm import tqdm

from deepinfer_prep.errors import RefusedError
from deepinfer_prep.runtime.loading.assembly import Target
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.gc_pause import collector_paused
from deepinfer_prep.runtime.loading.install import Filling
from deepinfer_prep.runtime.loading.plan import LoadPlan, plan_load
from deepinfer_prep.runtime.loading.requests import Request
from deepinfer_prep.runtime.loading.rules import LoadRules, Names, Rename, Scales, Slices
from deepinfer_prep.runtime.loading.scale_form import ScaleForm
from deepinfer_prep.runtime.loading.tied import differing
from deepinfer_prep.workers import batches

__all__ = ["LoadReport", "ScaleForm", "Target", "load_weights", "weights_iterator"]

log = logging.getLogger(__name__)

_BATCH_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_weights` did; `str()` of it is one line for logs."""

    tensors: int
    """Parameters and buffers filled."""
    bytes_loaded: int
    """Their bytes, with those of everything attached to them."""
    bytes_read: int
    """Bytes read from files for it."""
    seconds: float
    missing: tuple[str, ...]
    """Parameters and buffers that nothing filled, as `strict` and `allow_missing` let them be."""
    unexpected: tuple[str, ...]
    """Tensors that the model has no place for, as `strict` and `allow_unexpected` let them be."""
    skipped: tuple[str, ...]
    """Tensors for which `rename` returned None."""
    tied: Mapping[str, str]
    """Tensors that were not loaded because their parameter is tied to one that another tensor fills -> that tensor."""
    left_on_meta: tuple[str, ...]
    """What of the model has no memory yet: buffers that it has to compute itself."""

    def __str__(self) -> str:
        line = f"loaded {_speed(self.tensors, self.bytes_loaded, self.seconds)}, {self.bytes_read / 1e9:,.2f} GB read"
        others = {"missing": self.missing, "unexpected": self.unexpected, "on meta": self.left_on_meta}
        return line + "".join(f", {len(names):,} {what}" for what, names in others.items() if names)


def load_weights(
    model: nn.Module,
    checkpoint: PreparedCheckpoint | str | Path,
    *,
    rename: Rename | None = None,
    slices: Slices | None = None,
    scales: ScaleForm | Scales | None = None,
    device: torch.device | str = "cpu",
    strict: bool = True,
    allow_missing: Names = (),
    allow_unexpected: Names = (),
    pad_rows: Names = (),
    cast: Names = (),
    repair: bool = False,
    progress: bool = True,
) -> LoadReport:
    """Fill a model's parameters and persistent buffers from a prepared checkpoint, and attach what kernels need.

    What has memory is filled in place; what is on the meta device gets memory on `device` (on the CPU without a
    copy where it can be: see `PreparedCheckpoint`). Parameters that are tied, as one object or over one memory, are
    read once; a tensor that is stored for another name of theirs is compared, and a difference is logged.

    Attached to every quantized weight: `sf`, its scale as stored (the model's own parameter, where the scale's name
    leads to one); to those whose manifest entry names a kernel scale `_nki_scale` (uint8) and `_nki_weight` (the
    weight's own bytes as uint8); to split matrices `_nki_fn_hi` and `_nki_fn_lo` (bf16). Copying a model, or wrapping
    its parameters anew, drops attributes: call `gemm.prepare_model` and `mhc.prepare_model` afterwards.

    A weight of an output of `--layout kernel` goes into the model in the kernels' order, where a kernel takes the part
    that is loaded: its parameter becomes uint8 with the last two axes as one, over the same memory where it had some,
    and has `_nki_order`. Where pieces are not whole bands they are put into that order in memory.

    Arguments that hold names take names in full or patterns in which `*` stands for any text.

    Args:
        rename: the parameter's name for a tensor's name, or a `Target` for tensors that are put together, or a list
            of these for a tensor that goes to several places, or None for a tensor that is not wanted. Without it,
            names are equal. A scale that leads nowhere is no error: it still goes with its weight.
        slices: the part of a tensor that this rank takes, or None for all of it; `PreparedCheckpoint.share`
            computes such parts. It is not asked for scales, which are cut in step with their weights.
        scales: the form of every `sf`, or a function that gives it for the name of a weight's parameter; None for the
            form that the checkpoint has.
        device: for what is on the meta device.
        strict: refuse a model with parameters that no tensor fills, and tensors that no parameter takes.
        allow_missing: parameters that may stay as they are all the same.
        allow_unexpected: tensors that may be left out all the same.
        pad_rows: parameters that may have more rows than the checkpoint gives them: the last rows are zeros, those
            of their scales ones.
        cast: parameters of another float dtype than their tensors, whose values are converted. Not for quantized
            weights, whose values mean nothing without their scales.
        repair: where `checkpoint` is the path of an unprepared checkpoint, halve and double while loading; the result
            is the same, bit for bit, as from its output. For an output it changes nothing.
        progress: show a progress bar on a terminal.

    Raises:
        RefusedError: model and checkpoint do not fit; everything that is missing, unexpected, of a wrong shape or
            dtype, or cut through a block is named at once, and nothing was changed.
        TypeError: `rename`, `slices` or `scales` returned something else than what is said above.
        ManifestError: a path was given that is no finished output.
        PrepError: a file was cut while it was being read.
    """
    rules = LoadRules(rename, slices, scales, strict, allow_missing, allow_unexpected, pad_rows, cast)
    if isinstance(checkpoint, PreparedCheckpoint):
        return _load(model, checkpoint, rules, torch.device(device), progress)
    with PreparedCheckpoint(checkpoint, repair=repair) as opened:
        return _load(model, opened, rules, torch.device(device), progress)


def _load(
    model: nn.Module, checkpoint: PreparedCheckpoint, rules: LoadRules, device: torch.device, progress: bool
) -> LoadReport:
    started, read_before = time.perf_counter(), checkpoint.bytes_read
    with torch.no_grad(), collector_paused():
        plan = plan_load(model, checkpoint, rules)
        loaded = _execute(plan, checkpoint, device, progress)
        for problem in differing(checkpoint, plan.tied):
            log.warning("%s: %s", checkpoint.folder, problem)
    report = LoadReport(
        tensors=len(plan.slots),
        bytes_loaded=loaded,
        bytes_read=checkpoint.bytes_read - read_before,
        seconds=time.perf_counter() - started,
        missing=plan.missing,
        unexpected=plan.unexpected,
        skipped=plan.skipped,
        tied={tied.dropped: tied.loaded for tied in plan.tied},
        left_on_meta=plan.model.on_meta(),
    )
    log.info("%s: %s", checkpoint.folder, report)
    return report


def weights_iterator(
    checkpoint: PreparedCheckpoint | str | Path,
    *,
    select: Callable[[str], bool] | None = None,
    progress: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every tensor of the source checkpoint, in the order of the files.

    Names, shapes and dtypes are those of the source, scales included, which is what `model.load_weights` of
    serving engines takes; their own rules for merging and slicing apply. Tensors are on the CPU. While one is
    being used the next ones are read, 64 MiB ahead or one tensor if it is larger.

    Such loaders put weights together by rows and columns, so an output with weights in the kernels' order is refused.
    They know nothing of attributes, so afterwards call `gemm.prepare_model` and `mhc.prepare_model`.

    Args:
        select: whether a tensor is wanted; others are not read.
        progress: show a progress bar on a terminal.

    Raises:
        RefusedError: the output was written with `--layout kernel`.
        ManifestError: a path was given that is no finished output.
    """
    if not isinstance(checkpoint, PreparedCheckpoint):
        with PreparedCheckpoint(checkpoint) as opened:
            yield from weights_iterator(opened, select=select, progress=progress)
        return
    _refuse_kernel_order(checkpoint)
    started = time.perf_counter()
    names = [name for name in checkpoint.names if select is None or select(name)]
    total = sum(checkpoint.tensor(name).nbytes for name in names)
    groups = batches(names, lambda name: checkpoint.tensor(name).nbytes, _BATCH_BYTES, len(names))
    with _bar(total, progress) as bar:
        for batch in _read_ahead(checkpoint, groups):
            while batch:
                name, tensor = batch.popleft()
                bar.update(tensor.nbytes)
                yield name, tensor
    seconds = time.perf_counter() - started
    log.info("%s: iterated over %s", checkpoint.folder, _speed(len(names), total, seconds))


def _refuse_kernel_order(checkpoint: PreparedCheckpoint) -> None:
    moved = [name for name, record in checkpoint.manifest.weights.items() if record.layout is not None]
    if moved:
        raise RefusedError(
            f"{checkpoint.folder} was converted with --layout kernel: {len(moved):,} weights (first {moved[0]!r}) "
            "stand in the kernels' order, which the loaders of serving engines do not know. Convert the "
            "checkpoint with --layout stored for them, or load this one with load_weights.",
            code="kernel-order",
        )


def _read_ahead(
    checkpoint: PreparedCheckpoint, groups: Iterable[list[str]]
) -> Iterator[deque[tuple[str, torch.Tensor]]]:
    """Read each batch while the one before it is used."""

    def read(names: list[str]) -> deque[tuple[str, torch.Tensor]]:
        return deque(zip(names, checkpoint.read_all(list(map(Request, names))), strict=True))

    with ThreadPoolExecutor(1) as reader:
        before = None
        for names in groups:
            current = reader.submit(read, names)
            if before is not None:
                yield before.result()
            before = current
        if before is not None:
            yield before.result()


def _execute(plan: LoadPlan, checkpoint: PreparedCheckpoint, device: torch.device, progress: bool) -> int:
    filling = Filling(plan, device)
    with _bar(filling.nbytes, progress) as bar:
        results = checkpoint.read_all(filling.requests, device=device, progress=bar.update)
    filling.install(results)
    return filling.nbytes


def _bar(total: int, progress: bool) -> tqdm[NoReturn]:
    # None shows the bar on terminals only.
    return tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=None if progress else True)


def _speed(tensors: int, nbytes: int, seconds: float) -> str:
    gigabytes = nbytes / 1e9
    return f"{tensors:,} tensors, {gigabytes:,.2f} GB in {seconds:.2f} s ({gigabytes / max(seconds, 1e-9):.2f} GB/s)"
