"""Reports of checkpoints and outputs: the verdict, and figures against the tensors' own bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from deepinfer_prep import convert_checkpoint
from deepinfer_prep.cli.render import to_data
from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.container import read_header
from deepinfer_prep.options import Options
from deepinfer_prep.report import build_report, counting
from deepinfer_prep.report.figures import Report
from tests.small_files import SCALE, WEIGHT, write_config, write_file


@pytest.fixture(scope="session")
def sample_report(sample: Path) -> Report:
    return build_report(sample, workers=2)


@pytest.fixture(scope="session")
def output(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "output"
    convert_checkpoint(sample, folder)
    return folder


@pytest.fixture(scope="session")
def output_report(output: Path) -> Report:
    return build_report(output, workers=2)


def fp8_bytes(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every fp8 tensor of a folder's shards, read by this test itself."""
    for path in sorted(folder.glob("*.safetensors")):
        header, content = read_header(path), path.read_bytes()
        for tensor in header.tensors:
            if tensor.dtype == "F8_E4M3":
                start = header.data_start + tensor.start
                yield tensor.name, np.frombuffer(content[start : start + tensor.nbytes], dtype=np.uint8)


def test_figures_of_a_checkpoint_are_those_of_its_elements(sample: Path, sample_report: Report) -> None:
    rows = {row.name: row for row in sample_report.tensors}
    total = rounded = above = 0
    for name, codes in fp8_bytes(sample):
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        halves = (values / 2).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        figures = rows[name].codes
        assert figures is not None
        assert figures.codes == values.size
        assert figures.above_240 == (np.abs(values) > 240).sum()
        assert figures.rounded == (halves * 2 != values).sum()
        total, above, rounded = total + values.size, above + figures.above_240, rounded + figures.rounded
    assert sample_report.total is not None
    assert (sample_report.total.codes, sample_report.total.above_240) == (total, above)
    assert sample_report.total.rounded == rounded
    assert total > 0
    assert above > 0


def test_map_and_distributions_add_up_to_the_total(sample_report: Report) -> None:
    assert sample_report.total is not None
    of_cells = [cell.codes for cell in sample_report.map.cells if cell.codes is not None]
    assert sum(codes.codes for codes in of_cells) == sample_report.total.codes
    assert sum(codes.above_240 for codes in of_cells) == sample_report.total.above_240
    counts = {scope: np.zeros(256, dtype=np.int64) for scope in ("all", "kind", "tensor")}
    for item in sample_report.distributions:
        counts[item.scope] += np.array(item.counts)
    assert counts["all"].sum() == sample_report.total.codes
    assert np.array_equal(counts["all"], counts["kind"])


def test_an_output_tells_what_was_above_240_in_its_source(sample_report: Report, output_report: Report) -> None:
    assert sample_report.total is not None
    assert output_report.total is not None
    assert output_report.total.brought_into_range == sample_report.total.above_240
    assert output_report.total.above_240 == 0
    assert output_report.output is not None
    assert output_report.output.rounded == sample_report.total.rounded
    assert sample_report.total.decibels is not None
    assert output_report.output.halving_decibels == pytest.approx(sample_report.total.decibels.halving, abs=1e-4)


def test_scale_exponents_of_an_output_are_one_higher(sample_report: Report, output_report: Report) -> None:
    after = {row.name: row for row in output_report.tensors}
    compared = 0
    for row in sample_report.tensors:
        if row.role != "fp8 weight":
            continue
        mine, theirs = row.scale, after[row.name].scale
        assert mine is not None
        assert theirs is not None
        assert (theirs.smallest, theirs.median, theirs.largest) == tuple(
            exponent + 1 for exponent in (mine.smallest, mine.median, mine.largest) if exponent is not None
        )
        compared += 1
    assert compared > 0


def test_the_verdict_on_a_checkpoint_that_can_be_converted(sample_report: Report) -> None:
    assert sample_report.verdict.status == "ready"
    total = sample_report.total
    assert total is not None
    expected = f"would misread {total.above_240:,} of its {total.codes:,} fp8 codes"
    assert expected in sample_report.verdict.sentence


def test_the_verdict_on_an_output(output_report: Report) -> None:
    assert output_report.verdict.status == "finished"
    assert output_report.total is not None
    assert f"none of its {output_report.total.codes:,} fp8 codes lies above 240" in output_report.verdict.sentence


def test_the_verdict_on_a_checkpoint_that_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT})
    report = build_report(tmp_path)
    assert report.verdict.status == "refused"
    assert "cannot be converted as it is, for 1 reason" in report.verdict.sentence
    assert "'l.weight'" in report.refusals[0]
    assert report.total is not None
    assert report.total.above_240 == 64 * 64


def test_values_that_stand_in_the_way_are_refused_once_they_are_read(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT, "l.scale": ("F8_E8M0", (2, 2), 255)})
    assert build_report(tmp_path, headers_only=True).verdict.status == "ready"
    report = build_report(tmp_path)
    assert report.verdict.status == "refused"
    assert "'l.scale'" in report.refusals[0]


