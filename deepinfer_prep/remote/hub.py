"""The Hugging Face hub as a source, through huggingface_hub: its login, its endpoint, its offline mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined,unused-ignore]  # Exported, but not declared so.
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.storage import FileState
from deepinfer_prep.remote.reading import BrokenStreamError

_CHUNK_BYTES = 1024 * 1024
_BROKEN = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class HubStore:
    """The files of a model at one commit, below a prefix that is empty or ends with a slash."""

    repository: str
    commit: str
    prefix: str = ""

    @property
    def is_pinned(self) -> bool:
        """A commit does not change."""
        return True

    def url(self, name: str) -> str:
        """The address of a file at its commit."""
        path = f"{self.prefix}{name}".rstrip("/")
        return f"hf://{self.repository}@{self.commit}" + (f"/{path}" if path else "")

    def list(self) -> Mapping[str, FileState]:
        """Every file of the commit, with its size and hash, from one request."""
        with _explained(self.url("")):
            found = HfApi().model_info(self.repository, revision=self.commit, files_metadata=True).siblings or ()
        files = {file.rfilename: FileState(file.size or 0, 0, _version(file)) for file in found}
        return {name[len(self.prefix) :]: files[name] for name in files if name.startswith(self.prefix)}

    def state(self, name: str) -> FileState:
        """The state of a file, which a commit fixes."""
        found = self.list().get(name)
        if found is None:
            raise FileNotFoundError(2, "No such file", self.url(name))
        return found

    def open_range(self, name: str, state: FileState, start: int, end: int) -> HubStream:
        """A ranged GET of the file at its commit."""
        url = hf_hub_url(self.repository, self.prefix + name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        client: Any = get_session()
        with _explained(self.url(name)):
            try:
                answer = client.send(
                    client.build_request("GET", url, headers=headers), stream=True, follow_redirects=True
                )
            except OfflineModeIsEnabled:
                raise
            except Exception as error:  # The HTTP library differs between versions of huggingface_hub.
                raise BrokenStreamError(str(error) or type(error).__name__) from None
            if answer.status_code in _BROKEN:
                answer.close()
                raise BrokenStreamError(f"the hub answered {answer.status_code}")
            hf_raise_for_status(answer)
        expected = f"bytes {start}-{end - 1}/{state.size}"
        if answer.status_code != 206 or answer.headers.get("Content-Range") != expected:
            answer.close()
            raise PrepError(
                f"{self.url(name)}: asked for {expected}, the answer was {answer.status_code} with "
                f"{answer.headers.get('Content-Range')!r}. The endpoint cannot read parts of files: fetch the "
                "checkpoint with `hf download`, and convert the folder.",
                code="no-ranges",
            )
        return HubStream(answer)


def pin(repository: str) -> HubStore:
    """The store of org/model or org/model@revision, at the commit that the revision names now.

    Raises:
        PrepError: there is no such model or revision, it is gated, or the hub cannot be reached.
    """
    name, _, revision = repository.partition("@")
    with _explained(f"hf://{repository}"):
        found = HfApi().model_info(name, revision=revision or None)
    return HubStore(name, str(found.sha))


def _version(file: Any) -> str:
    return str(file.lfs.sha256 if file.lfs is not None else file.blob_id)


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn an error of the hub into one for a person, with the hub's own advice."""
    try:
        yield
    except GatedRepoError as error:
        raise PrepError(
            f"{url} is gated: accept its conditions on its page, then log in with `hf auth login`. {_said(error)}",
            code="gated",
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise PrepError(
            f"{url} is not on the hub, or is private: check its name and revision, and log in with `hf auth login` "
            f"where it is yours. {_said(error)}",
            code="no-repository",
        ) from None
    except HFValidationError as error:
        raise PrepError(f"{url} is no name of a model: {error}", code="bad-url") from None
    except OfflineModeIsEnabled:
        raise PrepError(
            f"{url} cannot be read while HF_HUB_OFFLINE is set. Unset it, or give the folder of a checkpoint.",
            code="offline",
        ) from None
    except HfHubHTTPError as error:
        raise PrepError(f"{url}: the hub refused. {_said(error)}", code="store-failed") from None
    except PrepError:
        raise
    except OSError as error:
        raise PrepError(f"{url}: the hub cannot be reached: {error}. Check the network.", code="unreachable") from None


def _said(error: Exception) -> str:
    return " ".join(str(error).split())


class HubStream:
    """The body of a ranged GET."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self._chunks = answer.iter_raw(_CHUNK_BYTES)
        self._rest = memoryview(b"")

    def read_into(self, buffer: memoryview) -> int:
        """Read some bytes."""
        try:
            while not self._rest:
                self._rest = memoryview(next(self._chunks))
        except StopIteration:
            return 0
        except Exception as error:  # The HTTP library differs between versions of huggingface_hub.
            raise BrokenStreamError(str(error) or type(error).__name__) from None
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        """Give the connection back, or up."""
        self._answer.close()
