"""run(): one kernel on the emulator, or on AWS's simulator where that is installed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .context import Options
from .errors import EmulatorError
from .install import real_nki
from .jit import Kernel, launch
from .record import Instruction

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Run:
    """Results of a kernel, and what produced them."""

    backend: str
    """"emulator" or "simulator"."""
    outputs: tuple[Any, ...]
    """NumPy arrays, or torch tensors if an argument was one."""
    instructions: tuple[Instruction, ...] | None
    """The instruction record; None on the simulator, which has none."""
    sbuf_peak: int | None = None
    psum_peak: int | None = None

    @property
    def output(self) -> Any:
        """The only result."""
        if len(self.outputs) != 1:
            raise EmulatorError(f"the kernel has {len(self.outputs)} results: use .outputs")
        return self.outputs[0]


def run(kernel: Any, *args: Any, grid: int | None = None, options: Options | None = None, **kwargs: Any) -> Run:
    """Run a kernel on NumPy or torch arrays.

    `grid` is the number of programs (1 or 2; None launches without a grid). `options` are the emulator's; the
    simulator has none, so passing any there is an error.
    """
    torch_in = any(_is_torch(value) for value in (*args, *kwargs.values()))
    host_args = tuple(to_numpy(value) for value in args)
    host_kwargs = {name: to_numpy(value) for name, value in kwargs.items()}
    launched = kernel if grid is None else kernel[grid]
    if isinstance(launched, Kernel):
        result = launch(launched, host_args, host_kwargs, options or Options())
        outputs = result.outputs if not torch_in else tuple(to_torch(a) for a in result.outputs)
        return Run("emulator", outputs, result.instructions, result.sbuf_peak, result.psum_peak)
    return _simulate(launched, host_args, host_kwargs, options, torch_in)


def _simulate(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options | None, torch_in: bool
) -> Run:
    nki = real_nki()
    if nki is None:
        raise EmulatorError(f"{kernel!r} is not an emulated kernel and no AWS nki package is installed")
    if options is not None:
        raise EmulatorError("the simulator takes no emulator options")
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")  # unset means trn3 off the device
    result = nki.simulate(kernel)(*args, **kwargs)
    outputs = result if isinstance(result, tuple) else (result,)
    converted = tuple(to_torch(np.asarray(a)) if torch_in else np.asarray(a) for a in outputs)
    return Run("simulator", converted, None)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_numpy(value: Any) -> Any:
    """A torch tensor as a NumPy array of the same bits; anything else as it is."""
    if not _is_torch(value):
        return value
    import ml_dtypes
    import torch

    tensor = value.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    if tensor.dtype is torch.float8_e5m2:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e5m2)
    return tensor.numpy()


def to_torch(array: Array) -> Any:
    """The same bits as a torch tensor."""
    import ml_dtypes
    import torch

    owned = np.ascontiguousarray(array)
    if owned.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(owned.view(np.int16)).view(torch.bfloat16)
    if owned.dtype == ml_dtypes.float8_e5m2:
        return torch.from_numpy(owned.view(np.uint8)).view(torch.float8_e5m2)
    return torch.from_numpy(owned)


__all__ = ["Run", "run", "to_numpy", "to_torch"]
