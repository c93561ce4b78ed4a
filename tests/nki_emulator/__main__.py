"""python -m nki_emulator lint FILE...: exit status 1 if there are findings."""

from __future__ import annotations

import sys

from .lint import lint_file

USAGE = "usage: python -m nki_emulator lint FILE..."


def main(arguments: list[str]) -> int:
    """Lint kernel sources and print what was found."""
    if len(arguments) < 2 or arguments[0] != "lint":
        print(USAGE, file=sys.stderr)
        return 2
    findings = [finding for path in arguments[1:] for finding in lint_file(path)]
    for finding in findings:
        print(finding)
    print(f"{len(arguments) - 1} files, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
