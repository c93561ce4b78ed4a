"""Every rule the emulator enforces, with the public page it comes from.

Pages are named as in the aws-neuron-sdk documentation (SDK 2.32, NKI 0.6). A source that starts with "emulator"
is a choice of ours, made where the documentation is silent: what it does not list as allowed is refused.
"""

from __future__ import annotations

from .errors import Rule

_SDK = "aws-neuron-sdk docs: "
_APS = _SDK + "nki/deep-dives/nki-aps"
_TRN2 = _SDK + "nki/guides/architecture/trainium2_arch"
_TRN1 = _SDK + "nki/guides/architecture/trainium_inferentia2_arch"
_SHARED = _SDK + "nki/api/nki.api.shared"
_GUIDE = _SDK + "nki/get-started/nki-language-guide"
_LNC = _SDK + "nki/get-started/about/lnc"
_LOOPS = _SDK + "nki/deep-dives/nki-dynamic-loops"
_MIGRATION = _SDK + "nki/migration"
_LANGUAGE = _SDK + "nki/api/nki.language"


def _isa(op: str) -> str:
    return f"{_SDK}nki/api/nki.isa.{op}"


# Names, values and types
NOT_MODELLED = Rule(
    "not-modelled",
    "only the documented subset that is listed in the emulator's README may be used",
    "emulator: an unlisted name is refused, never guessed",
)
TRN2_ONLY = Rule(
    "trn2-only", "operators and types of NeuronCore-v4 (trn3) do not exist on trn2", _SHARED + " and per-op notes"
)
NO_DIVIDE = Rule(
    "no-divide",
    "divide, mod and fmod do not run on the device: use reciprocal and multiply",
    _SDK + "nki/guides/nki_simulator",
)
OPERAND_KIND = Rule("operand-kind", "operands are tensors, registers or constants as the page lists", _SDK + "nki/api")
ENUMS = Rule("enums", "engines, modes and buffers are enum members, never integers or strings", _MIGRATION)
NO_OPERATORS = Rule(
    "no-operators",
    "tensors and registers have no run-time value in Python: no arithmetic, comparison, truth value or iteration",
    _GUIDE,
)
DTYPE = Rule("dtype", "the operand's element type is not one this instruction takes", _SHARED)
DTYPE_MATCH = Rule("dtype-match", "both sides must have the same element type", _SDK + "nki/api (per instruction)")

# Tensors, views and access patterns
SHAPE_ARGS = Rule("shape", "sizes are positive integers; on-chip tensors have a partition and a free dimension", _GUIDE)
PARTITION_COUNT = Rule("partition-count", "an on-chip operand spans 1 to 128 partitions", _TRN2)
PARTITION_START = Rule(
    "partition-start",
    "a start partition is 0 above 64 partitions, 0 or 64 above 32, else a multiple of 32",
    _TRN1,
)
PARTITION_STEP = Rule("partition-step", "the partition dimension has step 1 and cannot be broadcast or permuted", _APS)
INDEX_RANGE = Rule("index-range", "an index or slice lies inside the tensor; it is not clamped", _GUIDE)
INDEX_KIND = Rule("index-kind", "index with integers, slices, nl.ds and `...` only", _GUIDE)
VIEW = Rule("view", "a view addresses the storage it is taken from, without copying", _LANGUAGE + " (tensor views)")
VIEW_RANK = Rule("view-rank", "an access pattern has at most a partition and four free dimensions", _APS)
FREE_DIMS = Rule(
    "free-dims",
    "a compute operand steps through at most three free dimensions, counted after merging",
    _APS + " (most instructions support 1D to 3D; it does not say which support 4D)",
)
STRIDE_RANGE = Rule(
    "stride-range", "in an engine's pattern an element step is a signed and a size an unsigned 16-bit number", _APS
)
BROADCAST_WRITE = Rule("broadcast-write", "a destination addresses every element once", _APS)
SAME_SHAPE = Rule(
    "same-shape",
    "elementwise operands have equal partitions and equally many elements in each; nothing is broadcast",
    _isa("tensor_tensor"),
)
OVERLAP = Rule(
    "overlap",
    "a destination may coincide with a source element for element, but not overlap it otherwise",
    "emulator: an engine streams reads ahead of writes, the result of a partial overlap is unspecified",
)