def test_the_verdict_on_a_checkpoint_without_fp8(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": ("BF16", (4, 4), 0)})
    for headers_only in (False, True):
        report = build_report(tmp_path, headers_only=headers_only)
        assert report.verdict.status == "nothing to do"
        assert "no weight in it is fp8" in report.verdict.sentence
    assert report.map.cells == ()
    assert report.distributions == ()


def test_fp8_without_a_scale_that_is_copied_is_not_counted_as_halved(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": ("F8_E4M3", (4, 4), 0x01)})
    report = build_report(tmp_path, options=Options(unscaled="copy-if-safe"))
    assert report.verdict.status == "nothing to do"
    assert "its fp8 tensors have no scale and are copied" in report.verdict.sentence
    assert report.total is not None
    assert report.total.codes == 0
    assert report.tensors[0].codes is not None
    assert report.tensors[0].codes.codes == 16


def test_headers_alone_give_no_figures_of_codes(sample: Path, sample_report: Report) -> None:
    report = build_report(sample, headers_only=True)
    assert report.verdict.status == "ready"
    assert "Headers alone were read" in report.verdict.sentence
    assert report.total is None
    assert report.distributions == ()
    assert report.sizes == sample_report.sizes
    assert [cell.tensors for cell in report.map.cells] == [cell.tensors for cell in sample_report.map.cells]


def test_an_output_with_a_code_above_240_is_damaged(output: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in output.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    (copy / "neuron").symlink_to(output / "neuron")
    path = next(iter(sorted(copy.glob("model-*.safetensors"))))
    header = read_header(path)
    tensor = next(tensor for tensor in header.tensors if tensor.dtype == "F8_E4M3")
    with path.open("r+b") as file:
        file.seek(header.data_start + tensor.start)
        file.write(b"\x7e")
    report = build_report(copy)
    assert report.verdict.status == "damaged"
    assert "1 of its fp8 codes" in report.verdict.sentence
    path.unlink()
    report = build_report(copy)
    assert report.verdict.status == "damaged"
    assert any("it is missing" in difference for difference in report.refusals)


def test_kernel_scales_that_depend_on_values_are_settled_by_reading(tmp_path: Path) -> None:
    powers, others = (np.full((1, 1), value, dtype=np.float32).tobytes() for value in (0.5, 0.3))
    weight = ("F8_E4M3", (128, 128), 0x38)
    write_config(tmp_path, quant_method="fp8", weight_block_size=[128, 128])
    write_file(
        tmp_path / "model.safetensors",
        {
            "a.weight": weight,
            "a.weight_scale_inv": ("F32", (1, 1), powers),
            "b.weight": weight,
            "b.weight_scale_inv": ("F32", (1, 1), others),
        },
    )
    unread = build_report(tmp_path, headers_only=True)
    assert [row.state for row in unread.kernels] == ["depends on values"]
    read = {row.name: (row.kernel, row.kernel_reason) for row in build_report(tmp_path).tensors}
    assert read == {"a.weight": ("derived", ""), "b.weight": ("none", "not every scale is a positive power of two")}


def test_weights_outside_the_kernels_limits_count_as_without(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    (row,) = build_report(tmp_path).kernels
    assert row.state == "none"
    assert "no kernel takes its shape" in row.reason


def test_of_many_tensors_the_largest_and_the_asked_for_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"layers.{number}.w": ("BF16", (number + 1,), 0) for number in range(20)}
    write_file(tmp_path / "model.safetensors", tensors)
    monkeypatch.setattr(counting, "MOST_ROWS", 3)
    report = build_report(tmp_path, tensors=("layers.1.*", "*.4.w"))
    assert [row.name for row in report.tensors] == [f"layers.{number}.w" for number in (19, 18, 17, 4, 1)]
    assert (report.rows_in_all, report.tensors_in_all) == (20, 20)


def test_a_map_stays_small_whatever_the_names(tmp_path: Path) -> None:
    tensors = {f"layers.{number}.kind{number % 100}.weight": ("F8_E4M3", (1, 1), 0x38) for number in range(1000)}
    write_file(tmp_path / "model.safetensors", tensors)
    report = build_report(tmp_path)
    assert len(report.map.kinds) == 40
    assert report.map.kinds[-1] == "other kinds"
    assert len(report.map.columns) == 125
    assert report.map.columns[0] == "0-7"
    assert sum(cell.tensors for cell in report.map.cells) == 1000
    assert sum(cell.codes.codes for cell in report.map.cells if cell.codes) == 1000


def test_what_verify_wrote_is_shown(output: Path, tmp_path: Path) -> None:
    written = tmp_path / "verify.json"
    written.write_text(json.dumps({"output": str(output), "source": None, "differences": 0}))
    report = build_report(output, headers_only=True, verification=written)
    assert report.output is not None
    verification = report.output.verification
    assert verification is not None
    assert (verification.differences, verification.source, verification.outdated) == (0, None, False)


def test_a_verification_of_something_else_is_an_error(output: Path, sample: Path, tmp_path: Path) -> None:
    written = tmp_path / "verify.json"
    written.write_text(json.dumps({"output": str(tmp_path), "source": None, "differences": 0}))
    with pytest.raises(PrepError, match="the report of another output"):
        build_report(output, headers_only=True, verification=written)
    with pytest.raises(PrepError, match="is no finished output"):
        build_report(sample, headers_only=True, verification=written)
    written.write_text("[]")
    with pytest.raises(PrepError, match="no report of"):
        build_report(output, headers_only=True, verification=written)


def test_the_figures_are_plain_json(sample_report: Report, output_report: Report) -> None:
    for report in (sample_report, output_report):
        again = json.loads(json.dumps(to_data(report)))
        assert again["verdict"]["sentence"] == report.verdict.sentence
        assert len(again["tensors"]) == len(report.tensors)


def test_the_report_does_not_depend_on_workers_and_chunks(sample: Path, sample_report: Report) -> None:
    assert build_report(sample, workers=5, chunk_size=100_000) == sample_report
