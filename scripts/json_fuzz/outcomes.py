"""Runs the package on mutated files and says what came of it; anything but a sentence or a correct result is a find.

An audit hook sees every file that is opened: while a mutated file is worked on, nothing outside the folders that were
given to the command may be opened, but for Python's own modules.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from sample_checkpoint.raw import write_tiny

from deepinfer_prep import PrepError, convert_checkpoint, inspect_checkpoint, verify_checkpoint
from deepinfer_prep.errors import ConversionError
from json_fuzz.mutations import mutate

MANIFEST = "neuron_manifest.json"
JOURNAL = ".deepinfer-prep/journal"
READY = ".deepinfer-prep/manifest.json"
READY_DIGEST = ".deepinfer-prep/manifest.xxh3"
"""The files that are mutated: of an output, of a checkpoint, of a workspace."""


class FindError(Exception):
    """An outcome that must not be."""


class Opened:
    """Watches which files are opened, while `watching`; hooks stay for the life of a process."""

    def __init__(self) -> None:
        self._allowed: tuple[str, ...] = ()
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    @contextmanager
    def watching(self, *folders: Path) -> Iterator[None]:
        """Note what is opened outside these folders."""
        own = {os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path}
        self._allowed = (*(os.path.realpath(folder) for folder in folders), *own, "/dev/null", "/proc/self")
        self.outside = []
        try:
            yield
        finally:
            self._allowed = ()

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._allowed or not isinstance(arguments[0], (str, bytes)):
            return
        path = os.fsdecode(arguments[0])
        # A name without a folder is relative to a descriptor: whose folder that is, was checked when it was opened.
        if path.startswith("/") and not os.path.realpath(path).startswith(self._allowed):
            self.outside.append(path)


OPENED: list[Opened] = []


def opened() -> Opened:
    """The one watcher of this process."""
    if not OPENED:
        OPENED.append(Opened())
    return OPENED[0]


class Subject:
    """A checkpoint, its output, and a run that was stopped while it published."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source, self.inspected = write_tiny(folder / "source"), write_tiny(folder / "inspected")
        self.output = folder / "output"
        convert_checkpoint(self.source, self.output, workers=1)
        self.expected = _tree(self.output)
        self.stopped = folder / "stopped"
        _stop(self.source, self.stopped)

    def try_one(self, name: str, chance: random.Random) -> str:
        """Mutate one file, run what reads it, and say what came of it.

        Raises:
            FindError: an exception that is no sentence, a wrong result, or a file opened elsewhere.
        """
        base = {MANIFEST: self.output, JOURNAL: self.stopped, READY: self.stopped}.get(name, self.inspected)
        original = (base / name).read_bytes()
        mutated = mutate(original, chance)
        (base / name).write_bytes(mutated)
        if name == READY:
            (base / READY_DIGEST).write_text(xxhash.xxh3_128_hexdigest(mutated))
        watcher = opened()
        try:
            with watcher.watching(self.folder):
                outcome = self._run(name)
        except PrepError as error:
            outcome = f"sentence: {type(error).__name__}"
            if len(str(error)) > 20_000:
                raise FindError(f"a message of {len(str(error)):,} characters") from error
        except Exception as error:
            raise FindError(f"{name}: {type(error).__name__}: {error}\n{mutated[:2000]!r}") from error
        finally:
            if base.exists():
                (base / name).write_bytes(original)
        if watcher.outside:
            raise FindError(f"{name}: opened {watcher.outside[:3]}\n{mutated[:2000]!r}")
        return outcome

    def _run(self, name: str) -> str:
        if name == MANIFEST:
            result = verify_checkpoint(self.output, source=self.source, workers=1, chunk_size=65536)
            return "verified" if result.ok else "differences"
        if name in (JOURNAL, READY):
            return self._resume()
        return "inspected" if not inspect_checkpoint(self.inspected, workers=1).refusals else "refused"

    def _resume(self) -> str:
        """Whatever a journal or a ready manifest says, what is published is right."""
        output = self.folder / "resumed"
        shutil.copytree(self.stopped, output)
        try:
            convert_checkpoint(self.source, output, workers=1, chunk_size=65536)
            found = {name: data for name, data in _tree(output).items() if name != MANIFEST}
            wanted = {name: data for name, data in self.expected.items() if name != MANIFEST}
            if found != wanted:
                raise FindError("what was published is not what the source gives")
            return "resumed"
        finally:
            shutil.rmtree(output)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _stop(source: Path, output: Path) -> None:
    """Convert up to the moment at which files get their final names."""
    replace = os.replace

    def stop(name: Any, target: Any, **folders: Any) -> None:
        if str(name).endswith("model.safetensors"):
            raise ConversionError("stopped")
        replace(name, target, **folders)

    os.replace = stop  # type: ignore[assignment]
    try:
        convert_checkpoint(source, output, workers=1)
    except ConversionError:
        return
    finally:
        os.replace = replace
    raise AssertionError("the run was meant to be stopped")


def run(folder: Path, count: int, seed: int, seconds: float = float("inf")) -> Counter[str]:
    """Try `count` mutations, or as many as the time allows; what came of them, by file and outcome."""
    until = time.monotonic() + seconds
    chance, outcomes = random.Random(seed), Counter[str]()
    subject = Subject(folder)
    names = [MANIFEST, JOURNAL, READY, "model.safetensors.index.json", "config.json", "config.json"]
    for number in range(count):
        if time.monotonic() > until:
            break
        name = names[number % len(names)]
        outcomes[f"{name}: {subject.try_one(name, chance)}"] += 1
    return outcomes


def as_text(outcomes: Counter[str]) -> str:
    """The outcomes as lines."""
    return json.dumps(dict(sorted(outcomes.items())), indent=1)