# Memory
BUFFER = Rule("buffer", "the operand lies in a memory that this instruction's engine can reach", _TRN2)
DMA_NO_PSUM = Rule("dma-no-psum", "DMA reaches HBM and SBUF, not PSUM", _MIGRATION)
GPSIMD_NO_PSUM = Rule("gpsimd-no-psum", "the GpSimd engine cannot access PSUM", _TRN2)
BOTH_PSUM = Rule("both-psum", "at most one of the two input tensors may lie in PSUM", _isa("tensor_tensor"))
UNWRITTEN_READ = Rule("unwritten-read", "memory is not zeroed: write an element before reading it", _GUIDE)
DEAD_TENSOR = Rule(
    "dead-tensor", "a tensor allocated inside a dynamic loop's body does not exist outside that trip", _LOOPS
)
SBUF_CAPACITY = Rule(
    "sbuf-capacity",
    "SBUF tensors in use at once fit 212984 bytes a partition; those of a dynamic loop are in use for all of it",
    _TRN2,
)
PSUM_CAPACITY = Rule(
    "psum-capacity",
    "PSUM tensors in use at once fit 8 banks of 2 KiB a partition; those of a dynamic loop are in use for all of it",
    _TRN2,
)
PSUM_BANK = Rule("psum-bank", "a matmul or transpose writes inside one 2 KiB PSUM bank", _isa("nc_matmul"))
PSUM_WORD = Rule(
    "psum-word",
    "a PSUM write covers whole 4-byte words of a partition",
    "emulator: an odd number of 2-byte columns is reported as unsafe on devices",
)
PSUM_SIZE = Rule("psum-size", "an operand in PSUM has at most 4096 fp32 elements (16 KiB) a partition", _TRN2)

# Kernels, programs and results
KERNEL_ARGUMENTS = Rule(
    "kernel-arguments",
    "arguments are arrays, numbers, strings, None, types, enums, NKIObjects, tuples and lists, positional or by name",
    _MIGRATION,
)  # fmt: skip
READ_ONLY_ARGUMENT = Rule(
    "read-only-argument",
    "an argument that a kernel writes is a contiguous array that may be written: the result shows in it",
    "emulator: a copy would hide what the kernel wrote",
)
NO_FN_TENSOR = Rule(
    "no-e4m3fn-argument", "trn2 has no float8_e4m3fn: pass the bytes as uint8 and view them as float8_e4m3",
    _SDK + "compiler/error-codes/EVRF051",
)  # fmt: skip
RESULT = Rule(
    "result",
    "a result is a whole tensor in shared_hbm, its own or an argument, in any shape of as many elements",
    _MIGRATION,
)
RESULT_UNWRITTEN = Rule("result-unwritten", "every element of a result is written by some program", _GUIDE)
DISJOINT_WRITES = Rule(
    "disjoint-writes", "the two cores write disjoint parts of shared memory, or the same values", _LNC
)
CROSS_CORE_READ = Rule("cross-core-read", "reading what the other core wrote needs nisa.core_barrier first", _LNC)
GRID = Rule("grid", "the launch grid is one integer, 1 or 2 on trn2", _LNC)
SAME_STRUCTURE = Rule(
    "same-structure", "both programs allocate the same shared tensors and return the same results", _LNC
)
SAME_CONTROL_FLOW = Rule("same-control-flow", "both cores take the same dynamic loops and trip counts", _LNC)
CORE_BARRIER = Rule(
    "core-barrier", "a barrier names shared_hbm data and cores (0, 1), and both programs reach it", _isa("core_barrier")
)
SHARED_NAME = Rule(
    "shared-name",
    "a shared_hbm tensor that is no result has a name, by which the cores find it",
    _LANGUAGE + ".ndarray",
)

