"""The engine of several machines: tasks of a Ray cluster, each of which does a run of pieces on a few threads.

The driver is the process that runs the command. It hands out tasks and gets back results, which are small; bytes go
from the nodes to the files. A task that is lost with its node is repeated on another one.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Read when ray is imported: its makers are told nothing.

import ray
from ray._private import worker
from ray.exceptions import RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deepinfer_prep._version import __version__
from deepinfer_prep.engines.engine import Item, Result, Work
from deepinfer_prep.errors import ConversionError, PrepError, RefusedError, list_some
from deepinfer_prep.workers import interleave, run_parallel

THREADS = 2
"""Threads of a task, which takes one processor: one of them waits for the disk or the network."""
MOST_ITEMS = 8
"""Pieces of work in a task at most, as handing out a task costs the driver 1 to 2 ms."""
_TASKS_A_SLOT = 4
"""Tasks for each processor at least, as far as there are pieces: so nodes end at about the same time."""
_AHEAD = 2
"""Tasks under way or waiting for each processor, so that none waits for the driver."""
_MOST_REPEATS = 8
"""How often a task is repeated whose node was lost, before that ends the run."""
_REFRESH_SECONDS = 5.0
_CONNECT_SECONDS = 10.0
_CHECK_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[Result]):
    """What a task has done, and the error that stopped it."""

    results: list[Result]
    error: PrepError | OSError | MemoryError | None


class RayEngine:
    """The nodes of a cluster as `Engine`; made by `connect`."""

    is_remote = True

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def run(
        self, work: Work[Item, Result], sources: Iterable[Iterable[Item]], count: int, chunk_size: int
    ) -> Generator[Result, None, None]:
        """As `Engine.run`; `work` is sent to each node once, after which tasks carry items alone.

        Raises:
            RefusedError: a node has another version, or does not see the files that the work needs.
            ConversionError: no node is left, or tasks are lost again and again.
        """
        slots = _Slots()
        length = max(1, min(MOST_ITEMS, count // (_TASKS_A_SLOT * slots.count())))
        context = [ray.put(work)]
        _check_nodes(context)
        batches = interleave((_runs(source, length) for source in sources), slots.count())
        pending: dict[Future[_Outcome[Result]], ray.ObjectRef[Any]] = {}
        done: queue.SimpleQueue[Future[_Outcome[Result]]] = queue.SimpleQueue()
        failure: BaseException | None = None
        try:
            while True:
                if failure is None:
                    for batch in islice(batches, max(0, _AHEAD * slots.count() - len(pending))):
                        reference = _task.remote(context, batch, self._threads, chunk_size)
                        future = reference.future()
                        pending[future] = reference
                        future.add_done_callback(done.put)
                if not pending:
                    break
                future = _next_of(done, slots)
                del pending[future]
                try:
                    outcome = future.result()
                except RayError as error:
                    failure = failure or _explain(error)
                    continue
                failure = failure or outcome.error
                yield from outcome.results
        finally:
            for reference in pending.values():
                ray.cancel(reference, force=True)
        if failure is not None:
            raise failure


@contextmanager
def connect(address: str | None = None, threads: int | None = None) -> Iterator[RayEngine]:
    """Join a cluster as its driver, and leave it at the end; a connection that is there already is used and kept.

    Args:
        address: host:port of the head node; defaults to RAY_ADDRESS, else to the cluster that this machine is part of.
        threads: threads of each task; a task takes one processor of a node.

    Raises:
        PrepError: there is no cluster, or it has another version of Ray or Python.
    """
    if ray.is_initialized():
        yield RayEngine(threads or THREADS)
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        raise PrepError(
            f"{address}: this is an address for Ray's clients, and the command has to run on a node of the cluster. "
            "Give host:port of the head node, or submit the command as a job: ray job submit -- deepinfer-prep ...",
            code="bad-url",
        )
    with _signals_kept():
        try:
            _require_answer(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="deepinfer-prep")
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise PrepError(
                f"no Ray cluster was joined at {address}: {reason}. Start one with `ray start --head`, add nodes with "
                "`ray start --address=HEAD:6379`, or leave --engine out: threads need no cluster.",
                code="no-cluster",
            ) from None
    try:
        with _silent_driver():
            yield RayEngine(threads or THREADS)
    finally:
        with _signals_kept():
            ray.shutdown()


@contextmanager
def _silent_driver() -> Iterator[None]:
    """Ray prints on stdout what it has to say of a lost node, and no setting of its own ends that."""
    printed = getattr(worker, "print_to_stdstream", None)
    if printed is None:
        yield
        return
    worker.print_to_stdstream = lambda *arguments, **options: None
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


def _require_answer(address: str) -> None:
    """Ray itself tries for minutes."""
    host, separator, port = address.rpartition(":")
    if separator:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS):
            pass


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets a handler for SIGTERM; an interrupted command has its own way to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Slots:
    """How many tasks the cluster works on at once; nodes come and go, so this is asked for again now and then."""

    def __init__(self) -> None:
        self._count, self._asked = 0, float("-inf")

    def count(self) -> int:
        """Processors of the cluster.

        Raises:
            ConversionError: it has none.
        """
        now = time.monotonic()
        if now - self._asked >= _REFRESH_SECONDS:
            self._count, self._asked = int(ray.cluster_resources().get("CPU", 0)), now
        if not self._count:
            raise ConversionError(
                "the Ray cluster has no node with processors: see `ray status`. What was written is kept; run the "
                "same command again once there are nodes.",
                code="no-nodes",
            )
        return self._count


def _next_of(done: queue.SimpleQueue[Future[Any]], slots: _Slots) -> Future[Any]:
    while True:
        try:
            return done.get(timeout=_REFRESH_SECONDS)
        except queue.Empty:
            slots.count()


def _runs(items: Iterable[Item], length: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while run := list(islice(rest, length)):
        yield run


# -- on the nodes


class _Loaded:
    """The work that this process has loaded last, so that a plan is unpickled once and not for every task."""

    key = ""
    work: Any = None


def _load(context: list[Any]) -> Any:
    (reference,) = context
    if _Loaded.key != reference.hex():
        work = ray.get(reference)
        work.check()
        _Loaded.key, _Loaded.work = reference.hex(), work
    return _Loaded.work


def _compute(context: list[Any], items: list[Any], threads: int, chunk_size: int) -> _Outcome[Any]:
    """Do a run of pieces; an error of ours is a result, so that it arrives as it is."""
    problem = check_work(context)
    if problem is not None:
        return _Outcome([], RefusedError(f"node {socket.gethostname()}: {problem[1]}", code=problem[0]))
    results: list[Any] = []
    try:
        for result in run_parallel(items, _load(context), min(threads, len(items)), chunk_size):
            results.append(result)
    except OSError as error:
        here = f"{error.strerror or error} on node {socket.gethostname()}"
        return _Outcome(results, type(error)(error.errno, here, error.filename))
    except (PrepError, MemoryError) as error:
        return _Outcome(results, error)
    return _Outcome(results, None)


_task = ray.remote(num_cpus=1, max_retries=_MOST_REPEATS, scheduling_strategy="SPREAD")(_compute)


def check_work(context: list[Any]) -> tuple[str, str] | None:
    """Load a work in this process and let it check what it sees; code and message of what is wrong."""
    try:
        _load(context)
    except PrepError as error:
        return error.code, str(error)
    except (ImportError, RaySystemError) as error:  # The plan names what is not installed here.
        return "other-version", f"{error}. Install the same version with the same extras on every node."
    except OSError as error:
        return (
            "node-sees-no-files",
            f"{error.strerror or error}: {error.filename}. Every node has to see the same files under the same paths: "
            "mount the shared file system there, or use s3:// for source and output.",
        )
    return None


def _make_probe() -> Any:
    """A function that Ray sends as code: the node may not have this package."""

    def probe(context: list[Any], version: str) -> tuple[str, str] | None:
        try:
            import deepinfer_prep
        except ModuleNotFoundError as error:
            return "other-version", f"{error}. Install deepinfer-prep[ray]=={version} there."
        if deepinfer_prep.__version__ != version:
            return (
                "other-version",
                f"it has deepinfer-prep {deepinfer_prep.__version__}, and the command is {version}. Install the same "
                "version on every node.",
            )
        from deepinfer_prep.engines.ray_engine import check_work

        return check_work(context)

    return probe


# -- about the nodes


def _check_nodes(context: list[Any]) -> None:
    """Ask each node whether it has this version and sees what the work needs."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    probe = ray.remote(num_cpus=0, max_retries=0)(_make_probe())
    asked = {}
    for node in nodes:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[probe.options(scheduling_strategy=here).remote(context, __version__)] = _name(node)
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_CHECK_SECONDS)
    if silent:
        raise RefusedError(
            f"{list_some([asked[reference] for reference in silent], 5)} did not answer within "
            f"{_CHECK_SECONDS:.0f} seconds. See `ray status`, and take nodes that hang out of the cluster.",
            code="node-silent",
        )
    problems = []
    for reference in answered:
        try:
            problem = ray.get(reference)
        except RayTaskError as error:
            raise _explain(error) from None
        except RayError:
            continue  # The node was lost meanwhile, and its tasks go elsewhere.
        if problem is not None:
            problems.append((f"{asked[reference]}: {problem[1]}", problem[0]))
    if problems:
        raise RefusedError(*(message for message, _ in problems), code=problems[0][1])


def _name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"


def _explain(error: RayError) -> ConversionError:
    reason = " ".join(str(error).split())
    return ConversionError(
        f"a task failed on the Ray cluster, {_MOST_REPEATS} repeats included where its node was lost: {reason[:2000]} "
        "What was written is kept; run the same command again to resume.",
        code="task-lost",
    )
