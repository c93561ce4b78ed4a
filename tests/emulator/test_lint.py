"""The lint: every banned construct is found, at its line, and plain kernels pass."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from nki_emulator import lint, lint_file, rules
from nki_emulator.lint import BANNED

from tests.emulator import support as emulator_support

CLEAN = '''
"""A module docstring."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


def div_ceil(a: int, b: int) -> int:
    return (a + b - 1) // b


def sizes(n):
    result = []
    for i in range(div_ceil(n, P)):
        result.append(min(P, n - i * P))
    return result


@nki.jit
def kernel(x, flag=None, scale=1.0):
    """Copy x."""
    assert x.shape[0] <= P, f"{x.shape[0]} rows"
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    m, n = x.shape
    config = {"rows": m, "columns": n}
    widths = sizes(n)
    kind = "some" if flag != None else "none"
    while len(widths) > 1:
        widths.pop()
    mask = -2147483648

    def body(i):
        tiles = []
        t = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.sbuf)
        tiles.append(t)
        nisa.dma_copy(dst=t, src=x)
        nisa.tensor_copy(dst=t, src=tiles[0].select(1, i))

    nl.fori_loop(0, 4, body)
    return out


def host_side(x):
    """Not reached from the kernel."""
    with open(x) as handle:
        return [line for line in handle if line is not None]
'''

BROKEN = {
    "no-raise": "raise ValueError",
    "no-try": "try:\n    y = 1\nexcept ValueError:\n    y = 2",
    "no-with": "with x:\n    y = 1",
    "no-lambda": "y = lambda a: a",
    "no-comprehension": "y = [i for i in range(3)]",
    "no-generator": "yield 1",
    "no-async": "async def inner():\n    pass",
    "no-star": "y = f(*x)",
    "no-set": "y = {1, 2}",
    "no-walrus": "assert (y := 1) == 1",
    "no-match": "match x:\n    case 1:\n        y = 1",
    "no-global": "global y",
    "no-import": "import nki.language",
    "no-del": "del x",
    "no-is": "y = x is None",
    "int32": "y = 0x80808080",
    "dict-keys": "y = {1: 2}",
    "no-local-class": "class Inner:\n    pass",
    "no-host-library": "y = np.float32(1)",
    "no-tuple-target": "for a, b in x:\n    y = a",
    "no-loop-else": "for a in x:\n    y = a\nelse:\n    y = 1",
    "no-decorator": "@nki.jit\ndef inner():\n    return 1",
    "no-keyword-only": "def inner(*, a):\n    return a",
    "loop-body": "def body(i):\n    return 1\nnl.fori_loop(0, 2, body)",
    "loop-index": "def body(i):\n    y = x[i]\nnl.fori_loop(0, 2, body)",
    "loop-side-effect": "out = []\ndef body(i):\n    out.append(1)\nnl.fori_loop(0, 2, body)",
}


def with_body(body: str) -> str:
    """A kernel module with this code in its entry, from line 6 on."""
    head = "import nki\nimport nki.language as nl\nimport numpy as np\n@nki.jit\ndef kernel(x):\n"
    return head + textwrap.indent(body, "    ") + "\n"


def test_a_plain_kernel_passes() -> None:
    assert lint(CLEAN) == []


@pytest.mark.parametrize("rule", BROKEN)
def test_banned_construct_is_found(rule: str) -> None:
    found = lint(with_body(BROKEN[rule]), "kernel.py")
    assert rule in {finding.rule for finding in found}
    assert all(str(finding).startswith(f"kernel.py:{finding.line}: ") for finding in found)
    assert all(6 <= finding.line <= 6 + BROKEN[rule].count("\n") for finding in found)


def test_every_banned_node_has_a_test() -> None:
    assert {rule for rule, _ in BANNED.values()} <= set(BROKEN)


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("no-star", "y = f(**x)"),
        ("no-star", "def inner(*a):\n    return a"),
        ("no-is", "y = x is not None"),
        ("dict-keys", "y = {**x}"),
        ("loop-body", "nl.fori_loop(0, 2, lambda i: None)"),
        ("loop-body", "def body():\n    pass\nnl.fori_loop(0, 2, body)"),
        ("loop-index", "def body(i):\n    y = i + 1\nnl.fori_loop(0, 2, body_fun=body)"),
        ("no-loop-else", "while x:\n    y = 1\nelse:\n    y = 2"),
    ],
)
def test_other_forms_are_found(rule: str, body: str) -> None:
    assert rule in {finding.rule for finding in lint(with_body(body))}


def test_while_bodies_return_their_register() -> None:
    assert lint(with_body("def body(r):\n    return r\nnl.while_loop(x, body)")) == []


def test_helpers_that_the_kernel_reaches_are_checked() -> None:
    reached = (
        "import nki\ndef deep():\n    raise ValueError\ndef helper():\n    deep()\n@nki.jit\ndef k(x):\n    helper()\n"
    )
    assert [(f.rule, f.line) for f in lint(reached)] == [("no-raise", 3)]


def test_a_module_of_helpers_is_checked_whole() -> None:
    assert [f.rule for f in lint("import nki.language as nl\ndef helper(a=1):\n    raise ValueError\n")] == [
        "no-raise",
    ]


def test_a_host_module_has_no_device_code() -> None:
    assert lint("import torch\ndef reference(x):\n    raise ValueError\n") == []


def test_a_kernels_class_inherits_only_nkiobject() -> None:
    source = "import nki.language as nl\nclass Config(nl.NKIObject, dict):\n    pass\n"
    assert [f.rule for f in lint(source)] == ["no-inheritance"]
    assert lint("import nki.language as nl\nclass Config(nl.NKIObject):\n    pass\n") == []


def test_modules_and_files_can_be_linted(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(with_body("raise ValueError"))
    (finding,) = lint_file(path)
    assert (finding.path, finding.line, finding.rule) == (str(path), 6, "no-raise")
    assert lint(emulator_support) == lint_file(emulator_support.__file__)


def test_commands(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(CLEAN)
    bad.write_text(with_body("raise ValueError"))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        tests = Path(emulator_support.__file__).parents[1]
        return subprocess.run(
            [sys.executable, "-m", "nki_emulator", *arguments], cwd=tests, capture_output=True, text=True, check=False
        )

    clean = command("lint", str(good))
    assert (clean.returncode, clean.stdout) == (0, "")
    broken = command("lint", str(good), str(bad))
    assert broken.returncode == 1
    assert broken.stdout.startswith(f"{bad}:6: no-raise: ")
    assert command().returncode == 2
    listed = command("rules").stdout
    assert all(f"{name}: {rule.statement}\n    {rule.source}\n" in listed for name, rule in rules.ALL.items())
