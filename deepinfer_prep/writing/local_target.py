"""An output in a local folder: files lie in a workspace inside it until all are complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer_prep import fp8
from deepinfer_prep.files import segments
from deepinfer_prep.files.digests import SegmentDigests
from deepinfer_prep.files.storage import Place
from deepinfer_prep.manifest import FileRecord, Manifest
from deepinfer_prep.naming import DISCARDED_NAME, WORKSPACE_NAME
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.workers import ProgressCallback
from deepinfer_prep.writing.journal import Journal, SegmentDone, is_same_run, read_done, read_identity
from deepinfer_prep.writing.local_writer import LocalWriter
from deepinfer_prep.writing.output_checks import check_separate, check_sources_outside, check_space, check_usable
from deepinfer_prep.writing.publication import publish, resume_publication
from deepinfer_prep.writing.shared_writer import SharedWriter, share_workspace
from deepinfer_prep.writing.workspace import Workspace


class LocalTarget:
    """A folder as `Target`."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def check_separate(self, source: Place) -> None:
        """Refuse an output that is the source, lies inside it or holds it."""
        if isinstance(source, Path):
            check_separate(source, self.place)

    def check_sources(self, sources: Iterable[Place]) -> None:
        """Refuse source files that are links into the output."""
        check_sources_outside((source for source in sources if isinstance(source, Path)), self.place)

    def check_usable(self, identity: Mapping[str, Any], names: Sequence[str], overwrite: bool) -> None:
        """Refuse a folder that holds anything but an unfinished run of the same conversion."""
        check_usable(self.place, identity, names, overwrite)

    def check_space(self, needed: int) -> None:
        """Refuse when the file system has less room than the output still needs."""
        check_space(self.place, needed)

    @contextmanager
    def hold(self, identity: Mapping[str, Any], files: Sequence[OutputFile], overwrite: bool) -> Iterator[LocalRun]:
        """Lock the folder; what an unfinished run of another conversion left in it is thrown away."""
        with Workspace(self.place) as workspace:
            check_usable(self.place, identity, [file.name for file in files], overwrite)
            if not is_same_run(read_identity(workspace.root), identity):
                workspace.clear()
            run = LocalRun(workspace, identity, files)
            try:
                yield run
            finally:
                run.close()

    def discard(self) -> bool:
        """End an unfinished run; the lock is taken first, so that a run that is under way is refused."""
        if not any((self.place / name).exists() for name in (WORKSPACE_NAME, DISCARDED_NAME)):
            return False
        with Workspace(self.place) as workspace:
            workspace.clear()
        return True


class LocalRun:
    """A workspace and its journal as `Run`."""

    warnings: tuple[str, ...] = ()

    def __init__(self, workspace: Workspace, identity: Mapping[str, Any], files: Sequence[OutputFile]) -> None:
        self._workspace = workspace
        self._sizes = {file.name: file.size for file in files}
        self._permissions = {file.name: file.state.permissions for file in files}
        self._identity = identity
        self.writer = LocalWriter(workspace)
        self._opened: Journal | None = None

    def close(self) -> None:
        """Close the journal; what it holds stays."""
        if self._opened is not None:
            self._opened.close()

    def resume_publication(self, workers: int, chunk_size: int, progress: ProgressCallback | None) -> Manifest | None:
        """As `publication.resume_publication`."""
        return resume_publication(self._workspace, self._sizes, workers, chunk_size, progress)

    def read_done(self) -> dict[tuple[str, int], SegmentDone]:
        """What the journal says; it is opened for more."""
        earlier = read_done(self._workspace.root)
        self._opened = Journal(self._workspace.root, self._identity)
        return earlier

    def block_bytes(self, size: int) -> int:
        """One segment, however large the file is."""
        return segments.SEGMENT_BYTES

    def share(self) -> SharedWriter:
        """A writer for processes that see the same folder."""
        return share_workspace(self._workspace, self._sizes.items())

    def record(self, done: Sequence[SegmentDone]) -> None:
        """Append to the journal and sync it."""
        if self._opened is not None:
            self._opened.record(done)

    def put_file(self, name: str, size: int, chunks: Iterable[fp8.U8]) -> FileRecord:
        """Write and sync a file of the workspace."""
        digests, position = SegmentDigests(), 0
        with self._workspace.writer(name) as writer:
            writer.allocate(size)
            for chunk in chunks:
                writer.write_from(chunk.data, position)
                digests.update(chunk)
                position += chunk.size
            writer.sync()
        return FileRecord(size, digests.digests())

    def written(self, file: OutputFile) -> Path:
        """The file in the workspace."""
        return self._workspace.path(file.name)

    def publish(self, manifest: Manifest) -> None:
        """As `publication.publish`."""
        publish(self._workspace, manifest, self._permissions)
