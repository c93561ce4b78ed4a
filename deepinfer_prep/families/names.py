"""Names of tensors that belong together."""

from __future__ import annotations


def beside(name: str, last: str) -> str:
    """The name in the same module: beside("x.weight", "scale") is "x.scale"."""
    module = name.rpartition(".")[0]
    return f"{module}.{last}" if module else last


def appended(name: str, suffix: str) -> str | None:
    """The name of a parameter's scale where it is the parameter's own with a suffix; None for other tensors.

    appended("x.weight", "_scale") is "x.weight_scale". Fused and stacked experts hold parameters of other
    names: appended("x.experts.down_proj", "_scale_inv") is "x.experts.down_proj_scale_inv".
    """
    module, _, last = name.rpartition(".")
    stacked = module.rpartition(".")[2] == "experts"
    return name + suffix if stacked or last == "weight" or last.endswith("_weight") else None
