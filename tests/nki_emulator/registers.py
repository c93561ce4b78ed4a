"""Registers of the engines' sequencers (aws-neuron-sdk docs: nki/api/nki.isa.register_load and its siblings)."""

from __future__ import annotations

from typing import Any, NoReturn

from . import rules
from .context import refuse


class VirtualRegister:
    """One int32 whose value exists only at run time: usable as a loop bound or an offset, in no Python expression."""

    def __init__(self, value: int | None = None, *, frozen: bool = False) -> None:
        self._value = value
        self.frozen = frozen

    @property
    def value(self) -> int:
        """Its value in this run, for the emulator itself."""
        if self._value is None:
            refuse(rules.REGISTER, "register", "", "read before it was loaded")
        return self._value

    def set(self, op: str, value: int) -> None:
        """Give it a value."""
        if self.frozen:
            refuse(rules.REGISTER, op, "dst", "a loop index is read only")
        self._value = value

    def _no_operator(self, *_: Any) -> NoReturn:
        refuse(rules.NO_OPERATORS, "register", "", "used in a Python expression")

    __bool__ = __int__ = __index__ = __float__ = _no_operator
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _no_operator
    __lt__ = __le__ = __gt__ = __ge__ = _no_operator
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False if other is None else self._no_operator()
