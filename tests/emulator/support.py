"""Short ways to run a piece of kernel code and look at what it left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from nki_emulator import Options, Run, run
from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator.jit import jit
from nki_emulator.tensor import Tensor

P = 128


def tile(shape: tuple[int, ...], dtype: Any = nl.float32, buffer: Any = nl.sbuf, value: Any = None) -> Tensor:
    """A tile filled with one value (1 by default). PSUM tiles are filled too, as a memset may."""
    t = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    filler = (1 if dtype.is_int else 1.0) if value is None else value
    nisa.memset(dst=t, value=filler)
    return t


def empty(shape: tuple[int, ...], dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> Tensor:
    """A tile that nobody wrote."""
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


def load(array: Tensor) -> Tensor:
    """A kernel argument of two or more dimensions in SBUF."""
    t = nl.ndarray(array.shape, dtype=array.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=array)
    return t


def store(t: Tensor) -> Tensor:
    """A result that holds an SBUF or PSUM tile."""
    source = t
    if t.buffer == nl.psum:
        source = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=source, src=t)
    out = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=source)
    return out


def execute(body: Callable[..., Any], *arrays: Any, grid: int | None = None, options: Options | None = None) -> Run:
    """Run `body` as a kernel; if it returns nothing, a dummy result is returned for it."""

    def kernel(a: Any = None, b: Any = None, c: Any = None, d: Any = None) -> Any:
        result = body(*[v for v in (a, b, c, d) if v != None])  # noqa: E711 - `is` would not do in a kernel
        if result != None:  # noqa: E711
            return result
        out = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile((1, 1)))
        return out

    return run(jit(kernel), *arrays, grid=grid, options=options)


def on_tiles(body: Callable[..., Any], *arrays: Any, options: Options | None = None) -> Any:
    """Load each array into SBUF, run `body` on the tiles, and return the tile it returns as an array."""
    return execute(lambda *args: store(body(*[load(a) for a in args])), *arrays, options=options).output


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normal fp32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
