"""Mutates manifest, journal, ready manifest, index and config, and runs what reads them.

    python scripts/fuzz_json.py 100000 --seed 1

Every outcome has to be a sentence or a correct result, and nothing outside the folders may be opened. It stops at the
first that is not, with the text that did it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from json_fuzz.outcomes import as_text, run


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Stop after this time.")
    arguments = parser.parse_args()
    began = time.monotonic()
    # In memory where it can be: conversions sync their files, and most of the time would be spent waiting for a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-json-", dir=memory) as folder:
        outcomes = run(Path(folder), arguments.count, arguments.seed, 60 * arguments.minutes)
    print(as_text(outcomes))
    print(f"{outcomes.total():,} mutations in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
