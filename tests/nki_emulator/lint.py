"""A lint for the Python that the kernel compiler's parser does not accept, or is reported to mistreat.

Sources: aws-neuron-sdk docs, nki/get-started/nki-language-guide and nki/migration; where a rule's message says
"reported", kernel authors met it and the documentation is silent. Only device code is checked: functions decorated with
nki.jit and what they call or refer to in the same module; in a module without such a function, all of them, unless the
module imports host libraries and no nki.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from . import hardware


@dataclass(frozen=True)
class Finding:
    """One banned construct."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


BANNED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Raise: ("no-raise", "raise is rejected: use assert"),
    ast.Try: ("no-try", "exceptions cannot be handled in a kernel"),
    ast.With: ("no-with", "arbitrary `with` blocks are not supported"),
    ast.Lambda: ("no-lambda", "lambda is not supported: define a function"),
    ast.ListComp: ("no-comprehension", "comprehensions are not in the language guide: use a loop"),
    ast.SetComp: ("no-comprehension", "comprehensions are not in the language guide: use a loop"),
    ast.DictComp: ("no-comprehension", "comprehensions are not in the language guide: use a loop"),
    ast.GeneratorExp: ("no-comprehension", "generators are not supported: use a loop"),
    ast.Yield: ("no-generator", "generators are not supported"),
    ast.YieldFrom: ("no-generator", "generators are not supported"),
    ast.Await: ("no-async", "async code is not supported"),
    ast.AsyncFunctionDef: ("no-async", "async code is not supported"),
    ast.Starred: ("no-star", "starred expressions are not supported"),
    ast.Set: ("no-set", "sets are not kernel values: use a tuple, a list or a dict with string keys"),
    ast.NamedExpr: ("no-walrus", "assignment expressions are not in the language guide"),
    ast.Match: ("no-match", "match statements are not in the language guide"),
    ast.Global: ("no-global", "a kernel is pure: it changes no outer name"),
    ast.Nonlocal: ("no-global", "a kernel is pure: it changes no outer name"),
    ast.Import: ("no-import", "import at module level"),
    ast.ImportFrom: ("no-import", "import at module level"),
    ast.Delete: ("no-del", "del is not in the language guide"),
}
"""Nodes that are banned wherever they stand in device code."""

HOST_MODULES = ("numpy", "torch", "math", "ml_dtypes", "jax")
LOOPS = ("fori_loop", "while_loop")
MUTATORS = ("append", "extend", "insert", "remove", "pop", "update", "reverse", "clear")


def lint(module_or_source: ModuleType | str, path: str = "") -> list[Finding]:
    """All findings in a module (imported, or as source text), in order of lines."""
    if isinstance(module_or_source, ModuleType):
        source = inspect.getsource(module_or_source)
        path = path or module_or_source.__file__ or module_or_source.__name__
    else:
        source, path = module_or_source, path or "<source>"
    tree = ast.parse(source, filename=path)
    hosts = _names_from(tree, HOST_MODULES)
    if hosts and not _names_from(tree, ("nki",)):
        return []
    findings: set[Finding] = set()
    for function in _device_functions(tree):
        findings.update(Finding(path, *found) for found in _check_function(function, hosts))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            findings.update(Finding(path, *found) for found in _check_class(node))
    return sorted(findings, key=lambda finding: (finding.line, finding.rule))


def lint_file(path: str | Path) -> list[Finding]:
    """All findings in a file."""
    return lint(Path(path).read_text(), str(path))


_Found = tuple[int, str, str]


def _is_entry(function: ast.FunctionDef) -> bool:
    names = {ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list}
    return bool(names & {"nki.jit", "jit"})


def _device_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    entries = [name for name, node in functions.items() if _is_entry(node)]
    if not entries:
        return list(functions.values())
    pending, reached = entries, set[str]()
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        used = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
        pending.extend(used & functions.keys())
    return [node for name, node in functions.items() if name in reached]


