"""Publication: gives the files of a complete run their final names, in an order that is safe to interrupt.

1. Everything lies in the workspace, complete and synced; then the workspace's manifest is written.
2. An older output's manifest goes, then its indexes, then its shards that the new output does not have.
3. Every file but the indexes is renamed to its final name, then the indexes; folders are synced after each.
4. The manifest is written under its final name, and the workspace is removed.

After 1 the same command goes on from any point: it takes what has its final name already as it is, once
its digests have been checked. Before 4 there is no manifest, so the folder is not an output.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path, PurePosixPath

import xxhash

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError, ManifestError
from deepinfer_prep.files.digests import digest_range
from deepinfer_prep.files.folders import Folder
from deepinfer_prep.files.segments import segments
from deepinfer_prep.files.storage import RangeReader
from deepinfer_prep.files.untrusted import MANIFEST, JsonError, leads_out
from deepinfer_prep.manifest import Manifest, parse_manifest
from deepinfer_prep.naming import INDEX_SUFFIX, MANIFEST_NAME, SHARD_SUFFIX, SIDECAR_FOLDER, SIDECAR_INDEX
from deepinfer_prep.workers import Meter, ProgressCallback, run_parallel
from deepinfer_prep.writing.workspace import READY_DIGEST_NAME, READY_NAME, REJECTED_NAME, Workspace

_LAST = "last"
_DIGEST_BYTES = 32


def publish(workspace: Workspace, manifest: Manifest, permissions: Mapping[str, int]) -> None:
    """Give every file of a complete workspace its final name, the manifest last, and remove the workspace.

    Args:
        permissions: the permission bits that a file may have at most, by name; files that are not named may have those
            that all named shards have.

    Raises:
        ConversionError: a file is neither here nor at its final place.
        OSError: a step failed; the same command goes on from there.
    """
    text = manifest.to_json()
    workspace.write_durably(READY_DIGEST_NAME, xxhash.xxh3_128_hexdigest(text).encode())
    workspace.write_durably(READY_NAME, text)
    _remove_older(workspace, manifest)
    common = reduce(and_, (permissions[name] for name in manifest.shards if name in permissions), 0o777)
    bits = {name: permissions.get(name, common) for name in manifest.files}
    _rename(workspace, {name: bits[name] for name in sorted(bits) if not name.endswith(INDEX_SUFFIX)})
    _rename(workspace, {name: bits[name] for name in sorted(bits) if name.endswith(INDEX_SUFFIX)})
    workspace.write_durably(_LAST, text)
    _restrict(workspace.root, _LAST, common)
    workspace.root.replace(_LAST, workspace.output, MANIFEST_NAME)
    workspace.output.sync()
    with suppress(PermissionError), Folder.open(workspace.output.path.resolve().parent) as parent:
        parent.sync()  # Its entry may be new; a parent that cannot be read cannot be synced.
    workspace.discard()


def resume_publication(
    workspace: Workspace, files: Mapping[str, int], workers: int, chunk_size: int, progress: ProgressCallback | None
) -> Manifest | None:
    """The manifest of a run whose publication was interrupted, once all its bytes have been checked.

    None where there is no such run, where its files are not `files` (size by name) and a sidecar, or where bytes
    changed, so that the run has to be repeated from its journal.
    """
    manifest = _read_ready(workspace)
    if (
        manifest is not None
        and _has_files(manifest, files)
        and _is_intact(workspace, manifest, workers, chunk_size, progress)
    ):
        return manifest
    if workspace.root.status(READY_NAME) is not None:
        workspace.root.replace(READY_NAME, workspace.root, REJECTED_NAME)
    return None


def _has_files(manifest: Manifest, files: Mapping[str, int]) -> bool:
    """Whether a manifest's files are exactly those of the plan and of a sidecar."""
    sidecar = {*manifest.sidecar, *([SIDECAR_INDEX] if manifest.sidecar else [])}
    sizes = {name: record.size for name, record in manifest.files.items() if name not in sidecar}
    return sizes == files and sidecar <= manifest.files.keys()


