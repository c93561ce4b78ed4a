"""Turns what a user writes into a place: a path, `s3://bucket/prefix` or `hf://org/model@revision`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.storage import Place, StoredPlace

_SCHEMES = ("s3", "hf")


def to_place(text: str | os.PathLike[str] | StoredPlace) -> Place:
    """The place that a path or URL names. Nothing is read, except that a hub revision is pinned to its commit.

    Raises:
        PrepError: the scheme is not known, the URL is not complete, or the extra that it needs is not installed.
    """
    if isinstance(text, StoredPlace):
        return text
    scheme, separator, rest = str(text).partition("://")
    if not separator or isinstance(text, Path):
        return Path(text)
    if scheme not in _SCHEMES:
        raise PrepError(
            f"{text}: the scheme {scheme!r} is not known. Give a folder, s3://bucket/prefix or hf://org/model.",
            code="unknown-scheme",
        )
    return _s3(rest) if scheme == "s3" else _hub(rest)


def _s3(rest: str) -> Place:
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise PrepError(f"s3://{rest} names no bucket. Write s3://bucket/prefix.", code="bad-url")
    try:
        from deepinfer_prep.remote.s3 import S3Store
    except ModuleNotFoundError as error:
        raise _missing(f"s3://{rest}", "s3", error) from None
    from deepinfer_prep.remote.tree import path_in

    return path_in(lambda prefix: S3Store(bucket, prefix), key)


def _hub(rest: str) -> Place:
    try:
        from deepinfer_prep.remote.hub import pin
    except ModuleNotFoundError as error:
        raise _missing(f"hf://{rest}", "hub", error) from None
    from deepinfer_prep.remote.tree import path_in

    repository, _, key = _split_hub(rest)
    store = pin(repository)
    return path_in(lambda prefix: replace(store, prefix=prefix), key)


def _split_hub(rest: str) -> tuple[str, str, str]:
    """org/model@revision and the path in it; a revision with a slash in it is not meant."""
    organization, slash, more = rest.partition("/")
    model, separator, key = more.partition("/")
    if not (organization and slash and model):
        raise PrepError(f"hf://{rest} names no model. Write hf://org/model or hf://org/model@revision.", code="bad-url")
    return f"{organization}/{model}", separator, key


def _missing(url: str, extra: str, error: ModuleNotFoundError) -> PrepError:
    return PrepError(
        f"{url} needs the package {error.name}. Install it: pip install 'deepinfer-prep[{extra}]'", code="missing-extra"
    )
