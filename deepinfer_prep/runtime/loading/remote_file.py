"""One file of tensors in a store, or computed while it is read: parts are read straight into the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from deepinfer_prep import fp8
from deepinfer_prep.files.storage import GAP_BYTES, Readable
from deepinfer_prep.runtime.loading.byte_layout import ByteRuns


class RemoteTensorFile:
    """Reads tensors of one file that is not on this machine; all methods may be called from several threads at once."""

    def __init__(self, place: Readable) -> None:
        self.place = place

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill buffers from consecutive bytes with one request.

        Raises:
            PrepError: the file changed since it was opened, or the store does not answer.
        """
        with closing(self.place.open_reader()) as reader:
            reader.expect(offset, offset + sum(len(buffer) for buffer in buffers))
            for buffer in buffers:
                reader.read_into(buffer, offset)
                offset += len(buffer)

    def read_runs(self, runs: ByteRuns, out: fp8.U8, scratch: fp8.U8) -> int:
        """Read runs of bytes into `out`, several with one request where little lies between them.

        Args:
            out: `runs.nbytes` bytes.
            scratch: takes what is read only to be skipped.

        Returns:
            Bytes read, gaps included where they were.

        Raises:
            PrepError: as `read_scattered`.
        """
        gap = runs.stride - runs.run
        with closing(self.place.open_reader()) as reader:
            if gap < GAP_BYTES:
                reader.expect(runs.start, runs.start + runs.span)
            for number in range(runs.count):
                start = runs.start + number * runs.stride
                if number and gap < GAP_BYTES:
                    reader.read_into(scratch[:gap].data, start - gap)
                reader.read_into(out[number * runs.run : (number + 1) * runs.run].data, start)
        return runs.span if gap < GAP_BYTES else runs.nbytes

    def close(self) -> None:
        """Nothing is open between two reads."""
