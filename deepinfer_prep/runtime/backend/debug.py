"""What the backend shows on request: graphs before and after, inputs that share storage."""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from pathlib import Path

from torch import Tensor
from torch.fx import GraphModule

from deepinfer_prep.runtime.backend.node_values import logical_value, source_name

PRINT_GRAPH = "DEEPINFER_FP8_LEGALIZE_DEBUG"
PRINT_ALIASES = "DEEPINFER_NEURON_ALIAS_DEBUG"
DUMP_DIR = "DEEPINFER_NEURON_DUMP_DIR"
SKIP_CHECK = "DEEPINFER_FP8_LEGALIZE_CHECK"

_numbers = itertools.count()


def switched_on(name: str) -> bool:
    """Whether an environment variable is set to anything but 0, false, no, off or nothing."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def switched_off(name: str) -> bool:
    """Whether an environment variable is set, and set to 0, false, no or off."""
    return os.environ.get(name, "").strip().lower() in ("0", "false", "no", "off")


def readable(module: GraphModule) -> str:
    """A graph and its sub-graphs as code, with the type and shape of every value."""
    text = module.print_readable(print_output=False, include_device=False, include_stride=False)
    return str(text).strip() + "\n"


def shared_storage(module: GraphModule) -> str:
    """The graph inputs that share storage, a line for each group; empty if there are none."""
    groups: dict[int, list[str]] = defaultdict(list)
    for node in module.graph.nodes:
        value = logical_value(node)
        if node.op == "placeholder" and isinstance(value, Tensor):
            shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            storage = value.untyped_storage()._cdata
            groups[storage].append(f"{source_name(node)} {shape} at offset {value.storage_offset()}")
    return "".join(f"  {', '.join(members)}\n" for members in groups.values() if len(members) > 1)


class Report:
    """Everything that is shown about one graph; nothing is rendered unless it is asked for."""

    def __init__(self, dump_dir: str | None) -> None:
        self._dump_dir = dump_dir
        self._number = next(_numbers)
        self._variants = 0

    def before(self, module: GraphModule) -> None:
        """To be called with the graph as Dynamo made it."""
        if switched_on(PRINT_ALIASES):
            groups = shared_storage(module) or "  none\n"
            print(f"deepinfer_neuron graph {self._number}: inputs that share storage\n{groups}", file=sys.stderr)
        self._dump("before", module)

    def after(self, module: GraphModule) -> None:
        """To be called with each graph that is handed on."""
        if switched_on(PRINT_GRAPH):
            title = f"deepinfer_neuron graph {self._number} after fp8 legalization"
            print(f"{title}\n{readable(module)}", file=sys.stderr)
        self._dump("after" if self._variants == 0 else f"after_variant_{self._variants}", module)
        self._variants += 1

    def _dump(self, stage: str, module: GraphModule) -> None:
        if not self._dump_dir:
            return
        folder = Path(self._dump_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"graph_{os.getpid()}_{self._number:04d}_{stage}.txt"
        path.write_text(readable(module), encoding="utf-8")
