"""Registers and dynamic loops."""

from __future__ import annotations

from typing import Any

from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator import rules

from tests.emulator.broken_rules import breaks
from tests.emulator.support import P, empty, tile


@breaks(rules.REGISTER, "register_load", "src")
def register_from_a_row() -> None:
    nisa.register_load(nisa.register_alloc(), tile((1, 2), nl.int32))


@breaks(rules.REGISTER, "register_move", "src")
def register_from_a_float() -> None:
    nisa.register_move(nisa.register_alloc(), 1.0)


@breaks(rules.REGISTER, "register_move", "dst")
def write_to_a_loop_index() -> None:
    nl.fori_loop(0, 1, lambda i: nisa.register_move(i, nisa.register_alloc(2)))


@breaks(rules.REGISTER, "register")
def empty_register() -> None:
    nl.fori_loop(0, nisa.register_alloc(), lambda i: None)


@breaks(rules.LOOP_BODY, "fori_loop", "body_fun")
def body_that_returns() -> None:
    nl.fori_loop(0, 1, lambda i: 1)


@breaks(rules.LOOP_BODY, "fori_loop", "body_fun")
def body_that_changes() -> None:
    trips = []

    def body(i: Any) -> None:
        trips.append(1)
        if len(trips) == 1:
            tile((P, 4))

    nl.fori_loop(0, 2, body)


@breaks(rules.LOOP_BODY, "while_loop", "body_fun")
def while_body_without_condition() -> None:
    nl.while_loop(nisa.register_alloc(1), lambda r: None)


@breaks(rules.LOOP_BODY, "dynamic_range", "body_fun")
def older_loop_whose_body_changes() -> None:
    for trip, _ in enumerate(nl.dynamic_range(0, 2)):
        if trip == 0:
            tile((P, 4))


@breaks(rules.LOOP_BOUNDS, "dynamic_range", "step")
def older_loop_backward() -> None:
    for _ in nl.dynamic_range(3, 0, -1):
        pass


@breaks(rules.LOOP_BOUNDS, "fori_loop", "step")
def backward_loop() -> None:
    nl.fori_loop(3, 0, lambda i: None, step=-1)


@breaks(rules.LOOP_BOUNDS, "fori_loop", "upper")
def float_bound() -> None:
    nl.fori_loop(0, 2.0, lambda i: None)


@breaks(rules.LOOP_BOUNDS, "while_loop", "init")
def while_without_register() -> None:
    nl.while_loop(1, lambda r: r)


@breaks(rules.LOOP_ACCUMULATE, "nc_matmul", "accumulate")
def undecided_accumulation_in_a_loop() -> None:
    a, out = tile((4, 4)), empty((4, 4), buffer=nl.psum)
    nl.fori_loop(0, 1, lambda i: nisa.nc_matmul(dst=out, stationary=a, moving=a))


@breaks(rules.LOOP_NESTING, "fori_loop")
def loop_in_a_loop() -> None:
    nl.fori_loop(0, 1, lambda i: nl.fori_loop(0, 1, lambda j: None))
