"""A cost model: the instruction record turned into busy time per engine of one trn2 core.

It is a model, not a measurement. It assumes that engines overlap perfectly, so the busiest one bounds the kernel. At
its best, instructions of one engine are pipelined, so their fixed latencies vanish behind each other; pessimistically,
one that reads what the one before it on its engine has written waits for it. Collisions of two engines in a PSUM bank
are in neither: no page says what they cost. Each constant says where it comes from; "assumed" marks those that no
public page gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .record import Instruction, Operand

HERTZ = {"tensor": 2.4e9, "vector": 0.96e9, "scalar": 1.2e9, "gpsimd": 1.2e9}
"""Clocks: aws-neuron-sdk docs, nki/guides/architecture/trainium2_arch."""

MIN_CYCLES = 64
"""Least distance between two instructions of an engine: nki/deep-dives/nki_perf_guide, nki/api/nki.api.shared."""
PE_ROWS = 128
FP32_PASSES = 4
ONEZERO_FP32_PASSES = 2
TRANSPOSE_FP32_PASSES = 2
"""nki/api/nki.isa.nc_matmul (onezero halves fp32), trainium2_arch (fp32 transposes twice as fast as fp32 matmuls)."""
RECIPROCAL_CYCLES = 8
"""Cycles an element of VectorE's reciprocal: nki/api/nki.api.shared (engine selection)."""
READ_OUT_CYCLES = 64
"""Reading the accumulator registers is one more small instruction: nki/api/nki.isa.activation."""
GPSIMD_SETUP_CYCLES = 150
"""iota and affine_select take 150 + N cycles: cost tables of nki.isa.iota and affine_select up to SDK 2.26."""
GPSIMD_CYCLES = 4
"""Cycles an element of other GpSimd work: nki.api.shared gives 4x ScalarE for rsqrt; assumed for the rest."""
DYNAMIC_CYCLES = 600
"""Least extra cost of an operand with a run-time offset: nki/deep-dives/nki-dynamic-loops."""

DMA_ENGINES = 16
DMA_ENGINE_BYTES_PER_SECOND = 23e9
"""nki/deep-dives/nki-dma-bandwidth-guide: 23 B/ns each, 368 GB/s a core."""
DMA_PACKET_SECONDS = 20e-9
"""Fixed cost of a contiguous run. Assumed: it makes 8 KiB runs reach 261 of 272 GB/s, as measured on trn1 by others."""
DMA_TRANSPOSE_EFFICIENCY = {"shared_hbm": 0.9, "private_hbm": 0.9, "sbuf": 0.5}
"""By source: trainium2_arch (DMA transpose)."""
HWDGE_ISSUE_SECONDS = 0.6e-6
"""Issue of one hardware-DGE DMA on its queue: trainium2_arch. For swdge the same is assumed, on GpSimd."""
HBM_BYTES_PER_SECOND = 2.9e12 / 8
"""A core's share of its chip's HBM: trainium2_arch (2.9 TB/s, 8 cores)."""

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma", "hbm")
"""What can bound a kernel: the engines, SyncE's DMA queue, the DMA engines together, the core's share of HBM."""

_TWO_BYTE_FLOATS = ("bfloat16", "float16")


@dataclass(frozen=True)
class ProgramCost:
    """Busy seconds of each of ENGINES in one program."""

    seconds: dict[str, float]

    @property
    def bound_by(self) -> str:
        """The busiest engine."""
        return max(ENGINES, key=lambda name: self.seconds[name])

    @property
    def bound(self) -> float:
        """Its busy time: a lower bound of the program's."""
        return self.seconds[self.bound_by]


@dataclass(frozen=True)
class KernelCost:
    """The programs of a kernel, which run at the same time on one core each."""

    programs: tuple[ProgramCost, ...]

    @property
    def slowest(self) -> ProgramCost:
        return max(self.programs, key=lambda program: program.bound)

    @property
    def bound(self) -> float:
        """Seconds of the slowest program."""
        return self.slowest.bound

    @property
    def bound_by(self) -> str:
        """The engine that sets it."""
        return self.slowest.bound_by


@dataclass(frozen=True)
class Assumptions:
    """What the published figures leave open."""

    stepped_stationary_cycles: int
    """Least cycles of a matmul whose stationary operand is not contiguous: 128 rows, if loading it is not fast."""
    wide_step: float
    """Factor of an access whose innermost step is above 16 bytes: trainium_inferentia2_arch (performance consideration)
    gives each engine's read or write interface, TensorE's included, half the bandwidth there, and all of it below."""
    narrow_psum: float
    """Factor of an instruction that reads one-byte elements from PSUM, for which no rate is published."""
    dma_issue: float
    """Seconds that a DMA takes on a queue where its kind of descriptors is left to the compiler."""
    hbm: float
    """Share of the peak bandwidth that is reached."""
    chain: dict[str, float]
    """Seconds an instruction of an engine waits for the one before it if it reads what that has written."""
    shared_port: bool
    """Whether GpSimd waits while VectorE moves several elements a cycle within SBUF: nki_perf_guide."""


