"""Publication: how a complete run gets its final names, in an order that a kill at any moment cannot harm.

1. Everything lies in the workspace, complete and synced; then the workspace's manifest is written.
2. An older output's manifest goes, then its indexes, then its shards that the new output does not have.
3. Every file but the indexes is renamed to its final name, then the indexes; folders are synced after each.
4. The manifest is written under its final name, and the workspace is removed.

After 1 the same command goes on from any point: it takes what has its final name already as it is, once
its digests have been checked. Before 4 there is no manifest, so the folder is not an output.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError, ManifestError
from deepinfer_prep.files.digests import digest_range
from deepinfer_prep.files.segments import segments
from deepinfer_prep.files.storage import RangeReader, sync_folder, write_file_durably
from deepinfer_prep.manifest import Manifest, parse_manifest
from deepinfer_prep.naming import INDEX_SUFFIX, MANIFEST_NAME, SHARD_SUFFIX, SIDECAR_FOLDER
from deepinfer_prep.workers import Meter, ProgressCallback, run_parallel
from deepinfer_prep.writing.workspace import Workspace


def publish(workspace: Workspace, manifest: Manifest) -> None:
    """Give every file of a complete workspace its final name, the manifest last, and remove the workspace.

    Raises:
        ConversionError: a file is neither here nor at its final place.
        OSError: a step failed; the same command goes on from there.
    """
    text = manifest.to_json()
    write_file_durably(workspace.ready_manifest, text)
    _remove_older(workspace, manifest)
    names = sorted(manifest.files)
    _rename(workspace, (name for name in names if not name.endswith(INDEX_SUFFIX)))
    _rename(workspace, (name for name in names if name.endswith(INDEX_SUFFIX)))
    last = workspace.root / "last"
    write_file_durably(last, text)
    os.replace(last, workspace.output / MANIFEST_NAME)
    sync_folder(workspace.output)
    with suppress(PermissionError):  # Its entry may be new; a parent that cannot be read cannot be synced.
        sync_folder(workspace.output.resolve().parent)
    workspace.discard()


def resume_publication(
    workspace: Workspace, workers: int, chunk_size: int, progress: ProgressCallback | None
) -> Manifest | None:
    """The manifest of a run whose publication was interrupted, once all its bytes have been checked.

    None where there is no such run, or where bytes changed, so that the run has to be repeated from its journal.
    """
    manifest = _read_ready(workspace)
    if manifest is not None and _is_intact(workspace, manifest, workers, chunk_size, progress):
        return manifest
    if workspace.ready_manifest.exists():
        os.replace(workspace.ready_manifest, workspace.rejected_manifest)
    return None


def _read_ready(workspace: Workspace) -> Manifest | None:
    try:
        return parse_manifest(workspace.ready_manifest.read_bytes(), workspace.ready_manifest)
    except (FileNotFoundError, ManifestError):
        return None


def _remove_older(workspace: Workspace, manifest: Manifest) -> None:
    output = workspace.output
    (output / MANIFEST_NAME).unlink(missing_ok=True)
    sync_folder(output)
    folders = [folder for folder in (output, output / SIDECAR_FOLDER) if folder.is_dir()]
    # The index first: without it no loader takes a mixture of old and new shards for a checkpoint.
    for suffix in (INDEX_SUFFIX, SHARD_SUFFIX):
        for entry in (entry for folder in folders for entry in sorted(folder.iterdir())):
            name = str(entry.relative_to(output))
            ours = name in manifest.files and not (suffix == INDEX_SUFFIX and workspace.path(name).exists())
            if name.endswith(suffix) and not ours and not (entry.is_dir() and not entry.is_symlink()):
                entry.unlink()
    for folder in folders:
        sync_folder(folder)


def _rename(workspace: Workspace, names: Iterable[str]) -> None:
    folders = {workspace.output}
    for name in names:
        target = workspace.output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        folders |= {workspace.output / folder for folder in Path(name).parents}
        if workspace.path(name).exists():
            os.replace(workspace.path(name), target)
        elif not target.exists():
            raise ConversionError(
                f"{target} vanished while the output was being completed. Run the command again.", code="vanished"
            )
    for folder in sorted(folders):
        sync_folder(folder)


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
    if any(not path.is_file() or path.stat().st_size != manifest.files[name].size for name, path in paths.items()):
        return False
    meter = Meter(progress, "check", sum(record.size for record in manifest.files.values()))
    for check, is_same in run_parallel(_checks(manifest, paths), _check, workers, chunk_size):
        meter.add(check.end - check.start)
        if not is_same:
            return False
    return True


def _place(workspace: Workspace, name: str) -> Path:
    unpublished = workspace.path(name)
    return unpublished if unpublished.exists() else workspace.output / name


def _checks(manifest: Manifest, paths: Mapping[str, Path]) -> Iterator[_Check]:
    for name, record in manifest.files.items():
        for (start, end), digest in zip(segments(record.size), record.digests, strict=True):
            yield _Check(paths[name], start, end, digest)


def _check(check: _Check, buffer: fp8.U8) -> tuple[_Check, bool]:
    with RangeReader(check.path) as file:
        return check, digest_range(file, check.start, check.end, buffer) == check.digest
