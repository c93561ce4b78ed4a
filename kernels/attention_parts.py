"""Steps that the attention kernels share: softmax with a sink, and what leaves PSUM."""

import nki.isa as nisa
import nki.language as nl

from .constants import HIGHEST_MAXIMUM, LOWEST_MAXIMUM
from .engine_balance import charge_scalar, charge_vector, vector_is_free_first
from .records import EngineClock


def negate_sinks(tile: nl.ndarray) -> None:
    """tile fp32 = -tile, infinities replaced by finite bounds."""
    nisa.tensor_scalar(
        dst=tile, data=tile, op0=nl.maximum, operand0=LOWEST_MAXIMUM, op1=nl.minimum, operand1=HIGHEST_MAXIMUM
    )
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=-1.0)


def softmax(clock: EngineClock, shares: nl.ndarray, scores: nl.ndarray, sinks: nl.ndarray, scale: float) -> nl.ndarray:
    """shares bf16 = exp(scale * scores - maximum); returns 1 / (their fp32 sum with the sink's), fp32 [rows, 1].

    scores fp32 [rows, keys] in PSUM, sinks fp32 [rows or more, 1] what negate_sinks left.
    """
    rows, width = scores.shape
    negative = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=negative, op=nl.maximum, data=scores, axis=1, negate=True)
    nisa.scalar_tensor_tensor(
        dst=negative, data=negative, op0=nl.multiply, operand0=scale, op1=nl.minimum, operand1=sinks[0:rows, :]
    )
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(
        dst=shares, op=nl.exp, data=scores, reduce_op=nl.add, reduce_res=total, bias=negative, scale=scale
    )
    of_sink = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=of_sink, op=nl.exp, data=sinks[0:rows, :], bias=negative, scale=-1.0)
    nisa.tensor_tensor(dst=total, data1=total, data2=of_sink, op=nl.add)
    nisa.reciprocal(dst=total, data=total)
    charge_vector(clock, width)
    charge_scalar(clock, width)
    return total


def scale_out(clock: EngineClock, dst: nl.ndarray, src: nl.ndarray, factor: nl.ndarray) -> None:
    """dst = src * factor, from PSUM to SBUF, one factor a partition, on VectorE or ScalarE."""
    columns = src.shape[1]
    if vector_is_free_first(clock, columns, columns):
        nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=factor)
    else:
        nisa.activation(dst=dst, op=nl.copy, data=src, scale=factor)


def copy_out(clock: EngineClock, dst: nl.ndarray, src: nl.ndarray) -> None:
    """dst = src, from PSUM to SBUF in bf16, on whichever of VectorE and ScalarE is free first."""
    elements = 1
    for index in range(1, len(src.shape)):
        elements *= src.shape[index]
    engine = nisa.engine.vector if vector_is_free_first(clock, elements // 2, elements) else nisa.engine.scalar
    nisa.tensor_copy(dst=dst, src=src, engine=engine)