CHAIN_SECONDS = {"vector": 100 / HERTZ["vector"], "scalar": 189e-9 - MIN_CYCLES / HERTZ["scalar"]}
"""About 100 cycles of VectorE when instructions cannot be pipelined (nki_perf_guide); on ScalarE, dependent
instructions of 64 cycles were measured 189 ns apart (on trn1, by others)."""

BEST = Assumptions(0, 1.0, 1.0, 0.0, 1.0, {}, False)
PESSIMISTIC = Assumptions(128, 2.0, 2.0, HWDGE_ISSUE_SECONDS, 0.9, CHAIN_SECONDS, True)
WIDE_STEP_BYTES = 16


def kernel_cost(instructions: Iterable[Instruction], assumptions: Assumptions = BEST) -> KernelCost:
    """The cost of a recorded kernel."""
    programs: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(ENGINES, 0.0))
    latest: dict[tuple[int, str], Instruction] = {}
    for instruction in instructions:
        totals = programs[instruction.program]
        for engine, seconds in busy_seconds(instruction, assumptions).items():
            totals[engine] += seconds
        if instruction.engine in assumptions.chain:
            before = latest.get((instruction.program, instruction.engine))
            if before is not None and _depends(instruction, before):
                totals[instruction.engine] += assumptions.chain[instruction.engine]
            latest[instruction.program, instruction.engine] = instruction
        if assumptions.shared_port and _holds_shared_port(instruction):
            totals["gpsimd"] += busy_seconds(instruction, assumptions)["vector"]
    return KernelCost(tuple(ProgramCost(programs[index]) for index in sorted(programs)))


def _depends(instruction: Instruction, before: Instruction) -> bool:
    """Whether it reads what the instruction before it has written."""
    return any(read.touches(written) for read in instruction.reads for written in before.writes)


def _holds_shared_port(instruction: Instruction) -> bool:
    """Whether VectorE moves several elements a cycle, both ends in SBUF."""
    if instruction.engine != "vector" or instruction.op not in ("tensor_copy", "tensor_scalar"):
        return False
    return _copy_speedup(instruction) > 1 and all(operand.buffer == "sbuf" for operand in instruction.operands)


def hbm_floor(size: int, programs: int) -> float:
    """Seconds to read `size` bytes once from HBM, split over the cores of `programs` programs."""
    return size / (HBM_BYTES_PER_SECOND * programs)


def busy_seconds(instruction: Instruction, assumptions: Assumptions = BEST) -> dict[str, float]:
    """How long an instruction keeps which engine busy."""
    if instruction.engine == "dma":
        return _dma_seconds(instruction, assumptions)
    if instruction.engine == "sync":
        return {}
    if instruction.engine == "tensor":
        cycles = _tensor_cycles(instruction, assumptions.wide_step)
    else:
        cycles = _CYCLES[instruction.engine](instruction) * _access_factor(instruction, assumptions)
    if instruction.op == "nc_matmul" and instruction.operand("stationary").inner_step > 1:
        cycles = max(cycles, assumptions.stepped_stationary_cycles)
    if instruction.flag("dynamic") == "True":
        cycles += DYNAMIC_CYCLES
    return {instruction.engine: cycles / HERTZ[instruction.engine]}


def _access_factor(instruction: Instruction, assumptions: Assumptions) -> float:
    """How much slower the accesses of VectorE, ScalarE or GpSimd make it than its cycles alone."""
    factor = 1.0
    if any(_is_wide(operand) for operand in instruction.operands):
        factor *= assumptions.wide_step
    if any(operand.buffer == "psum" and operand.itemsize == 1 for operand in instruction.reads):
        factor *= assumptions.narrow_psum
    return factor


def _is_wide(operand: Operand) -> bool:
    return operand.inner_step * operand.itemsize > WIDE_STEP_BYTES


# TensorE


def _tensor_cycles(instruction: Instruction, wide_step: float) -> float:
    """Streaming of the moving operand; loading the stationary one hides behind the matmul before."""
    fp32 = instruction.reads[0].dtype == "float32"
    if instruction.op == "nc_transpose":
        cycles = max(int(instruction.flag("K")), min(MIN_CYCLES, int(instruction.flag("M"))))
        return cycles * (TRANSPOSE_FP32_PASSES if fp32 else 1)
    passes = 1
    if fp32:
        transposes = instruction.flag("transpose") == "True"
        passes = ONEZERO_FP32_PASSES if instruction.flag("onezero") == "True" else FP32_PASSES
        passes = TRANSPOSE_FP32_PASSES if transposes else passes
    concurrent = PE_ROWS // int(instruction.flag("rows"))
    streamed = float(instruction.flag("N"))
    if _is_wide(instruction.operand("moving")) or _is_wide(instruction.operand("dst")):
        streamed *= wide_step
    return max(streamed, MIN_CYCLES) * passes / concurrent


