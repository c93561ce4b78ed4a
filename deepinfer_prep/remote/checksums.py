"""Checksums that a store compares with what has arrived."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from typing import Any

from awscrt import checksums

_SEND_BYTES = 1024 * 1024


class Body(io.RawIOBase):
    """Memory as a file that an HTTP client reads and rewinds, without a copy of it."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Copy the next bytes; 0 at the end."""
        part = self._data[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def read(self, size: int = -1) -> memoryview:
        """The next bytes where they lie; more than asked for, as clients ask for 16 KiB and send what they get."""
        part = self._data[self._position :][:_SEND_BYTES]
        self._position += len(part)
        return part


def crc64(data: memoryview) -> str:
    """CRC-64/NVME as S3's headers carry it."""
    return base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode()


def md5(data: memoryview) -> str:
    """MD5 as Content-MD5 carries it."""
    return base64.b64encode(_md5(data).digest()).decode()


def has_etag(data: memoryview, etag: str) -> bool:
    """Whether an object or part with this ETag is known to hold these bytes; unknown where ETags are not MD5."""
    return _md5(data).hexdigest() == etag.strip('"')


def _md5(data: memoryview) -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


def arguments(data: memoryview, knows_crc64: bool) -> Mapping[str, str]:
    """What a request that sends `data` says so that the store checks it."""
    if knows_crc64:
        return {"ChecksumAlgorithm": "CRC64NVME", "ChecksumCRC64NVME": crc64(data)}
    return {"ContentMD5": md5(data)}
