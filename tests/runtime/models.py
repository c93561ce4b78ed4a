"""Small quantized layers, and what they mean: the oracle side of the tests, in float64 by torch's own casts."""

from __future__ import annotations

import torch
from torch import nn

Tensor = torch.Tensor

FN_CODES = torch.arange(256, dtype=torch.uint8)
FINITE_CODES = FN_CODES[(FN_CODES & 0x7F) != 0x7F]
ROUNDED_CODES = FINITE_CODES[((FINITE_CODES & 0x7F) < 16) & (FINITE_CODES % 2 == 1)]


class Layer(nn.Module):
    """A module with one weight; its scale is attached by the test."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = frozen(weight)


class Holder(nn.Module):
    """A module with the given parameters."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            setattr(self, name, frozen(tensor))


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without gradient, as serving code has them."""
    return nn.Parameter(tensor, requires_grad=False)


def attribute(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """An attribute that loading or preparing put on a weight."""
    found = getattr(tensor, name)
    assert isinstance(found, torch.Tensor)
    return found


def fp8(codes: Tensor) -> Tensor:
    """uint8 codes as float8_e4m3fn."""
    return codes.view(torch.float8_e4m3fn)


def every_code(rows: int = 64, columns: int = 64) -> Tensor:
    """A weight that holds every finite e4m3fn code."""
    repeated = FINITE_CODES.repeat(rows * columns // len(FINITE_CODES) + 1)
    return fp8(repeated[: rows * columns].clone().reshape(rows, columns))


def random_codes(*shape: int, seed: int = 0, highest: int = 0x7E) -> Tensor:
    """Random codes of magnitude up to `highest`, as uint8."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, highest + 1, shape, generator=generator, dtype=torch.uint8)
    return codes | torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7


def e8m0(*shape: int, value: int = 127) -> Tensor:
    """e8m0 scales, all alike."""
    return torch.full(shape, value, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def codes_of(tensor: Tensor) -> Tensor:
    """A copy of the bytes of a one-byte tensor."""
    return tensor.detach().view(torch.uint8).clone()


def halved(codes: Tensor) -> Tensor:
    """What torch makes of half of every e4m3fn code: round to nearest even through float32."""
    return (fp8(codes).float() / 2).to(torch.float8_e4m3fn).view(torch.uint8)


def layer(weight: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> Layer:
    """A layer whose weight holds every code, with V4.1's 32x32 e8m0 scale unless another is given."""
    made = Layer(every_code() if weight is None else weight)
    made.weight.sf = e8m0(2, 2) if scale is None else scale
    return made


def assert_halved_once(before: torch.Tensor, weight: torch.Tensor) -> None:
    assert torch.equal(codes_of(weight), halved(before))
    assert ((codes_of(weight) & 0x7F) <= 0x76).logical_or((codes_of(weight) & 0x7F) == 0x7F).all()
