"""Any byte range of an output equals the same range of the whole, whatever chunks it is computed in."""

from __future__ import annotations

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_prep.errors import ConversionError
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.files.container import read_header
from deepinfer_prep.files.segments import new_buffer
from deepinfer_prep.files.storage import RangeReader
from deepinfer_prep.planning.plan import Operation, Options, OutputFile, Run, plan_conversion
from deepinfer_prep.writing.output_bytes import Tally, output_chunks
from tests.small_files import Tensor, write_config, write_file

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
SCALES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E8M0": 1}


def random_tensor(dtype: str, elements: int, random: np.random.Generator) -> bytes:
    if dtype in FLOATS:
        return random.normal(size=elements).astype(FLOATS[dtype]).tobytes()
    return random.integers(0, 254 if dtype == "F8_E8M0" else 256, elements, dtype=np.uint8).tobytes()


def whole_output(file: OutputFile) -> tuple[bytes, np.ndarray]:
    """The output computed tensor by tensor with ml_dtypes, and the source's fp8 codes."""
    raw = file.source.read_bytes()[file.source_start :]
    out, codes = bytearray(), []
    for tensor in file.tensors:
        data = np.frombuffer(raw[tensor.start : tensor.end], np.uint8)
        if tensor.dtype == "U8":
            out += data.tobytes()
        elif tensor.dtype == "F8_E4M3":
            codes.append(data)
            values = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            out += (values / 2).astype(ml_dtypes.float8_e4m3fn).tobytes()
        elif tensor.dtype == "F8_E8M0":
            out += (data + 1).astype(np.uint8).tobytes()
        else:
            scales = data.view(FLOATS[tensor.dtype])
            out += (scales * FLOATS[tensor.dtype](2)).astype(FLOATS[tensor.dtype]).tobytes()
    return file.header + bytes(out), np.concatenate([*codes, np.empty(0, np.uint8)])


@st.composite
def files(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """(scale dtype, weight elements, copied bytes) triples."""
    row = st.tuples(st.sampled_from(list(SCALES)), st.integers(0, 300), st.integers(0, 9))
    return draw(st.lists(row, min_size=1, max_size=6))


@settings(max_examples=60, deadline=None)
@given(
    rows=files(), cuts=st.lists(st.integers(0, 4000), max_size=6), chunk=st.integers(1, 500), seed=st.integers(0, 99)
)
def test_ranges_and_chunks_do_not_change_the_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, int, int]],
    cuts: list[int],
    chunk: int,
    seed: int,
) -> None:
    file = plan_of(tmp_path_factory.mktemp("range"), rows, seed)
    expected, codes = whole_output(file)
    bounds = sorted({0, file.size, *(cut for cut in cuts if cut < file.size)})
    found, tally = bytearray(file.size), Tally()
    with RangeReader(file.source) as source:
        for start, end in itertools.pairwise(bounds):
            for offset, data in output_chunks(file, source, start, end, new_buffer(chunk), tally):
                found[offset : offset + data.size] = data.tobytes()
    assert bytes(found) == expected
    assert tally.counts.nan == int(((codes & 0x7F) == 0x7F).sum()) == sum(tally.nan_codes.values())
    assert tally.counts.above_240 == int(((codes & 0x7F) >= 0x78).sum()) - tally.counts.nan


def plan_of(folder: Path, rows: list[tuple[str, int, int]], seed: int) -> OutputFile:
    """A file whose odd-sized tensors push multi-byte scales to odd addresses."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for number, (dtype, elements, copied) in enumerate(rows):
        name = f"l{number}.weight"
        tensors[f"pad{number}"] = ("U8", (copied,), random_tensor("U8", copied, random))
        tensors[name] = ("F8_E4M3", (1, elements), random_tensor("F8_E4M3", elements, random))
        scale = f"l{number}.scale" if dtype == "F8_E8M0" else name + "_scale"
        tensors[scale] = (dtype, (1, 3), random_tensor(dtype, 3, random))
    write_file(folder / "model.safetensors", tensors)
    operations = {
        name: (Operation.HALVE, "") if dtype == "F8_E4M3" else (Operation.DOUBLE, dtype)
        for name, (dtype, _, _) in tensors.items()
        if dtype != "U8"
    }
    header = read_header(folder / "model.safetensors")
    runs = tuple(
        Run(tensor.start, tensor.end, *operations.get(tensor.name, (Operation.COPY, "")))
        for tensor in header.tensors
        if tensor.nbytes
    )
    shard = open_checkpoint(folder).shards[0]
    return OutputFile(
        "model.safetensors",
        shard.path,
        shard.state,
        b"headerbytes",
        header.data_start,
        header.data_size,
        runs,
        header.tensors,
    )


@pytest.mark.parametrize(
    ("dtype", "values", "element"),
    [
        ("F32", np.array([1.0, np.inf], np.float32), 1),
        ("BF16", np.array([np.nan, 1.0], ml_dtypes.bfloat16), 0),
        ("F16", np.array([1.0, 40000.0], np.float16), 1),
    ],
)
def test_a_scale_without_a_double_is_named(tmp_path: Path, dtype: str, values: np.ndarray, element: int) -> None:
    tensors: dict[str, Tensor] = {
        "a.weight": ("F8_E4M3", (2, 3), 1),
        "a.weight_scale": (dtype, (2, 1), values.tobytes()),
    }
    write_file(tmp_path / "model.safetensors", tensors)
    group = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}, "targets": ["Linear"]}
    write_config(tmp_path, quant_method="compressed-tensors", config_groups={"group_0": group})
    file = plan_conversion(open_checkpoint(tmp_path), Options()).files[0]
    with RangeReader(file.source) as source, pytest.raises(ConversionError) as caught:
        list(output_chunks(file, source, 0, file.size, new_buffer(64), Tally()))
    message = str(caught.value)
    assert str(tmp_path / "model.safetensors") in message
    assert f"tensor 'a.weight_scale': element {element} " in message


@pytest.mark.parametrize("chunk", [64, 100_000])
def test_nan_codes_are_booked_to_the_tensor_that_holds_them(tmp_path: Path, chunk: int) -> None:
    """Neighbouring weights are one run; the codes of each are counted for it alone, at its first and last byte too."""
    codes = {"a": [0x7F, 1, 1, 0xFF], "b": [1, 0x7F, 1, 1], "c": [1, 1, 1, 1], "d": [0xFF, 0x7F, 0xFF, 0x7F]}
    tensors: dict[str, Tensor] = {f"{name}.weight": ("F8_E4M3", (2, 2), bytes(found)) for name, found in codes.items()}
    tensors |= {f"{name}.weight_scale": ("F32", (1,), np.ones(1, np.float32).tobytes()) for name in codes}
    write_file(tmp_path / "model.safetensors", tensors)
    file = plan_conversion(open_checkpoint(tmp_path), Options()).files[0]
    assert [run.operation for run in file.runs] == [Operation.HALVE, Operation.DOUBLE]
    tally = Tally()
    with RangeReader(file.source) as source:
        list(output_chunks(file, source, 0, file.size, new_buffer(chunk), tally))
    assert tally.nan_codes == {"a.weight": 2, "b.weight": 1, "d.weight": 4}
    assert tally.counts.nan == 7
