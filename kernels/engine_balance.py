"""Sharing work between VectorE and ScalarE, decided while a kernel is traced."""

from .records import EngineClock

VECTOR_COST = 5
SCALAR_COST = 4
TENSOR_COST = 2
"""Time of a cycle on VectorE, ScalarE and TensorE, by their clocks of 0.96, 1.2 and 2.4 GHz."""

SHORTEST = 64
"""Cycles of the shortest instruction."""


def vector_is_free_first(clock: EngineClock, vector_cycles: int, scalar_cycles: int) -> bool:
    """Whether VectorE would be done with an instruction before ScalarE; charges it to the one that gets it."""
    vector = clock.vector + vector_cycles * VECTOR_COST
    scalar = clock.scalar + scalar_cycles * SCALAR_COST
    if vector <= scalar:
        clock.vector = vector
        return True
    clock.scalar = scalar
    return False


def charge_vector(clock: EngineClock, cycles: int) -> None:
    """Account for work that only VectorE can do."""
    clock.vector += max(SHORTEST, cycles) * VECTOR_COST


def charge_scalar(clock: EngineClock, cycles: int) -> None:
    """Account for work that ScalarE has been given."""
    clock.scalar += max(SHORTEST, cycles) * SCALAR_COST
