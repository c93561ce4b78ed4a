"""An S3 server in this process that counts requests and can be told to misbehave."""

from __future__ import annotations

import base64
import hashlib
import io
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

import boto3
from awscrt import checksums
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "models"
Answer = Iterable[bytes]


@dataclass(frozen=True)
class Request:
    """One request: what a rule decides by."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]

    @property
    def action(self) -> str:
        """A short name of what is asked for."""
        if "partNumber" in self.query:
            return "UploadPart"
        if "uploads" in self.query:
            return "CreateUpload" if self.method == "POST" else "ListUploads"
        if "uploadId" in self.query:
            return {"POST": "CompleteUpload", "GET": "ListParts", "DELETE": "AbortUpload"}[self.method]
        if "list-type" in self.query:
            return "List"
        return "Copy" if "copy-source" in self.headers else self.method.capitalize()


Rule = Callable[[Request], str | None]
"""Gives the name of a fault, or None."""


@dataclass
class S3Server:
    """The server's address, what it was asked, and the rule by which it misbehaves."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of bodies that were answered, by path."""
    rule: Rule | None = None
    ignores_conditions: bool = False
    knows_crc: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def actions(self) -> Counter[str]:
        """How often each action was asked for."""
        return Counter(request.action for request in self.requests)

    def fail_once_each(self, fault: str, wanted: Callable[[Request], bool]) -> None:
        """Let every wanted request fail the first time."""
        seen: set[Any] = set()

        def rule(request: Request) -> str | None:
            key = (request.method, request.path, request.headers.get("range"), str(sorted(request.query.items())))
            with self.lock:
                if not wanted(request) or key in seen:
                    return None
                seen.add(key)
            return fault

        self.rule = rule


def crc64(data: bytes) -> str:
    """CRC-64/NVME as a header carries it."""
    return base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode()


def md5(data: bytes) -> str:
    """MD5 as a header carries it."""
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def error_xml(code: str, message: str = "injected") -> bytes:
    """The body of an S3 error."""
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


STATUS = {
    "500": ("500 Internal Server Error", "InternalError"),
    "503": ("503 Slow Down", "SlowDown"),
    "403": ("403 Forbidden", "AccessDenied"),
    "412": ("412 Precondition Failed", "PreconditionFailed"),
    "expired": ("400 Bad Request", "ExpiredToken"),
    "region": ("301 Moved Permanently", "PermanentRedirect"),
    "501": ("501 Not Implemented", "NotImplemented"),
}


class _Application:
    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Answer:
        headers = {
            "range": environ.get("HTTP_RANGE", ""),
            "if-match": environ.get("HTTP_IF_MATCH", ""),
            "crc64": environ.get("HTTP_X_AMZ_CHECKSUM_CRC64NVME", ""),
            "md5": environ.get("HTTP_CONTENT_MD5", ""),
            "sha256": environ.get("HTTP_X_AMZ_CONTENT_SHA256", ""),
        }
        if "HTTP_X_AMZ_COPY_SOURCE" in environ:
            headers["copy-source"] = environ["HTTP_X_AMZ_COPY_SOURCE"]
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        request = Request(environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"]), query, headers)
        with self._server.lock:
            self._server.requests.append(request)
        data = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(data)
        if (headers["crc64"] and headers["crc64"] != crc64(data)) or (headers["md5"] and headers["md5"] != md5(data)):
            start_response("400 Bad Request", [("Content-Type", "application/xml")])
            return [error_xml("BadDigest")]
        if self._server.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if not self._server.knows_crc:
            for name in [name for name in environ if "CHECKSUM" in name]:
                environ.pop(name)
        fault = self._server.rule(request) if self._server.rule is not None else None
        if fault in STATUS:
            status, code = STATUS[fault]
            start_response(status, [("Content-Type", "application/xml"), ("x-amz-bucket-region", "eu-west-1")])
            return [error_xml(code)]
        if fault == "drop request":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        body = self._moto(environ, start_response)
        return self._watched(environ, request, body, fault)

    def _watched(self, environ: dict[str, Any], request: Request, body: Answer, fault: str | None) -> Iterator[bytes]:
        data = b"".join(body)
        with self._server.lock:
            self._server.sent_bytes[request.path] += len(data)
        if fault in ("truncate", "drop answer"):
            yield data[: len(data) // 2]
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR if fault == "drop answer" else socket.SHUT_WR)
            return
        if fault == "slow":
            for start in range(0, len(data), max(1, len(data) // 4)):
                yield data[start : start + max(1, len(data) // 4)]
                threading.Event().wait(0.02)
            return
        yield data


@contextmanager
def running_server() -> Iterator[S3Server]:
    """Start a server with one empty bucket, and stop it."""
    server = S3Server()
    http = make_server("127.0.0.1", 0, _Application(server), threaded=True)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def admin(server: S3Server) -> Any:
    """A client of the tests' own."""
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