def _read_ready(workspace: Workspace) -> Manifest | None:
    try:
        text = workspace.root.read(READY_NAME, MANIFEST.nbytes)
        if workspace.root.read(READY_DIGEST_NAME, _DIGEST_BYTES) != xxhash.xxh3_128_hexdigest(text).encode():
            return None  # Damage may have left it a manifest, of something else.
        return parse_manifest(text, workspace.root.path / READY_NAME)
    except (FileNotFoundError, JsonError, ManifestError):
        return None


def _remove_older(workspace: Workspace, manifest: Manifest) -> None:
    output = workspace.output
    output.unlink(MANIFEST_NAME, missing_ok=True)
    output.sync()
    # The index first: without it no loader takes a mixture of old and new shards for a checkpoint.
    for suffix in (INDEX_SUFFIX, SHARD_SUFFIX):
        _remove_suffix(workspace, output, "", suffix, manifest)
        if output.status(SIDECAR_FOLDER) is not None:
            with output.enter(SIDECAR_FOLDER) as folder:
                _remove_suffix(workspace, folder, SIDECAR_FOLDER + "/", suffix, manifest)
                folder.sync()
    output.sync()


def _remove_suffix(workspace: Workspace, folder: Folder, prefix: str, suffix: str, manifest: Manifest) -> None:
    """Remove the files of a folder that end in a suffix and are not the new output's."""
    for entry in folder.names():
        name, status = prefix + entry, folder.status(entry)
        ours = name in manifest.files and not (suffix == INDEX_SUFFIX and workspace.holds(name))
        if name.endswith(suffix) and not ours and status is not None and not stat.S_ISDIR(status.st_mode):
            folder.unlink(entry)


def _rename(workspace: Workspace, permissions: Mapping[str, int]) -> None:
    folders = {""}
    for name, bits in permissions.items():
        with workspace.output.holding(name, 0o777) as target:
            last = name.rpartition("/")[2]
            if workspace.holds(name):
                with workspace.holding(name) as source:
                    _restrict(source, last, bits)
                    source.replace(last, target, last)
            elif target.status(last) is None:
                raise ConversionError(
                    f"{target.path / last} vanished while the output was being completed. Run the command again.",
                    code="vanished",
                )
        folders |= {f"{folder}/" for folder in map(str, PurePosixPath(name).parents) if folder != "."}
    for folder in sorted(folders):
        with workspace.output.holding(folder) as held:
            held.sync()


def _restrict(folder: Folder, name: str, bits: int) -> None:
    """Take from a file the permissions of others that its source does not give them."""
    status = folder.status(name)
    if status is None or not status.st_mode & 0o077 & ~bits:
        return
    descriptor = folder.open_own(folder.path / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, status.st_mode & (bits | 0o700) & 0o777)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Check:
    path: Path
    start: int
    end: int
    digest: str


def _is_intact(
    workspace: Workspace, manifest: Manifest, workers: int, chunk_size: int, progress: ProgressCallback | None
) -> bool:
    """Whether every file, here or at its final place, has the size and digests that the manifest states."""
    paths = {name: _place(workspace, name) for name in manifest.files}
    for name, path in paths.items():
        if leads_out(workspace.output.path, path) or not path.is_file():
            return False
        if path.is_symlink() or path.stat().st_size != manifest.files[name].size:
            return False
    meter = Meter(progress, "check", sum(record.size for record in manifest.files.values()))
    for check, is_same in run_parallel(_checks(manifest, paths), _check, workers, chunk_size):
        meter.add(check.end - check.start)
        if not is_same:
            return False
    return True


def _place(workspace: Workspace, name: str) -> Path:
    return workspace.path(name) if workspace.holds(name) else workspace.output.path / name


def _checks(manifest: Manifest, paths: Mapping[str, Path]) -> Iterator[_Check]:
    for name, record in manifest.files.items():
        for (start, end), digest in zip(segments(record.size), record.digests, strict=True):
            yield _Check(paths[name], start, end, digest)


def _check(check: _Check, buffer: fp8.U8) -> tuple[_Check, bool]:
    with RangeReader(check.path) as file:
        return check, digest_range(file, check.start, check.end, buffer) == check.digest
