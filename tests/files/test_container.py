"""The container reader and writer against the safetensors library: every dtype, every rule, every limit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save

from deepinfer_prep.errors import ContainerError, PrepError
from deepinfer_prep.files.container import MAX_HEADER_BYTES, TensorInfo, encode_header, parse_header, read_header
from deepinfer_prep.quantized import DTYPES
from tests.small_files import SCALE, WEIGHT, write_file

ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def entry(**changes: Any) -> dict[str, Any]:
    return {**ENTRY, **changes}


def file_of(text: str | bytes, data: bytes = b"1234") -> bytes:
    encoded = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + data


def is_accepted_by_the_library(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


def reject(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ContainerError) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path))


def test_the_dtypes_are_those_of_the_library() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(file_of(json.dumps({"t": entry(dtype="none")})))
    assert set(re.findall(r"`(\w+)`", str(caught.value))) - {"none"} == set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_as_the_library_reads_it(dtype: str) -> None:
    size = 8 * DTYPES[dtype].bits // 8
    content = file_of(json.dumps({"t": entry(dtype=dtype, shape=[2, 4], data_offsets=[0, size])}), bytes(size))
    ((name, found),) = safetensors.deserialize(content)
    header = parse_header(content[8:-size], len(content), "x")
    assert header.tensors == (TensorInfo(name, found["dtype"], tuple(found["shape"]), 0, size),)
    assert header.tensors[0].nbytes == size
    assert header.tensors[0].elements == 8


def test_what_the_library_writes_is_read_and_what_is_written_the_library_reads(tmp_path: Path) -> None:
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b\n\u00e9": np.arange(5, dtype=np.int8),
        "e": np.empty((0, 7), dtype=np.int64),
        "s": np.array(1.5),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(arrays, {"format": "pt"}))
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert {tensor.name: tensor.shape for tensor in header.tensors} == {n: a.shape for n, a in arrays.items()}
    body = path.read_bytes()[header.data_start :]
    for tensor in header.tensors:
        assert body[tensor.start : tensor.end] == arrays[tensor.name].tobytes()
    again = encode_header(header.tensors, header.metadata) + body
    assert sorted(safetensors.deserialize(again)) == sorted(safetensors.deserialize(path.read_bytes()))


def test_data_starts_8_aligned_and_the_header_is_compact() -> None:
    for length in range(1, 20):
        encoded = encode_header([TensorInfo("n" * length, "F32", (1,), 0, 4)], {})
        assert len(encoded) % 8 == 0
        assert int.from_bytes(encoded[:8], "little") == len(encoded) - 8
        assert encoded[8:].rstrip(b" ").endswith(b'"data_offsets":[0,4]}}')
    assert json.loads(encode_header([], {})[8:]) == {}


NAMES = [
    "",
    "new\nline",
    "../../x",
    "/etc/passwd",
    "\U0001f9ee",
    "nul\0",
    'quote"\\',
    "\x7f\x1f",
    "x" * 10_000,
    "\u2028",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
@pytest.mark.parametrize("escaped", [True, False])
def test_any_text_is_a_name(name: str, escaped: bool) -> None:
    content = file_of(json.dumps({name: ENTRY}, ensure_ascii=escaped))
    header = parse_header(content[8:-4], len(content), "x")
    assert [tensor.name for tensor in header.tensors] == [name]
    again = encode_header(header.tensors, {}) + b"1234"
    assert [found for found, _ in safetensors.deserialize(again)] == [name]


@pytest.mark.parametrize("text", ['{"\\ud800":%s}', '{"\\udc00\\ud800":%s}', '{"a":%s,"__metadata__":{"\\ud800":""}}'])
def test_half_a_surrogate_pair_is_no_text(tmp_path: Path, text: str) -> None:
    content = file_of(text % json.dumps(ENTRY))
    assert not is_accepted_by_the_library(content)
    assert "half a surrogate pair" in reject(tmp_path, content)


BROKEN: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "not valid JSON"),
    "NaN": ('{"t":NaN}', "tensor 't' needs"),
    "NaN in metadata": ('{"__metadata__":{"a":NaN}}', "not a map from text to text"),
    "Infinity in a shape": ('{"t":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}', "not whole numbers"),
    "trailing NUL": ("{}\0", "not valid JSON"),
    "trailing text": ("{}{}", "not valid JSON"),
    "byte order mark": ("\ufeff{}", "not valid JSON"),
    "bad UTF-8": (b'{"\xff":1}', "not valid JSON text .*utf-8"),
    "surrogate in UTF-8": (b'{"\xed\xa0\x80":1}', "not valid JSON text .*utf-8"),
    "control character": ('{"a\x01":1}', "not valid JSON"),
    "deep nesting": ('{"t":' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON text .*recursion"),
    "an array": ("[]", "not a JSON object"),
    "a number": ("1", "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "not a map from text to text"),
    "metadata of null": ({"__metadata__": {"a": None}}, "not a map from text to text"),
    "metadata as array": ({"__metadata__": [["a", "b"]]}, "not a map from text to text"),
    "entry null": ({"t": None}, "tensor 't' needs"),
    "entry empty": ({"t": {}}, "tensor 't' needs"),
    "entry of 2": ({"t": {"dtype": "F32", "shape": [1]}}, "tensor 't' needs"),
    "dtype unknown": ({"t": entry(dtype="F8_E4M3FN")}, "unknown dtype 'F8_E4M3FN'; known are .*F8_E4M3,"),
    "dtype in lower case": ({"t": entry(dtype="f32")}, "unknown dtype 'f32'"),
    "dtype null": ({"t": entry(dtype=None)}, "unknown dtype None"),
    "dtype a number": ({"t": entry(dtype=1)}, "unknown dtype 1"),
    "dtype an array": ({"t": entry(dtype=["F32"])}, "unknown dtype"),
    "shape text": ({"t": entry(shape="")}, "not whole numbers"),
    "shape object": ({"t": entry(shape={})}, "not whole numbers"),
    "shape null": ({"t": entry(shape=None)}, "not whole numbers"),
    "shape true": ({"t": entry(shape=[True])}, "not whole numbers"),
    "shape float": ({"t": entry(shape=[1.0])}, "not whole numbers"),
    "shape negative": ({"t": entry(shape=[-1, -1])}, "not whole numbers"),
    "shape nested": ({"t": entry(shape=[[1]])}, "not whole numbers"),
    "shape exponent": ('{"t":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', "not whole numbers"),
    "shape minus zero": ('{"t":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}', "not whole numbers"),
    "shape of 4,000 digits": ({"t": entry(shape=[0, int("9" * 4000)])}, "not whole numbers"),
    "shape beyond Python's limit of digits": (
        '{"tt":{"dtype":"F32","shape":[' + "7" * 5000 + '],"data_offsets":[0,4]}}',
        "'tt' has a shape .* not whole numbers",
    ),
    "shape of 2^64": ({"t": entry(shape=[0, 2**64], data_offsets=[0, 0])}, "not whole numbers"),
    "product beyond 64 bits": ({"t": entry(shape=[2**63, 2, 0], data_offsets=[0, 0])}, "more than 2\\^64 bits"),
    "bits beyond 64 bits": ({"t": entry(shape=[2**61], data_offsets=[0, 2**63])}, "more than 2\\^64 bits"),
    "offsets of 1": ({"t": entry(data_offsets=[0])}, "not whole numbers"),
    "offsets of 3": ({"t": entry(data_offsets=[0, 4, 4])}, "not whole numbers"),
    "offsets swapped": ({"t": entry(data_offsets=[4, 0])}, "takes 4 bytes, but its offsets 4 to 0"),
    "offsets too wide": ({"t": entry(data_offsets=[0, 8])}, "takes 4 bytes, but its offsets 0 to 8"),
    "half a byte": ({"t": entry(dtype="F4", shape=[7], data_offsets=[0, 4])}, r"takes 3\.5 bytes"),
    "a quarter byte": ({"t": entry(dtype="F6_E2M3", shape=[5], data_offsets=[0, 4])}, r"takes 3\.75 bytes"),
    "hole at the start": ({"t": entry(data_offsets=[4, 8])}, "tensor 't' starts at byte 4 and leaves a hole after"),
    "hole": ({"a": ENTRY, "b": entry(data_offsets=[8, 12])}, "tensor 'b' .* leaves a hole after tensor 'a'"),
    "overlap": ({"a": ENTRY, "b": entry(data_offsets=[2, 6])}, "tensor 'b' .* overlaps tensor 'a'"),
    "the same bytes twice": ({"a": ENTRY, "b": ENTRY}, "tensor 'b' .* overlaps tensor 'a'"),
    "empty tensor inside another": (
        {"a": ENTRY, "b": entry(shape=[0], data_offsets=[2, 2])},
        "tensor 'b' .* overlaps tensor 'a'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_a_rule_is_rejected_as_the_library_rejects_it(tmp_path: Path, case: str) -> None:
    header, message = BROKEN[case]
    content = file_of(header if isinstance(header, str | bytes) else json.dumps(header))
    assert not is_accepted_by_the_library(content)
    assert re.search(message, reject(tmp_path, content))


STRICTER = {
    "a tensor twice": '{"t":%(e)s,"t":%(e)s}',
    "metadata key twice": '{"t":%(e)s,"__metadata__":{"a":"1","a":"2"}}',
    "extra field": '{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"note":"hi"}}',
    "tensor as array": '{"t":["F32",[1],[0,4]]}',
    "dtype as object": '{"t":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}',
}
"""Files that the library accepts and this reader rejects, for the reasons in docs/robustness.md."""


@pytest.mark.parametrize("case", STRICTER)
def test_where_this_reader_is_stricter_than_the_library(tmp_path: Path, case: str) -> None:
    content = file_of(STRICTER[case] % {"e": json.dumps(ENTRY)} if "%(e)" in STRICTER[case] else STRICTER[case])
    assert is_accepted_by_the_library(content)
    assert re.search("occurs twice|nothing else|unknown dtype", reject(tmp_path, content))


LENIENT = {
    "space around": "  {} \n\t ",
    "padding": "{}" + " " * 100,
    "metadata null": '{"__metadata__":null}',
    "scalar": '{"t":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
    "a zero dimension among huge ones": '{"t":{"dtype":"F32","shape":[0,18446744073709551615,9],"data_offsets":[0,0]}}',
    "empty tensors anywhere": '{"a":{"dtype":"I8","shape":[0],"data_offsets":[4,4]},"b":%(e)s,'
    '"c":{"dtype":"F64","shape":[3,0],"data_offsets":[0,0]}}',
    "fields and tensors in any order": '{"b":{"data_offsets":[2,4],"shape":[2],"dtype":"I8"},'
    '"a":{"shape":[2],"dtype":"I8","data_offsets":[0,2]}}',
    "escaped names": '{"\\u0074\\/":%(e)s}',
}


@pytest.mark.parametrize("case", LENIENT)
def test_what_is_unusual_but_valid_is_accepted(tmp_path: Path, case: str) -> None:
    text = LENIENT[case].replace("%(e)s", json.dumps(ENTRY))
    content = file_of(text, b"1234" if "4]" in text else b"")
    assert is_accepted_by_the_library(content)
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert {tensor.name for tensor in read_header(path).tensors} == {
        name for name, _ in safetensors.deserialize(content)
    }


NO_CONTAINERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is 0 bytes long, too short"),
    "seven bytes": (b"1234567", "is 7 bytes long, too short"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n",
        "is a Git LFS pointer: the real file was not downloaded. Run `git lfs pull`",
    ),
    "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "is an HTML or XML page"),
    "HTML after blank lines": (b"\r\n\r\n  <html><body>Sign in</body></html>", "is an HTML or XML page"),
    "JSON": (b'{"error":"Repository not found"}', "is JSON text"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(64), "is a GGUF file"),
    "zip": (b"PK\x03\x04\0\0\x08\x08" + bytes(64), "is a zip archive, as torch.save writes it"),
    "reserved space": (bytes(4096), "begins with zeros"),
    "pickle": (b"\x80\x02}q\0(X\x06\0\0\0weight" + bytes(64), "a header of .* above the format's limit"),
    "cut header": ((1000).to_bytes(8, "little") + b'{"t":', "expected at least 1,008 bytes, found 13"),
    "length of 2^63": ((2**63).to_bytes(8, "little") + bytes(64), "above the format's limit of 100,000,000"),
}


@pytest.mark.parametrize("case", NO_CONTAINERS)
def test_what_is_found_in_place_of_a_file_is_told(tmp_path: Path, case: str) -> None:
    content, message = NO_CONTAINERS[case]
    assert not is_accepted_by_the_library(content)
    assert re.search(message, reject(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-7], "expected 4,2.. bytes, found 4,2..: 7 bytes missing"),
        (lambda content: content + bytes(7), "expected 4,2.. bytes, found 4,2..: 7 bytes too many"),
        (lambda content: content[:-4100], "4,100 bytes missing"),
    ],
)
def test_missing_and_excess_bytes_are_counted(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    content = write_file(tmp_path / "whole.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE}).read_bytes()
    assert re.search(message, reject(tmp_path, change(content)))


def test_the_limit_of_a_header_is_that_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(MAX_HEADER_BYTES.to_bytes(8, "little") + b"{}" + b" " * (MAX_HEADER_BYTES - 2))
    assert read_header(path).data_start == MAX_HEADER_BYTES + 8
    with safetensors.safe_open(path, "np") as file:
        assert list(file.keys()) == []
    with path.open("r+b") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.seek(0, 2)
        file.write(b" ")
    with pytest.raises(ContainerError, match="header of 100,000,001 bytes, above the format's limit of 100,000,000"):
        read_header(path)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "np")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(PrepError, match=r"x\.safetensors is a folder, where a file was expected"):
        read_header(tmp_path / "x.safetensors")