# Registers and dynamic loops
REGISTER = Rule("register", "a register holds one int32; a loop index is read only", _isa("register_load"))
LOOP_BODY = Rule(
    "loop-body",
    "a dynamic loop's body is traced once: every trip issues the same instructions, and fori_loop's returns nothing",
    _LOOPS,
)
LOOP_BOUNDS = Rule("loop-bounds", "bounds are int32 numbers or registers, the step a positive constant", _LOOPS)
LOOP_NESTING = Rule(
    "loop-nesting",
    "a dynamic loop does not stand inside another",
    "emulator: nested dynamic loops are on the known-issues lists of NKI 0.3 to 0.6",
)
LOOP_ACCUMULATE = Rule(
    "loop-accumulate",
    "inside a dynamic loop a matmul onto a tile from outside it says accumulate=True or False",
    "emulator: what accumulate=None means over several trips is not documented",
)

# Values
VALUE_INT = Rule("int32-exact", "arithmetic is fp32: integers beyond 2^24 would be rounded", _isa("tensor_tensor"))
CONSTANT = Rule("constant", "a constant is a 32-bit int or an fp32 float that its operand type can hold", _GUIDE)
MEMSET_VALUE = Rule("memset-value", "integer tiles are filled with an int, float tiles with a number", _MIGRATION)
FP8_OVERFLOW = Rule(
    "fp8-overflow",
    "a value written to fp8 is finite in range (e4m3: below 248, which rounds to 240); clamp first",
    "emulator: whether trn2 saturates or writes inf is not documented",
)
NAN_TO_INT = Rule("nan-to-int", "NaN has no integer value", "emulator: the conversion is not documented")
ACTIVATION_RANGE = Rule("activation-range", "the function's input lies in its valid range", _SHARED + " (tbl-act-func)")

