"""The files of a checkpoint's folder that are copied with its shards, and those that are left out or refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from deepinfer_prep.errors import CheckpointError, ContainerError
from deepinfer_prep.files.container import LFS_START, read_header
from deepinfer_prep.files.storage import FileState, Place, open_reader
from deepinfer_prep.files.untrusted import leads_out
from deepinfer_prep.naming import DISCARDED_NAME, SHARD_SUFFIX, WORKSPACE_NAME

_SKIPPED = frozenset({".cache", ".git", ".huggingface", "__pycache__", WORKSPACE_NAME, DISCARDED_NAME})
_PARTIAL_SUFFIXES = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".lock")
_CONTROL_FILE_SUFFIX = ".aria2"
_UNCONVERTED = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_LARGEST_LFS_POINTER = 1024
_DEEPEST_FOLDER = 64
_PSEUDO = ("/proc/", "/sys/")
_OTHER_WEIGHT_SUFFIXES = (".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file that is copied as it is; `name` is its path relative to the checkpoint."""

    name: str
    path: Place
    state: FileState


def check_link(root: Place, path: Place, follow_links: bool) -> None:
    """Refuse a file of a checkpoint whose links lead out of its folder: what lies there may be anybody's secret.

    Links into the blobs of a Hugging Face cache are followed, and others where the user says so; never those to what
    is no file at all, such as /proc.

    Raises:
        CheckpointError: it is such a link.
    """
    if not isinstance(root, Path) or not isinstance(path, Path) or not leads_out(root, path):
        return
    target = os.path.realpath(path)
    if target.startswith(_PSEUDO):
        raise CheckpointError(f"{path} leads to {target}, which is no file. Remove it.", code="link-out")
    if not follow_links:
        raise CheckpointError(
            f"{path} is a link to {target}, outside the checkpoint's folder. If it belongs to the checkpoint, say so "
            "with --follow-links; if not, remove it: its contents would be copied.",
            code="link-out",
        )


def exists(path: Place) -> bool:
    """Whether a path leads to something; False as well for a name that no file can have."""
    if not isinstance(path, Path):
        return path.exists()
    try:
        path.stat()
    except ValueError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise
        return False
    return True


def find_others(
    folder: Place, shard_names: set[str], follow_links: bool = False
) -> tuple[tuple[OtherFile, ...], list[str]]:
    others: list[OtherFile] = []
    left_out: dict[str, str] = {}
    for name, path, reach in _walk(folder, "", frozenset({folder.resolve()})):
        check_is_text(name, folder)
        _check_no_download_goes_on(name, folder, shard_names)
        if name in shard_names:
            continue
        if not exists(path):
            raise CheckpointError(
                f"{path} is a link to a file that is not there. Fetch it again, or remove the link.", code="broken-link"
            )
        if path.is_file():
            check_link(folder, path, follow_links)
        reason = _why_left_out(name, path)
        if reason:
            left_out[name] = reason
        else:
            state = FileState.of(path)
            others.append(OtherFile(name, path, replace(state, permissions=state.permissions & reach)))
    return tuple(others), _other_warnings(others, left_out)


def check_is_text(name: str, folder: Place) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{folder} holds a file whose name is not valid UTF-8, {name!r}: the output's manifest could not name it. "
            "Rename or remove it.",
            code="name-not-utf8",
        ) from None


def _check_no_download_goes_on(name: str, folder: Place, shard_names: set[str]) -> None:
    unfinished = name.removesuffix(_CONTROL_FILE_SUFFIX)
    if unfinished in shard_names - {name}:
        raise CheckpointError(
            f"{folder / name} says that the download of {unfinished} beside it is not finished: parts of it may still "
            f"be zeros. Finish the download, or remove {name} if it is.",
            code="unfinished-download",
        )


def _walk(
    folder: Place, prefix: str, above: frozenset[Place], linked: bool = False, reach: int = 0o777
) -> Iterator[tuple[str, Place, int]]:
    """Files below a folder, by relative name; links to folders are followed unless they lead upwards.

    The last of the three are the permission bits that the folders on the way leave to a file.
    """
    if len(above) > _DEEPEST_FOLDER:
        raise CheckpointError(
            f"{folder} lies more than {_DEEPEST_FOLDER} folders deep. Move it out of the checkpoint.", code="too-deep"
        )
    paths: list[Place] = sorted(folder.iterdir(), key=lambda path: path.name)
    for path in paths:
        if path.name in _SKIPPED:
            continue
        if not path.is_dir():
            yield prefix + path.name, path, reach
        elif path.resolve() not in above:
            if linked and path.is_symlink():
                raise CheckpointError(
                    f"{path} is a link to a folder inside a linked folder: a few of these can multiply to millions of "
                    "files. Replace one of the links by the folder itself.",
                    code="link-in-link",
                )
            below, is_linked = above | {path.resolve()}, linked or path.is_symlink()
            yield from _walk(path, f"{prefix}{path.name}/", below, is_linked, reach & _reach(path))


def _reach(folder: Place) -> int:
    """The permission bits that a folder leaves to what is in it: none to a group or others who may not enter it."""
    mode = FileState.of(folder).permissions if isinstance(folder, Path) else 0o777
    return 0o700 | (0o070 if mode & 0o010 else 0) | (0o007 if mode & 0o001 else 0)


def _other_warnings(others: list[OtherFile], left_out: Mapping[str, str]) -> list[str]:
    warnings = [f"{name} is not copied: {reason}." for name, reason in left_out.items()]
    weights = [other for other in others if other.name.endswith(_OTHER_WEIGHT_SUFFIXES)]
    if weights:
        size = sum(other.state.size for other in weights)
        warnings.append(
            f"{len(weights)} files that may hold a second copy of the weights are copied as they are "
            f"({size / 1e9:,.1f} GB), {weights[0].name} among them; remove them from the source if nobody needs them."
        )
    pointers = [other.name for other in others if _is_lfs_pointer(other)]
    if pointers:
        warnings.append(
            f"{len(pointers)} files are Git LFS pointers and are copied as such, {pointers[0]} among them: the real "
            "files were not downloaded. Run `git lfs pull` in the checkpoint's folder first if anybody needs them."
        )
    return warnings


def _is_lfs_pointer(other: OtherFile) -> bool:
    if not len(LFS_START) < other.state.size < _LARGEST_LFS_POINTER:
        return False
    start = bytearray(len(LFS_START))
    with closing(open_reader(other.path)) as file:
        file.read_into(memoryview(start), 0)
    return start == LFS_START


def _why_left_out(name: str, path: Place) -> str:
    """Why a file that is no shard must not go along with the output; empty where it may be copied."""
    if not path.is_file():
        return "it is a pipe, socket or device"
    if name.endswith(_PARTIAL_SUFFIXES):
        return "it is what an unfinished download leaves"
    return _unsafe_weights(name, path) if name.endswith(SHARD_SUFFIX) else ""


def _unsafe_weights(name: str, path: Place) -> str:
    """Why a safetensors file that is no shard must not lie in an output: unconverted fp8, or unreadable."""
    try:
        header = read_header(path)
    except ContainerError as error:
        return f"it is no shard of the checkpoint, and cannot be read ({error})".rstrip(".)") + ")"
    if not any(tensor.dtype in _UNCONVERTED for tensor in header.tensors):
        return ""
    where = "it lies in a folder below the checkpoint's" if "/" in name else "the index does not name it"
    return (
        f"{where}, and it holds fp8 that is not converted, which must not lie beside converted shards; convert it by "
        "itself if anybody needs it"
    )
