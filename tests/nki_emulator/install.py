"""Which `nki` kernels are written against: AWS's own where it is installed, the emulator elsewhere.

PyPI's package of that name is an empty placeholder that raises on import: it counts as absent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType

from . import isa, language
from .dtypes import DType
from .jit import jit

NAMES = ("nki", "nki.language", "nki.isa", "nki.isa.constants")
ENUMS = ("dge_mode", "dma_engine", "engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd")


def real_nki() -> ModuleType | None:
    """AWS's package if it can be imported and is the API these kernels use."""
    loaded = sys.modules.get("nki")
    if loaded is not None:
        return None if is_emulator(loaded) else loaded
    before = set(sys.modules)
    try:
        module = importlib.import_module("nki")
        usable = all(hasattr(module, name) for name in ("jit", "simulate"))
        importlib.import_module("nki.language")
        importlib.import_module("nki.isa")
    except Exception:  # a placeholder raises whatever it likes
        usable = False
    if usable:
        return module
    for name in set(sys.modules) - before:
        if name == "nki" or name.startswith("nki."):
            del sys.modules[name]
    return None


def is_emulator(module: ModuleType) -> bool:
    """Whether this is the module that `install` put in place."""
    return getattr(module, "__nki_emulator__", False) is True


def install() -> str:
    """Make `import nki` work. Returns "simulator" if AWS's package is there, "emulator" if ours took its place."""
    if real_nki() is not None:
        return "simulator"
    if "nki" not in sys.modules:
        sys.modules.update(_modules())
    return "emulator"


def uninstall() -> None:
    """Remove what `install` put in place; leaves AWS's package alone."""
    if "nki" in sys.modules and is_emulator(sys.modules["nki"]):
        for name in NAMES:
            del sys.modules[name]


@contextlib.contextmanager
def installed() -> Iterator[str]:
    """install() for the length of a `with` block."""
    ours = "nki" not in sys.modules
    backend = install()
    try:
        yield backend
    finally:
        if ours:
            uninstall()


def _modules() -> dict[str, ModuleType]:
    package = _module("nki", {"jit": jit, "dtype": DType, "__nki_emulator__": True, "__version__": "0.6.0"})
    package.__path__ = []
    package.language = _facade("nki.language", language)  # type: ignore[attr-defined]
    package.isa = _facade("nki.isa", isa)  # type: ignore[attr-defined]
    package.isa.__path__ = []
    package.isa.constants = _module("nki.isa.constants", {n: getattr(isa, n) for n in ENUMS})
    modules = package, package.language, package.isa, package.isa.constants
    return dict(zip(NAMES, modules, strict=True))


def _module(name: str, namespace: dict[str, object]) -> ModuleType:
    module = ModuleType(name, "Provided by nki_emulator.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "nki")
    module.__dict__.update(namespace)
    return module


def _facade(name: str, implementation: ModuleType) -> ModuleType:
    """A module with the public names of `implementation` and nothing else of it."""
    public: dict[str, object] = {key: getattr(implementation, key) for key in implementation.__all__}
    return _module(name, {**public, "__getattr__": implementation.__getattr__})