# VectorE


def _vector_cycles(instruction: Instruction) -> float:
    n = instruction.elements
    if instruction.op == "reciprocal" or "reciprocal" in (instruction.flag("alu"), instruction.flag("alu1")):
        return max(MIN_CYCLES, RECIPROCAL_CYCLES * n)
    if instruction.op in ("tensor_copy", "tensor_scalar"):
        return max(MIN_CYCLES, n / _copy_speedup(instruction))
    if instruction.op in ("tensor_tensor", "scalar_tensor_tensor", "tensor_copy_predicated", "select_reduce"):
        return max(MIN_CYCLES, n * _two_input_passes(instruction))
    if instruction.op == "tensor_scalar_reduce":
        return max(MIN_CYCLES, n) + READ_OUT_CYCLES
    return max(MIN_CYCLES, n)


def _copy_speedup(instruction: Instruction) -> int:
    """VectorE's performance mode for tensor_copy and tensor_scalar: trainium2_arch (Vector Engine)."""
    ends = instruction.operand("dst"), instruction.reads[0]
    if any(end.dtype not in _TWO_BYTE_FLOATS for end in ends):
        return 1
    contiguous = all(end.inner_step == 1 for end in ends)
    in_psum = sum(end.buffer == "psum" for end in ends)
    if in_psum == 0:
        return 4 if contiguous else 2
    return 2 if in_psum == 1 and contiguous else 1


def _two_input_passes(instruction: Instruction) -> int:
    """Cycles an element: 2, but 1 with a PSUM input (cost table of nki.isa.tensor_tensor up to SDK 2.26).

    All-bf16 tensor_tensor runs at twice that rate (trainium2_arch, performance mode).
    """
    inputs = [operand for operand in instruction.reads if operand.elements > 1 or instruction.elements == 1][:2]
    if any(operand.buffer == "psum" for operand in inputs):
        return 1
    two_bytes = all(o.dtype in _TWO_BYTE_FLOATS for o in (*inputs, instruction.operand("dst")))
    return 1 if two_bytes and instruction.op == "tensor_tensor" else 2


# ScalarE and GpSimd


def _scalar_cycles(instruction: Instruction) -> float:
    read_out = READ_OUT_CYCLES if instruction.flag("reads_out") == "True" else 0
    return max(MIN_CYCLES, instruction.elements) + read_out


def _gpsimd_cycles(instruction: Instruction) -> float:
    if instruction.op in ("iota", "affine_select"):
        return GPSIMD_SETUP_CYCLES + instruction.elements
    return max(MIN_CYCLES, GPSIMD_CYCLES * instruction.elements)


_CYCLES = {"vector": _vector_cycles, "scalar": _scalar_cycles, "gpsimd": _gpsimd_cycles}


# DMA


def _dma_seconds(instruction: Instruction, assumptions: Assumptions) -> dict[str, float]:
    ends = [operand for operand in instruction.operands if operand.role in ("dst", "src", "constant")]
    size = max(end.bytes for end in ends)
    per_engine = size / DMA_ENGINE_BYTES_PER_SECOND + _packets(ends) * DMA_PACKET_SECONDS
    if instruction.op == "dma_transpose":
        per_engine /= DMA_TRANSPOSE_EFFICIENCY[instruction.operand("src").buffer]
    busy = {"dma": per_engine / DMA_ENGINES}
    hbm = sum(end.bytes for end in ends if end.buffer.endswith("hbm"))
    busy["hbm"] = hbm / (HBM_BYTES_PER_SECOND * assumptions.hbm)
    mode, queue = instruction.flag("dge"), instruction.flag("queue")
    if mode == "hwdge":
        busy["scalar" if queue == "scalar" else "sync"] = HWDGE_ISSUE_SECONDS
    elif mode == "swdge":
        busy["gpsimd"] = HWDGE_ISSUE_SECONDS
    elif assumptions.dma_issue:
        busy["sync"] = assumptions.dma_issue
    return busy


def _packets(ends: Sequence[Operand]) -> float:
    """Contiguous runs that the transfer splits into: as long as both sides allow."""
    elements = ends[0].partitions * ends[0].elements
    return elements / min(end.run_bytes // end.itemsize for end in ends)
