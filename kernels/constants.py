"""Numbers that the kernels bake in and the references share."""

K_MULTIPLE = 128
"""k of a GEMM is a multiple of this: partitions of SBUF."""

N_MULTIPLE = 32
"""n of a GEMM is a multiple of this: rows that share an e8m0 scale."""

TWO_CORE_N_MULTIPLE = 256
"""n of a GEMM on two cores is a multiple of this: 128 output columns each."""

M_MAX = 512
"""Rows of x that a GEMM kernel takes: the moving columns of one matmul."""

HC = 4
"""Residual streams of a hyper-connection (hc_mult)."""

SINKHORN_ITERS = 20
HC_EPS = 1e-6
NORM_EPS = 1e-20

FP8_BLOCK = 32
"""Columns that share one power-of-two scale in the activation round trip of `fp8_linear`."""

FP8_MAX = 224.0
"""Largest magnitude that the round trip encodes: 448 / 2, below the hardware's 240."""

AMAX_FLOOR = 1e-4
"""Smallest block maximum that sets a scale; DeepSeek's reference quantizer clamps at the same value."""

MANTISSA_BITS = 23
"""Of fp32: e8m0 byte b is the number whose bits are b << MANTISSA_BITS."""

SWIGLU_LIMIT = 10.0
"""Bound of gate (above) and up (both sides) in DeepSeek-V4.1's experts."""

LOWEST_MAXIMUM = -1e30
HIGHEST_MAXIMUM = 3e38
"""What bounds the number that is subtracted before exp: infinite sinks and queries without keys stay free of NaN."""

ATTENTION_HEADS_MAX = 64
"""Heads of a query that the attention kernel takes."""

ATTENTION_KEYS_MAX = 1024
"""Entries of a query's lists, each padded to a multiple of 32, that the attention kernel takes: two PSUM banks."""

BAND_ROWS = 512
"""Most output rows in a band of the kernel layout: what one PSUM bank holds of a row of x in fp32."""

MINUS_INFINITY_BITS = -(1 << 23)
"""The int32 whose bits are fp32's -inf."""

WINDOW = 128
"""Tokens that a query's window holds, itself included."""

WINDOW_TILE = 64
"""Queries of a tile of the dense window kernel: two heads of them share the partitions."""

CANDIDATE_BLOCK = 8
"""Consecutive entries of the index that are chosen or left together when candidates are picked."""