# Instructions
ENGINE = Rule("engine", "the instruction runs on this engine with these operands and operators", _SDK + "nki/api")
GPSIMD_NO_FP8 = Rule(
    "gpsimd-no-fp8", "GpSimd takes no fp8 operands", "emulator: reported by kernel authors, not documented"
)
OP_CLASS = Rule("op-class", "operators are all bitvec or all arithmetic, and of the kind the operand needs", _SHARED)
BITVEC = Rule(
    "bitvec",
    "bitvec operators take integers of one type on both sides, on VectorE; reductions only uint8/16/32 and int32",
    _isa("tensor_scalar"),
)
SCALAR_OPERAND = Rule(
    "scalar-operand",
    "a per-partition operand has shape (partitions, 1): float32, for bitvec operators data's integer type",
    _isa("tensor_scalar"),
)
UNARY = Rule("unary", "a unary operator takes no operand (None or 0)", _isa("tensor_scalar"))
REDUCE_AXES = Rule("reduce-axes", "only trailing free axes can be reduced", _isa("tensor_reduce"))
REDUCE_OP = Rule("reduce-op", "this operator does not reduce here", _SHARED)
REDUCE_CMD = Rule("reduce-cmd", "reduce_cmd, reduce_op and reduce_res go together", _isa("activation"))
ACTIVATION = Rule("activation", "the function is one ScalarE has on trn2", _SHARED + " (tbl-act-func)")
ACTIVATION_COUNT = Rule(
    "activation-count", "a program uses at most 8 activation functions",
    "emulator: compiler error NCC_INLA001 as reported by kernel authors",
)  # fmt: skip
DMA_COUNT = Rule("dma-count", "source and destination of a DMA have the same number of elements", _isa("dma_copy"))
DMA_MODE = Rule(
    "dma-mode",
    "hwdge does not cast, none has fixed addresses, only hwdge takes an engine, priority is trn3",
    _isa("dma_copy"),
)
DMA_TRANSPOSE = Rule(
    "dma-transpose",
    "2- and 4-byte types, dst in SBUF with exactly the transposed shape, axes (1,0), (2,1,0) or (3,1,2,0)",
    _isa("dma_transpose"),
)
DYNAMIC_OFFSET = Rule(
    "dynamic-offset",
    "a run-time offset is a register or a (1,1) integer SBUF tile (on chip: uint32), one a view, and stays inside",
    _APS,
)
GATHER = Rule(
    "gather",
    "run-time row indices are a (P, 1) int32 or uint32 SBUF tile, for whole rows of a tensor in HBM, in a swdge DMA",
    _LANGUAGE + " (tensor views) and nki.isa.dma_copy",
)
GATHER_ROW = Rule(
    "gather-row",
    "a row index lies inside the tensor, or is skipped with oob_mode.skip; what is written twice is the same twice",
    _isa("dma_copy") + " (oob_mode); the order of two writes to a row is not stated",
)
PREDICATE = Rule("predicate", "a predicate is an unsigned (or as listed) integer tile", _isa("tensor_copy_predicated"))
IOTA_PATTERN = Rule(
    "iota-pattern", "a pattern is up to four [step, count] pairs that cover the free elements", _isa("iota")
)
MATMUL_SHAPE = Rule(
    "matmul-shape",
    "stationary [K, M], moving [K, N], dst [M, N] with K, M <= 128 and N <= 512, both starting at one partition",
    _isa("nc_matmul"),
)
MATMUL_DTYPE = Rule(
    "matmul-dtype", "fp8, bf16 and fp16 mix freely, fp32 only with fp32; dst is fp32 on trn2", _isa("nc_matmul")
)
MATMUL_ACCUMULATE = Rule(
    "matmul-accumulate",
    "accumulate adds to what a matmul wrote: the first write of a group overwrites, and nothing but zeros may be there",
    _isa("nc_matmul"),
)
MATMUL_TILING = Rule(
    "matmul-tiling",
    "tile_size is (32|64|128, 32|64|128) and tile_position a multiple of it, which dst's partitions follow, both given",
    _isa("nc_matmul"),
)
MATMUL_ONEZERO = Rule(
    "matmul-onezero", "the onezero hint is given only for operands of zeros and ones", _isa("nc_matmul")
)
MATMUL_DOUBLE_ROW = Rule(
    "matmul-double-row", "double_row takes fp8 [K, 2, M] and [K, 2, N], untransposed and untiled", _isa("nc_matmul")
)
TRANSPOSE = Rule(
    "transpose",
    "dst is [free, partitions] of data's type; TensorE reads SBUF, writes PSUM, <= 128x128; VectorE <= 32x32",
    _isa("nc_transpose"),
)
FP8_TRANSPOSE = Rule(
    "fp8-transpose", "TensorE writes a transposed fp8 element into 16 bits: dst has element step 2", _TRN2
)
BN_SIZE = Rule(
    "bn-size",
    "bn_stats takes up to 512 elements a partition and gives 6; bn_aggr takes groups of three and gives 2",
    _isa("bn_stats") + " and bn_aggr",
)
LOCAL_GATHER = Rule(
    "local-gather",
    "uint16 indices and data in SBUF, in groups of 16 partitions; dst holds num_valid_indices elements a partition",
    _isa("local_gather"),
)
SENDRECV = Rule(
    "sendrecv", "both cores exchange SBUF tiles of one size and type with each other, on one pipe", _isa("sendrecv")
)
IDLE_PROGRAM = Rule(
    "idle-program",
    "both programs of a launch issue instructions: each core runs the same program on its share",
    _LNC,
)
MAX8 = Rule(
    "max8",
    "8 to 16384 numbers a partition, 8 values and uint16 or uint32 places; a value that is searched stands in data",
    _isa("max8") + ", nc_find_index8, nc_match_replace8",
)
SHUFFLE_MASK = Rule("shuffle-mask", "a shuffle mask has 32 entries, 0..31 or 255", _isa("nc_stream_shuffle"))


ALL: dict[str, Rule] = {rule.name: rule for rule in list(globals().values()) if isinstance(rule, Rule)}
