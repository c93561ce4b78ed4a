"""S3 and what speaks its language, through boto3: its credentials, profiles, regions, endpoints and retries."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from deepinfer_prep.errors import ConversionError, PrepError
from deepinfer_prep.files.storage import FileState
from deepinfer_prep.remote.reading import BrokenStreamError

_CONNECTIONS = 64
_ATTEMPTS = 8
_PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "CopyObject": "s3:PutObject and s3:GetObject",
    "ListParts": "s3:ListMultipartUploadParts",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
}
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_THROTTLED = ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "503")
_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301")
_BAD_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure")


@dataclass(frozen=True, slots=True)
class S3Store:
    """The objects of a bucket below a prefix, which is empty or ends with a slash."""

    bucket: str
    prefix: str

    @property
    def is_pinned(self) -> bool:
        """Objects can be replaced."""
        return False

    def url(self, name: str) -> str:
        """The address of an object."""
        return f"s3://{self.bucket}/{self.prefix}{name}".rstrip("/")

    def list(self) -> Mapping[str, FileState]:
        """Every object below the prefix; a thousand to a request."""
        return {name: state for name, state in self.list_below("") if not name.endswith("/")}

    def list_below(self, start: str) -> Iterator[tuple[str, FileState]]:
        """The objects whose names start so, with their states."""
        arguments = {"Bucket": self.bucket, "Prefix": self.prefix + start}
        while True:
            with self.explained("ListObjectsV2", start):
                page = client().list_objects_v2(**arguments)
            for item in page.get("Contents", ()):
                yield item["Key"][len(self.prefix) :], FileState(item["Size"], 0, item["ETag"])
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def state(self, name: str) -> FileState:
        """Size and ETag of an object now."""
        return self.head(name)[0]

    def head(self, name: str) -> tuple[FileState, Mapping[str, str]]:
        """State and metadata of an object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with self.explained("HeadObject", name):
            answer = client().head_object(Bucket=self.bucket, Key=self.prefix + name)
        return FileState(answer["ContentLength"], 0, answer["ETag"]), answer.get("Metadata", {})

    def open_range(self, name: str, state: FileState, start: int, end: int) -> S3Stream:
        """A ranged GET with If-Match."""
        with self.explained("GetObject", name):
            try:
                answer = client().get_object(
                    Bucket=self.bucket, Key=self.prefix + name, Range=f"bytes={start}-{end - 1}", IfMatch=state.version
                )
            except (BotoConnectionError, HTTPClientError) as error:
                raise BrokenStreamError(str(error)) from None
        if answer["ContentLength"] != end - start:
            answer["Body"].close()
            raise BrokenStreamError(f"{answer['ContentLength']:,} bytes were announced instead of {end - start:,}")
        return S3Stream(answer["Body"])

    @contextmanager
    def explained(self, action: str, name: str) -> Iterator[None]:
        """Turn an error of boto3 into one for a person."""
        try:
            yield
        except ClientError as error:
            raise self._explain(error, action, name) from None
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise PrepError(
                f"{self.url(name)}: no credentials were found ({error}). Run `aws configure` or `aws sso login`, "
                "set AWS_PROFILE, or give the machine a role.",
                code="no-credentials",
            ) from None
        except (BotoConnectionError, HTTPClientError) as error:
            raise PrepError(
                f"{self.url(name)}: the store cannot be reached: {error}. Check the network, and AWS_ENDPOINT_URL and "
                "the region if they are set; then run the command again: it resumes.",
                code="unreachable",
            ) from None
        except BotoCoreError as error:
            raise PrepError(f"{self.url(name)}: {action} failed: {error}.", code="store-failed") from None

    def _explain(self, error: ClientError, action: str, name: str) -> Exception:
        answer = error.response
        code, url = str(answer.get("Error", {}).get("Code", "")), self.url(name)
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = f"{code}: {answer.get('Error', {}).get('Message') or ''}".rstrip(": ")
        if code == "NoSuchBucket":
            return PrepError(
                f"{url}: there is no bucket {self.bucket!r}. Check its name, the region and the account.",
                code="no-bucket",
            )
        if code in _EXPIRED:
            return ConversionError(
                f"{url}: the credentials expired ({said}). Get new ones, such as with `aws sso login`, and run the "
                "same command again: it resumes.",
                code="expired-credentials",
            )
        if code in _BAD_KEYS:
            return PrepError(f"{url}: the credentials are not valid ({said}). Check them.", code="bad-credentials")
        if code in _WRONG_REGION or status == 301:
            return PrepError(
                f"{url}: the bucket lies in another region{_region(answer)} ({said}). Set AWS_REGION to the bucket's.",
                code="wrong-region",
            )
        if code in _THROTTLED or status == 503:
            return ConversionError(
                f"{url}: the store asks to slow down and did so for {_ATTEMPTS} attempts ({said}). Run the same "
                "command again, with fewer --workers: it resumes.",
                code="throttled",
            )
        if code == "PreconditionFailed" or status == 412:
            return ConversionError(
                f"{url} changed while it was being read or written. Nothing was published. Make sure that nothing "
                "writes there, and convert again with --overwrite.",
                code="source-changed",
            )
        if code in ("NoSuchKey", "NoSuchUpload", "404", "NotFound"):
            return FileNotFoundError(2, "No such object", url)
        if status == 403:
            permission = _PERMISSIONS.get(action, f"s3:{action}")
            return PrepError(
                f"{url}: access denied to {action} ({said}). The role or user needs {permission} on "
                f"arn:aws:s3:::{self.bucket}/{'' if 'ListBucket' in permission else self.prefix + name}, and the "
                "bucket's policy must not deny it. What was written is kept; the same command resumes.",
                code="access-denied",
            )
        return PrepError(f"{url}: {action} failed ({said or status}). Run the command again.", code="store-failed")


def _region(answer: Mapping[str, Any]) -> str:
    found = answer.get("Error", {}).get("Region") or answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get(
        "x-amz-bucket-region"
    )
    return f", {found}" if found else ""


class S3Stream:
    """The body of a GET."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def read_into(self, buffer: memoryview) -> int:
        """Read some bytes."""
        try:
            return int(self._body.readinto(buffer))
        except (BotoCoreError, ResponseStreamingError, OSError) as error:
            raise BrokenStreamError(str(error)) from None

    def close(self) -> None:
        """Close the connection, or give it back where the body was read to its end."""
        self._body.close()


_lock = threading.Lock()


def client() -> Any:
    """The client of this process, made at first use; safe to share between threads."""
    with _lock:
        return _client(os.getpid())


@lru_cache(maxsize=1)
def _client(process: int) -> Any:
    retries: dict[str, Any] = {"mode": os.environ.get("AWS_RETRY_MODE", "standard")}
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        retries["total_max_attempts"] = _ATTEMPTS
    config = Config(
        retries=retries,
        max_pool_connections=_CONNECTIONS,
        read_timeout=60,
        connect_timeout=10,
        # A signature over the body hashes it with SHA-256, which takes longer than all the rest of sending it. What
        # carries data has a checksum in a signed header instead.
        s3={"payload_signing_enabled": False},
        # This package adds the checksums itself: boto3's own are computed in Python and not known to every store.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="deepinfer-prep",
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except BotoCoreError as error:
        raise PrepError(f"S3: {error}. Check AWS_PROFILE, AWS_REGION and ~/.aws.", code="bad-configuration") from None
