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

from deepinfer_prep.runtime.loading.assembly import Target
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint, Request
from deepinfer_prep.runtime.loading.gc_pause import collector_paused
from deepinfer_prep.runtime.loading.install import Filling
from deepinfer_prep.runtime.loading.plan import LoadPlan, Rename, Slices, plan_load
from deepinfer_prep.workers import batches

__all__ = ["LoadReport", "Target", "load_weights", "weights_iterator"]

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
    """Parameters and buffers that nothing filled; empty unless `strict` was turned off."""
    unexpected: tuple[str, ...]
    """Tensors that the model has no place for; empty unless `strict` was turned off."""
    skipped: tuple[str, ...]
    """Tensors for which `rename` returned None."""
    tied: Mapping[str, str]
    """Tensors that were not read because their parameter is tied to one that another tensor fills -> that tensor."""
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
    device: torch.device | str = "cpu",
    strict: bool = True,
    progress: bool = True,
) -> LoadReport:
    """Fill a model's parameters and persistent buffers from a prepared checkpoint, and attach what kernels need.

    What has memory is filled in place; what is on the meta device gets memory on `device` (on the CPU without a
    copy where it can be: see `PreparedCheckpoint`). Tied parameters are read once. Attached to every quantized
    weight: `sf`, its scale as stored (the model's own parameter, where the scale's name leads to one); to those
    whose manifest entry names a kernel scale `_nki_scale` (uint8) and `_nki_weight` (the weight's own bytes as
    uint8); to split matrices `_nki_fn_hi` and `_nki_fn_lo` (bf16).

    Args:
        rename: the parameter's name for a tensor's name, or a `Target` for tensors that are put together, or None
            for a tensor that is not wanted. Without it, names are equal. A scale that leads nowhere is no error:
            it still goes with its weight.
        slices: the part of a tensor that this rank takes, or None for all of it; `PreparedCheckpoint.share`
            computes such parts. It is not asked for scales, which are cut in step with their weights.
        device: for what is on the meta device.
        strict: refuse a model with parameters that no tensor fills, and tensors that no parameter takes.
        progress: show a progress bar on a terminal.

    Raises:
        RefusedError: model and checkpoint do not fit; everything that is missing, unexpected, of a wrong shape or
            dtype, or cut through a block is named at once, and nothing was changed.
        ManifestError: a path was given that is no finished output.
        PrepError: a file was cut while it was being read.
    """
    if not isinstance(checkpoint, PreparedCheckpoint):
        with PreparedCheckpoint(checkpoint) as opened:
            return load_weights(
                model, opened, rename=rename, slices=slices, device=device, strict=strict, progress=progress
            )
    started, read_before = time.perf_counter(), checkpoint.bytes_read
    with torch.no_grad(), collector_paused():
        plan = plan_load(model, checkpoint, rename, slices, strict)
        loaded = _execute(plan, checkpoint, torch.device(device), progress)
    report = LoadReport(
        tensors=len(plan.slots),
        bytes_loaded=loaded,
        bytes_read=checkpoint.bytes_read - read_before,
        seconds=time.perf_counter() - started,
        missing=plan.missing,
        unexpected=plan.unexpected,
        skipped=plan.skipped,
        tied=plan.tied,
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

    Such loaders know nothing of attributes, so afterwards call `gemm.prepare_model` and `mhc.prepare_model`.

    Args:
        select: whether a tensor is wanted; others are not read.
        progress: show a progress bar on a terminal.
    """
    if not isinstance(checkpoint, PreparedCheckpoint):
        with PreparedCheckpoint(checkpoint) as opened:
            yield from weights_iterator(opened, select=select, progress=progress)
        return
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
