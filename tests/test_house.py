"""The rules of the house: which room may import which, checked on every import statement of the source.

Imports inside functions and under TYPE_CHECKING count like all others: a rule that only holds at run time is
one that a reader cannot rely on.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "deepinfer_prep"
LOADED_FROM_OUTSIDE_RUNTIME = 14
"""Modules of the package, runtime and kernels aside, that loading may bring in."""


def sources(root: Path, package: str) -> dict[str, Path]:
    """Module name -> file, for every module below a folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = (package, *path.relative_to(root).with_suffix("").parts) if package else path.relative_to(root).parts
        name = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        found[name] = path
    return found


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by the name that it is imported under."""
    return {**sources(ROOT / PACKAGE, PACKAGE), **sources(ROOT / "kernels", f"{PACKAGE}.kernels")}


def imported_names(name: str, path: Path) -> Iterator[str]:
    """Dotted names that a module imports, those of `from a import b` as a and a.b."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def edges(names: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules of the same tree that it imports; a package counts where nothing below it is named."""
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted = {imported for imported in imported_names(name, path) if imported in names}
        below = {one for one in wanted if any(other.startswith(one + ".") for other in wanted)}
        found[name] = wanted - below - {name}
    return found


def room(name: str) -> str:
    """The first-level room of a module: deepinfer_prep.files.storage is in "files"."""
    return name.split(".")[1] if "." in name else ""


def crossings(importer: str, *forbidden: str) -> list[str]:
    """Imports from one room into forbidden ones, as "a imports b"."""
    return [
        f"{name} imports {other}"
        for name, others in edges(modules()).items()
        for other in sorted(others)
        if room(name) == importer and room(other) in forbidden
    ]


def test_the_runtime_needs_the_manifest_and_not_what_made_it() -> None:
    assert crossings("runtime", "planning", "families", "writing", "checking", "cli", "convert", "verify") == []


def test_arithmetic_knows_nothing_of_files() -> None:
    allowed = {f"{PACKAGE}.quantized"}
    assert edges(modules())[f"{PACKAGE}.fp8"] <= allowed


@pytest.mark.parametrize("importer", ["planning", "families"])
def test_decisions_are_made_from_headers(importer: str) -> None:
    storage = f"{PACKAGE}.files.storage"
    allowed = {storage, f"{storage}.FileState", f"{storage}.Place"}
    found = [
        f"{name} imports {imported}"
        for name, path in modules().items()
        if room(name) == importer
        for imported in imported_names(name, path)
        if (imported.startswith(storage) and imported not in allowed) or imported.endswith(".read_stored")
    ]
    assert found == []
    assert crossings(importer, "writing", "checking", "runtime", "workers") == []


def test_nothing_imports_the_command_line() -> None:
    importers = {
        name
        for name, others in edges(modules()).items()
        if room(name) != "cli" and any(room(other) == "cli" for other in others)
    }
    assert importers <= {f"{PACKAGE}.__main__"}


def test_writing_does_not_know_what_checks_it() -> None:
    assert crossings("writing", "checking", "verify", "inspect", "runtime") == []


@pytest.mark.parametrize("tree", ["product", "scripts"])
def test_no_module_imports_itself_round_a_corner(tree: str) -> None:
    trees = {
        "product": modules(),
        "scripts": sources(ROOT / "scripts", ""),
    }
    try:
        TopologicalSorter(edges(trees[tree])).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_top_level_is_taken_in_at_a_glance() -> None:
    assert len(list((ROOT / PACKAGE).glob("*.py"))) <= 15


def test_loading_brings_in_little_from_outside_the_runtime() -> None:
    pytest.importorskip("torch")
    script = f"import json, sys, {PACKAGE}.runtime.load; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    outside = [
        name
        for name in json.loads(run.stdout)
        if name in modules() and room(name) not in ("runtime", "kernels") and modules()[name].name != "__init__.py"
    ]
    assert len(outside) <= LOADED_FROM_OUTSIDE_RUNTIME, outside
    assert not {room(name) for name in outside} & {"planning", "families", "writing", "checking", "cli"}


def test_every_package_is_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    packages = [name for name, path in modules().items() if path.name == "__init__.py"]
    assert [name for name in packages if f'"{name}"' not in text] == []


def test_tests_are_imported_by_one_name() -> None:
    found = []
    tops = {path.stem for path in (ROOT / "tests").iterdir()} - {"nki_emulator", "__init__", "conftest"}
    for path in (ROOT / "tests").rglob("*.py"):
        if "nki_emulator" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").split(".")[0] in tops - {"scripts", "kernels"}
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}")
    assert found == []
