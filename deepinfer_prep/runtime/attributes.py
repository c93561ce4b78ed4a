"""The names of the attributes that loading and preparing put on a model's tensors, and that kernels take."""

from __future__ import annotations

SCALE = "sf"
"""The scale of a quantized weight, in the form that its checkpoint or its loader gives it."""

KERNEL_WEIGHT = "_nki_weight"
"""uint8: the bytes of a quantized weight, over the same memory."""
KERNEL_ORDER = "_nki_order"
"""`files.bands.BandedWeight`: that a weight's bytes stand in the kernels' order, and its shape; absent where they are
row-major. The parameter is then uint8 with the last two axes as one, so that nothing takes its elements for values."""
KERNEL_SCALE = "_nki_scale"
"""uint8, e8m0: one byte for 32x32 values of an e4m3 weight, for one row and 32 values of an fp4 weight."""
BLOCK128_SCALE = "_nki_block_scale"
"""float32: one value for 128x128 values, where that is no power of two."""
KERNEL_SCALES = (KERNEL_SCALE, BLOCK128_SCALE)

HI, LO = "_nki_fn_hi", "_nki_fn_lo"
"""bf16: the two matrices that a split float32 matrix is the sum of."""
SPLIT_VERSION = "_nki_fn_version"
"""Counts the changes of a matrix when it was split, so that a later change in place shows."""

LOADED_SCALES = "_deepinfer_loaded_scales"
"""Attribute of a module: the scales of its own tensors, by the name of the tensor, as loading attached them. Copying or
wrapping a parameter drops its attributes, but not those of the module that holds it."""
LOADED_ORDERS = "_deepinfer_loaded_orders"
"""Attribute of a module: the `_nki_order` of its own tensors, in the same way."""

ATTACHED = (SCALE, KERNEL_WEIGHT, KERNEL_ORDER, *KERNEL_SCALES, HI, LO, SPLIT_VERSION)
"""All that a tensor may have."""
