"""The hub as a source, against a small server of the endpoints that huggingface_hub asks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")

from deepinfer_prep.manifest import read_manifest
from tests.small_files import tree

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/model"


class Hub:
    """The files of one model, what is asked for, and faults."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.url = ""
        self.ranges: list[tuple[str, str]] = []
        self.cut = 0
        """So many answers end in their middle."""


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            """Silent."""

        def do_GET(self) -> None:  # The name that the base class calls.
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/org/gated"):
                return self._fail(403, "GatedRepo")
            if path in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/{COMMIT}"):
                return self._info()
            if path == f"/api/models/{MODEL}/revision/v1":
                return self._info()
            if path.startswith(f"/api/models/{MODEL}/revision/"):
                return self._fail(404, "RevisionNotFound")
            name = path.removeprefix(f"/{MODEL}/resolve/{COMMIT}/")
            if name == path or name not in hub.files:
                return self._fail(404, "RepoNotFound")
            return self._range(name)

        def _info(self) -> None:
            siblings = [{"rfilename": name, "size": len(data), "blobId": "b"} for name, data in hub.files.items()]
            body = json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode()
            self._answer(200, body, {"Content-Type": "application/json"})

        def _range(self, name: str) -> None:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            data = hub.files[name]
            hub.ranges.append((name, self.headers["Range"]))
            body = data[first : last + 1]
            headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            if hub.cut and len(body) > 1000:
                hub.cut -= 1
                self.send_response(206)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Range", headers["Content-Range"])
                self.end_headers()
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return
            self._answer(206, body, headers)

        def _fail(self, status: int, code: str) -> None:
            self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "says the hub"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def running(hub: Hub) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(source: Path) -> Iterator[Hub]:
    found = Hub(tree(source))
    with running(found):
        yield found


def run(hub: Hub, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as huggingface_hub reads its endpoint when it is imported."""
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": "/nonexistent", **environment}
    command = [sys.executable, "-m", "deepinfer_prep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **variables})


def test_a_model_of_the_hub_is_converted_and_its_commit_is_written_down(hub: Hub, source: Path, tmp_path: Path) -> None:
    ended = run(hub, "convert", f"hf://{MODEL}@v1", str(tmp_path / "out"), "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert read_manifest(tmp_path / "out").source_url == f"hf://{MODEL}@{COMMIT}"
    local = run(hub, "convert", str(source), str(tmp_path / "local"), "--quiet")
    assert local.returncode == 0, local.stderr
    one, other = tree(tmp_path / "out"), tree(tmp_path / "local")
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == ["neuron_manifest.json"]
    verified = run(hub, "verify", str(tmp_path / "out"), "--source", f"hf://{MODEL}")
    assert verified.returncode == 0, verified.stdout


def test_an_answer_that_is_cut_is_asked_for_again_from_there(hub: Hub, source: Path, tmp_path: Path) -> None:
    hub.cut = 3
    ended = run(hub, "convert", f"hf://{MODEL}", str(tmp_path / "out"), "--quiet")
    assert ended.returncode == 0, ended.stderr
    assert hub.cut == 0
    assert run(hub, "verify", str(tmp_path / "out"), "--source", str(source)).returncode == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf://org/gated", "is gated: accept its conditions on its page, then log in"),
        ("hf://org/none", "is not on the hub, or is private"),
        (f"hf://{MODEL}@none", "is not on the hub, or is private: check its name and revision"),
        ("hf://model", "names no model"),
    ],
)
def test_what_cannot_be_read_is_explained(hub: Hub, name: str, words: str) -> None:
    ended = run(hub, "inspect", name)
    assert ended.returncode == 1
    assert words in ended.stderr


def test_offline_mode_is_kept(hub: Hub) -> None:
    ended = run(hub, "inspect", f"hf://{MODEL}", HF_HUB_OFFLINE="1")
    assert ended.returncode == 1
    assert "HF_HUB_OFFLINE is set" in ended.stderr


def test_a_name_that_is_no_folder_is_offered_as_a_model(hub: Hub) -> None:
    assert f"give hf://{MODEL}" in run(hub, "inspect", MODEL).stderr


def test_nothing_is_written_to_the_hub(hub: Hub, source: Path) -> None:
    ended = run(hub, "convert", str(source), f"hf://{MODEL}")
    assert ended.returncode == 1
    assert "an output cannot be written there" in ended.stderr
