"""Sizes and limits of one trn2 NeuronCore (NeuronCore-v3).

Sources: aws-neuron-sdk docs, guides/architecture/trainium2_arch (sizes, clocks) and nki-aps (access patterns);
the usable share of SBUF from nkipy, HardwareConstants.h.
"""

PARTITIONS = 128
QUADRANT = 32
"""Start partitions are multiples of this; nc_stream_shuffle and VectorE transposes work inside one."""

SBUF_BYTES_PER_PARTITION = 212_984
"""224 KiB less what the runtime keeps (16 KiB + 8 bytes)."""
SBUF_ALIGN = 32
"""A free-dimension allocation is rounded up to whole 32-byte lines."""

PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
PSUM_WORD_BYTES = 4
PSUM_MAX_ELEMENTS = 4096
"""fp32 elements of a PSUM partition: 16 KiB."""

STATIONARY_FREE_MAX = 128
MOVING_FREE_MAX = 512
BN_STATS_FREE_MAX = 512
MAX8 = 8
MAX8_ELEMENTS = 16_384
"""Values that max8 finds, and elements a partition that it looks at."""
VECTOR_TRANSPOSE_MAX = 32
DOUBLE_ROW_FREE_DIM = 2

MAX_VIEW_RANK = 5
MAX_FREE_DIMS = 3
"""Free dimensions of one operand of a compute instruction: most have no room for a fourth."""
MAX_REDUCED_DIMS = 4
"""Of the data of tensor_reduce, max8 and their kin."""
MAX_STRIDE = 2**15 - 1
MAX_FREE_SIZE = 2**16 - 1

MAX_EXACT_INT = 2**24
"""Integers up to this magnitude survive the conversion to fp32."""
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

MAX_ACTIVATION_FUNCTIONS = 8
MAX_PROGRAMS = 2
"""Physical cores of a logical core at LNC=2."""
