"""The names that an output is made of: files, folders, tensor suffixes and header marks.

They are a contract with everything that reads an output: a change here is a new format version.
"""

from __future__ import annotations

SHARD_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PREFERRED_INDEX = "model" + INDEX_SUFFIX
"""The index that loaders look for first; of several, this one counts."""

MANIFEST_NAME = "neuron_manifest.json"
"""The file that makes a folder a finished output; written last."""
SIDECAR_FOLDER = "neuron"
"""Folder inside an output that holds the sidecar: loaders that take every safetensors file beside the index, whatever
the index names, must find nothing there but the source's tensors."""
SIDECAR_PREFIX = SIDECAR_FOLDER + "/neuron-"
SIDECAR_INDEX = SIDECAR_FOLDER + "/neuron" + INDEX_SUFFIX

HI_SUFFIX, LO_SUFFIX = ".hi", ".lo"
"""Suffixes of the two bf16 tensors that a split fp32 matrix has in the sidecar."""
KERNEL_SCALE_SUFFIX = ".nki_scale"
"""Suffix of a weight's kernel scale in the sidecar."""

LAID_OUT_SUFFIX = ".nki"
"""Suffix that the name of a weight gets where its bytes stand in the kernels' order: a loader that does not know that
order must not find the weight."""

SPLIT_SUFFIXES = ("hc_attn_fn", "hc_ffn_fn")
"""How the names of the hyper-connection matrices end that are always split into hi and lo."""

MARKER = "deepinfer_prep"
"""Key in the `__metadata__` of a converted shard; its value is the version of the tool."""
MAX_MARKER = "fp8_max"
"""Key in the same place; its value is the largest magnitude that a halved weight holds."""

WORKSPACE_NAME = ".deepinfer-prep"
"""Folder inside an output that holds a run until it is complete."""
DISCARDED_NAME = ".deepinfer-prep.done"
"""What that folder is called while it is being removed."""
