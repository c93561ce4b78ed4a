"""Sharing work between VectorE and ScalarE, decided while a kernel is traced."""

VECTOR_COST = 5
SCALAR_COST = 4
"""Time of a cycle on VectorE and ScalarE, by their clocks of 0.96 and 1.2 GHz."""

SHORTEST = 64
"""Cycles of the shortest instruction."""


def vector_is_free_first(spent: list[int], vector_cycles: int, scalar_cycles: int) -> bool:
    """Whether VectorE would be done with an instruction before ScalarE; charges it to the one that gets it.

    `spent` holds the time that each of the two has been given so far, in units of 1 / 4.8 GHz.
    """
    vector = spent[0] + vector_cycles * VECTOR_COST
    scalar = spent[1] + scalar_cycles * SCALAR_COST
    if vector <= scalar:
        spent[0] = vector
        return True
    spent[1] = scalar
    return False


def charge_vector(spent: list[int], cycles: int) -> None:
    """Account for work that only VectorE can do."""
    spent[0] += max(SHORTEST, cycles) * VECTOR_COST


def charge_scalar(spent: list[int], cycles: int) -> None:
    """Account for work that ScalarE has been given."""
    spent[1] += max(SHORTEST, cycles) * SCALAR_COST
