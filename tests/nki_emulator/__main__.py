"""python -m nki_emulator lint FILE... | rules. Linting exits with status 1 if there are findings."""

from __future__ import annotations

import sys

from . import rules
from .lint import lint_file

USAGE = """usage: python -m nki_emulator lint FILE...   check kernel sources
       python -m nki_emulator rules          list the rules and their sources"""


def _lint(paths: list[str]) -> int:
    findings = [finding for path in paths for finding in lint_file(path)]
    for finding in findings:
        print(finding)
    print(f"{len(paths)} files, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


def _rules() -> int:
    for rule in rules.ALL.values():
        print(f"{rule.name}: {rule.statement}\n    {rule.source}")
    return 0


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    match arguments:
        case ["lint", *paths] if paths:
            return _lint(paths)
        case ["rules"]:
            return _rules()
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