def _names_from(tree: ast.Module, packages: tuple[str, ...]) -> set[str]:
    """Names under which a module imports these packages or anything of them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.split(".")[0] in packages]
            names.update((alias.asname or alias.name).split(".")[0] for alias in aliases)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _check_function(function: ast.FunctionDef, hosts: set[str]) -> Iterator[_Found]:
    yield from _check_signature(function, entry=_is_entry(function))
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            yield from _check_signature(node, entry=False)
        yield from _check_node(node, hosts)
    yield from _check_loop_bodies(function)


def _check_signature(function: ast.FunctionDef, *, entry: bool) -> Iterator[_Found]:
    arguments, line = function.args, function.lineno
    if function.decorator_list and not entry:
        yield line, "no-decorator", f"{function.name}: only the entry is decorated, with nki.jit"
    if arguments.vararg or arguments.kwarg:
        yield line, "no-star", f"{function.name}: starred parameters are not supported"
    if arguments.kwonlyargs or arguments.posonlyargs:
        yield line, "no-keyword-only", f"{function.name}: parameters after * or before / are not supported"


def _check_class(node: ast.ClassDef) -> Iterator[_Found]:
    bases = {ast.unparse(base) for base in node.bases}
    device = bases & {"nl.NKIObject", "NKIObject"}
    if device and len(bases) > 1:
        yield node.lineno, "no-inheritance", f"{node.name}: a kernel's class inherits nl.NKIObject alone"


def _check_node(node: ast.AST, hosts: set[str]) -> Iterator[_Found]:
    line = getattr(node, "lineno", 0)
    if type(node) in BANNED:
        yield line, *BANNED[type(node)]
    elif isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        yield line, "no-is", "`is` is rejected: use == or !="
    elif isinstance(node, ast.For | ast.While):
        yield from _check_loop(node)
    elif isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords):
        yield line, "no-star", "** in a call is not supported"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        if not hardware.INT32_MIN <= node.value <= -hardware.INT32_MIN:
            yield line, "int32", f"{node.value} is not a 32-bit int"
    elif isinstance(node, ast.Dict) and any(key is None or not _is_string(key) for key in node.keys):
        yield line, "dict-keys", "a dict has string keys"
    elif isinstance(node, ast.ClassDef):
        yield line, "no-local-class", f"{node.name}: define classes at module level"
    elif isinstance(node, ast.Name) and node.id in hosts:
        yield line, "no-host-library", f"{node.id} exists only on the host: compute constants outside the kernel"


def _is_string(node: ast.expr) -> bool:
    return not isinstance(node, ast.Constant) or isinstance(node.value, str)


def _check_loop(node: ast.For | ast.While) -> Iterator[_Found]:
    if isinstance(node, ast.For) and not isinstance(node.target, ast.Name):
        yield node.lineno, "no-tuple-target", "a for loop has one plain name as target"
    if node.orelse:
        yield node.lineno, "no-loop-else", "else on a loop is not in the language guide"


# Bodies of dynamic loops: traced once, their index exists only at run time


def _check_loop_bodies(function: ast.FunctionDef) -> Iterator[_Found]:
    nested = {node.name: node for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or _called_name(call) not in LOOPS:
            continue
        body = _body_argument(call)
        if isinstance(body, ast.Name) and body.id in nested:
            yield from _check_body(nested[body.id], returns=_called_name(call) == "while_loop")
        elif not isinstance(body, ast.Name):
            yield call.lineno, "loop-body", "the body of a dynamic loop is a named function"


def _called_name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1]


def _body_argument(call: ast.Call) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == "body_fun":
            return keyword.value
    position = 2 if _called_name(call) == "fori_loop" else 1
    return call.args[position] if len(call.args) > position else None


def _check_body(body: ast.FunctionDef, *, returns: bool) -> Iterator[_Found]:
    if len(body.args.args) != 1:
        yield body.lineno, "loop-body", f"{body.name}: a loop body takes one argument"
    local = {node.id for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    index = {argument.arg for argument in body.args.args}
    for node in ast.walk(body):
        if isinstance(node, ast.Return) and node.value is not None and not returns:
            yield node.lineno, "loop-body", f"{body.name}: the body of fori_loop returns nothing"
        elif isinstance(node, ast.BinOp | ast.Compare | ast.Subscript) and _operands(node) & index:
            yield node.lineno, "loop-index", "the index is a register: use it in .ap(scalar_offset=) or .select()"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id not in local:
                yield node.lineno, "loop-side-effect", f"{owner.id}.{node.func.attr} happens once, not every trip"


def _operands(node: ast.BinOp | ast.Compare | ast.Subscript) -> set[str]:
    """Names that stand in the expression outside any call."""
    if isinstance(node, ast.Subscript):
        parts: list[ast.expr] = [node.slice]
    elif isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    else:
        parts = [node.left, *node.comparators]
    return {name.id for part in parts for name in ast.walk(part) if isinstance(name, ast.Name)}
