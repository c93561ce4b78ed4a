"""The checks; each yields what it found, line by line, and empties the outputs that it made."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import boto3
import torch

from deepinfer_prep.runtime import PreparedCheckpoint, Request
from store_checks.bucket import Prefix, folder_digests
from store_checks.runs import Ended, Running, run

_WORLD = 8
_PUBLISHING = r"PutObject .*/\.deepinfer-prep/manifest\.json"
"""What is sent when everything else is in the store."""
_OTHER = ("--layout", "kernel")
"""Makes another output of the same checkpoint."""
_MEMORY_BYTES = 150 * 10**6
_SEGMENT_BYTES = 64 * 1024 * 1024


class Found(NamedTuple):
    """One line of the report."""

    is_right: bool
    text: str


@dataclass(frozen=True)
class Place:
    """Where a check works: a local checkpoint and its output, the checkpoint in the store, and room for outputs."""

    local: Path
    converted: Path
    expected: dict[str, str]
    """Digests of `converted`."""
    source: Prefix
    scratch: Prefix
    kills: int
    workers: int

    def convert(self, output: Prefix, *options: str, stop: str = "", **environment: str) -> Ended:
        """Convert store to store."""
        return run("convert", self.source.url, output.url, "--quiet", *options, stop=stop, **environment)


def combinations(place: Place) -> Iterator[Found]:
    """Each side local or remote: the same bytes, and `verify` says so."""
    output, folder = place.scratch.below("combinations"), place.converted.with_name("downloaded")
    for source in (str(place.local), place.source.url):
        output.empty()
        ended = run("convert", source, output.url, "--quiet")
        yield Found(ended.status == 0 and output.digests() == place.expected, f"convert {source} to the store")
    ended = run("convert", place.source.url, str(folder), "--quiet")
    yield Found(ended.status == 0 and folder_digests(folder) == place.expected, "convert from the store to a folder")
    shutil.rmtree(folder)
    for result in (str(place.converted), output.url):
        for source in ("", str(place.local), place.source.url):
            ended = run("verify", result, "--quiet", *(("--source", source) if source else ()))
            yield Found(ended.status == 0, f"verify {result} with source {source or 'none'}: {ended.output[-200:]}")
    output.empty()


def inspection(place: Place) -> Iterator[Found]:
    """`inspect` sends at most three requests a shard."""
    ended, shards = run("inspect", place.source.url), len(list(place.local.glob("*.safetensors")))
    asked = sum(line.endswith(".safetensors") for line in ended.requests)
    yield Found(
        ended.status == 0 and asked <= 3 * shards,
        f"inspect sent {asked} requests for {shards} shards, and {len(ended.requests) - asked} others",
    )


def requests(place: Place) -> Iterator[Found]:
    """How many requests a conversion and its verification send, by kind, and the memory they take."""
    output = place.scratch.below("requests")
    converted = place.convert(output, "--workers", str(place.workers))
    yield Found(converted.status == 0, f"convert: {dict(sorted(converted.counts.items()))}")
    limit = _MEMORY_BYTES + 3 * place.workers * _SEGMENT_BYTES // 2
    yield Found(
        converted.peak_bytes <= limit,
        f"peak {converted.peak_bytes / 1e6:.0f} MB with {place.workers} workers, {limit / 1e6:.0f} allowed",
    )
    verified = run("verify", output.url, "--source", place.source.url, "--quiet")
    yield Found(verified.status == 0, f"verify --source: {dict(sorted(verified.counts.items()))}")
    output.empty()


def overwriting(place: Place) -> Iterator[Found]:
    """Nothing of an old output is touched before everything of the new one is in the store."""
    output = place.scratch.below("overwrite")
    place.convert(output, *_OTHER)
    old = output.objects()
    refused = place.convert(output)
    yield Found(
        refused.status == 1 and "--overwrite" in refused.output, f"without --overwrite: {refused.output[-200:]}"
    )
    for stop in ("UploadPart", "partNumber=2", _PUBLISHING):
        ended = place.convert(output, "--overwrite", stop=stop)
        same = output.objects() == old
        yield Found(ended.status < 0 and same, f"killed before {stop}: the old output is {_as(same, 'as it was')}")
    ended = place.convert(output, "--overwrite", stop="CompleteMultipartUpload")
    gone = "neuron_manifest.json" not in output.objects()
    yield Found(ended.status < 0 and gone, "killed in publication: the old manifest is gone, nothing is half new")
    ended = place.convert(output, "--overwrite")
    same = output.digests() == place.expected
    yield Found(ended.status == 0 and same, f"resumed: {_as(same, 'the new output')} {ended.output[-200:]}")
    sent = ended.sent_parts(output.bucket)
    yield Found(not sent, f"resumed publication sent {len(sent)} parts")
    output.empty()


def discarding(place: Place) -> Iterator[Found]:
    """`discard` ends a run and aborts its uploads; what is published stays."""
    output = place.scratch.below("discard")
    place.convert(output, stop=_PUBLISHING)
    before = len(output.uploads())
    ended = run("discard", output.url)
    left, objects = output.uploads(), output.workspace()
    yield Found(
        ended.status == 0 and before > 0 and not left and not objects,
        f"{before} uploads before, {len(left)} after, {len(objects)} objects of the run left: {ended.output}",
    )
    again = run("discard", output.url)
    yield Found(again.status == 0, f"once more: {again.output}")
    output.empty()


def simultaneous(place: Place) -> Iterator[Found]:
    """Two equal runs cannot harm each other; two different ones cannot mix."""
    output = place.scratch.below("twice")
    arguments = ("convert", place.source.url, output.url, "--quiet")
    both = [Running(*arguments), Running(*arguments)]
    ended = [one.end() for one in both]
    is_explained = all(one.status == 0 or "Run the command again" in one.output for one in ended)
    yield Found(is_explained, f"equal runs ended with {[(one.status, one.output[-200:]) for one in ended]}")
    if any(one.status for one in ended):
        again = run(*arguments)
        is_done = again.status == 0 or "finished output" in again.output
        yield Found(is_done, f"the command again: {again.status} {again.output[-200:]}")
    same = output.digests() == place.expected and not output.uploads() and not output.workspace()
    yield Found(same, f"equal runs: the output is {_as(same, 'right and nothing else is left')}")
    output.empty()
    first = Running(*arguments)
    while not output.workspace():
        pass
    other = run(*arguments, *_OTHER)
    yield Found(other.status == 1, f"a different run beside it: {other.output}")
    ended = [first.end()]
    same = output.digests() == place.expected
    yield Found(ended[0].status == 0 and same, f"the first one: {_as(same, 'right')}")
    output.empty()


def errors(place: Place) -> Iterator[Found]:
    """What a person reads when something is wrong."""
    output = place.scratch.below("errors")
    missing = Prefix(f"{place.source.bucket}-is-not-there", "x")
    key = {"AWS_ACCESS_KEY_ID": "NOSUCHKEY0000000000"}
    cases = [
        ("no such bucket, read", run("inspect", missing.url), "there is no bucket"),
        ("no such bucket, written", run("convert", str(place.local), missing.url, "--quiet"), "there is no bucket"),
        ("no checkpoint at the address", run("inspect", place.scratch.below("nothing").url), "nothing"),
        ("unknown key", run("inspect", place.source.url, **key), "the credentials are not valid"),
        ("wrong secret", run("inspect", place.source.url, AWS_SECRET_ACCESS_KEY="wrong"), "are not valid"),
        (
            "nobody listens",
            run("inspect", place.source.url, AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="2"),
            "cannot be reached",
        ),
    ]
    for name, ended, words in cases:
        yield Found(ended.status == 1 and words in ended.output, f"{name} ({ended.seconds:.1f} s): {ended.output}")
    yield _served_or("the bucket lies in another region", "another region", place, AWS_REGION="eu-west-1")
    yield _served_or("the credentials", "a token that no store gave out", place, AWS_SESSION_TOKEN="expired")
    with _Denied(output, "s3:PutObject"):
        ended = place.convert(output)
    is_named = ended.status == 1 and "access denied to" in ended.output and "s3:PutObject" in ended.output
    yield Found(is_named, f"writing denied: {ended.output}")
    place.convert(output, stop="partNumber=2")
    with _Denied(output, "s3:PutObject"):
        ended = place.convert(output)
    yield Found(ended.status == 1 and "same command resumes" in ended.output, f"denied in mid-run: {ended.output}")
    arrived = output.parts()
    ended = place.convert(output)
    same, again = output.digests() == place.expected, arrived & ended.sent_parts(output.bucket)
    yield Found(ended.status == 0 and same and not again, f"resumed after it: {_as(same, 'right')}, {len(again)} again")
    output.empty()


def _served_or(words: str, name: str, place: Place, **environment: str) -> Found:
    """Some stores look at neither regions nor tokens: then the checkpoint is inspected as ever, and this is said."""
    ended = run("inspect", place.source.url, **environment)
    if ended.status == 0:
        return Found(True, f"{name}: this store does not mind")
    return Found(ended.status == 1 and words in ended.output, f"{name} ({ended.seconds:.1f} s): {ended.output}")


class _Denied:
    """A policy of the bucket that denies an action below a prefix."""

    def __init__(self, prefix: Prefix, action: str) -> None:
        self._bucket = prefix.bucket
        resource = f"arn:aws:s3:::{prefix.bucket}/{prefix.key}/*"
        self._policy = (
            '{"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Principal": "*", '
            f'"Action": "{action}", "Resource": "{resource}"}}]}}'
        )

    def __enter__(self) -> None:
        boto3.client("s3").put_bucket_policy(Bucket=self._bucket, Policy=self._policy)

    def __exit__(self, *error: object) -> None:
        boto3.client("s3").delete_bucket_policy(Bucket=self._bucket)


def loading(place: Place) -> Iterator[Found]:
    """Tensors and parts from the store are those of the folder, and a rank of eight receives its share."""
    output = place.scratch.below("loading")
    place.convert(output)
    with PreparedCheckpoint(place.converted) as local, PreparedCheckpoint(output.url) as remote:
        requests = [Request(name) for name in local.names]
        pairs = zip(local.read_all(requests), remote.read_all(requests), strict=True)
        same = all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs if one.numel())
        yield Found(same, f"{len(requests)} tensors are {_as(same, 'the same')}")
        weights = [name for name in local.manifest.weights if local.tensor(name).shape[0] >= 32 * _WORLD]
        received = []
        for rank in range(_WORLD):
            before = remote.bytes_read
            parts = [Request(name, remote.share(name, "rows", rank, _WORLD)) for name in weights]
            pairs = zip(local.read_all(parts), remote.read_all(parts), strict=True)
            same = all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
            received.append(remote.bytes_read - before)
        shared = sum(local.tensor(name).nbytes for name in weights)
        fraction = max(received) / shared
        is_share = same and abs(fraction - 1 / _WORLD) < 0.002
        yield Found(is_share, f"a rank of {_WORLD} received {fraction:.4f} of the {shared:,} bytes that are shared out")
    output.empty()


def kills(place: Place) -> Iterator[Found]:
    """Killed at random moments and resumed: the same bytes, and no finished part sent twice."""
    output, moments = place.scratch.below("kills"), random.Random(0)
    seconds = place.convert(output).seconds
    done = 0
    while done < place.kills:
        output.empty()
        process = Running("convert", place.source.url, output.url, "--quiet")
        process.kill(moments.uniform(0, seconds))
        killed = process.end()
        if killed.status == 0:
            continue
        done += 1
        arrived = output.parts()
        resumed = place.convert(output)
        again = arrived & resumed.sent_parts(output.bucket)
        is_done = resumed.status == 0 or "finished output" in resumed.output
        same = output.digests() == place.expected and not output.uploads()
        yield Found(
            is_done and same and not again,
            f"{done}: killed after {len(killed.requests)} requests and {len(arrived)} parts; resumed "
            f"with {len(resumed.sent_parts(output.bucket))} parts, {len(again)} again: {_as(same, 'identical')}",
        )
    output.empty()


def _as(is_right: bool, words: str) -> str:
    return words if is_right else f"NOT {words}"
