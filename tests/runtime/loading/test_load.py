"""Loading models from prepared checkpoints: values, attributes, merged and tied parameters, refusals."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from tqdm import tqdm

from deepinfer_prep.errors import ManifestError, RefusedError
from deepinfer_prep.runtime.load import load_weights, weights_iterator
from deepinfer_prep.runtime.loading.assembly import Target
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.slices import Slice
from tests.runtime import prepared
from tests.runtime.models import Holder, attribute, frozen
from tests.runtime.prepared import same_bytes

EXPERTS = 3
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def sources() -> dict[str, prepared.Tensor]:
    tensors = {
        "norm.weight": prepared.bf16((64,), 1),
        "proj.weight": prepared.fp8((72, 64), 2),
        "proj.scale": prepared.e8m0((3, 2), 2),
        "hc_attn_fn": prepared.f32((24, 256), 3),
        "gate.bias": prepared.f32((3,), 4),
        "shared.w1.weight": prepared.fp8((64, 64), 5),
        "shared.w1.scale": prepared.e8m0((2, 2), 5),
        "shared.w3.weight": prepared.fp8((32, 64), 6),
        "shared.w3.scale": prepared.e8m0((1, 2), 6),
    }
    for expert in range(EXPERTS):
        for number, name in enumerate(("w1", "w2", "w3")):
            tensors[f"experts.{expert}.{name}.weight"] = prepared.fp4((64, 32), 10 * expert + number)
            tensors[f"experts.{expert}.{name}.scale"] = prepared.e8m0((64, 2), 10 * expert + number)
    return tensors


def rename(name: str) -> str | Target | None:
    match = re.fullmatch(r"experts\.(\d+)\.(w[123])\.(\w+)", name)
    if match:
        expert, matrix, kind = int(match[1]), match[2], match[3]
        if kind == "scale":
            return None
        return Target("w2", expert) if matrix == "w2" else Target("w13", expert, part=int(matrix == "w3"))
    if name in ("shared.w1.weight", "shared.w3.weight"):
        return Target("shared", part=int("w3" in name))
    return name


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Holder(weight=torch.zeros(64, dtype=torch.bfloat16))
        self.proj = Holder(weight=torch.zeros(72, 64, dtype=E4M3))
        self.hc_attn_fn = frozen(torch.zeros(24, 256))
        self.gate = nn.Module()
        self.gate.register_buffer("bias", torch.zeros(3))
        self.gate.register_buffer("cache", torch.zeros(3), persistent=False)
        self.w13 = frozen(torch.zeros(EXPERTS, 128, 32, dtype=torch.int8))
        self.w2 = frozen(torch.zeros(EXPERTS, 64, 32, dtype=torch.int8))
        self.shared = frozen(torch.zeros(96, 64, dtype=E4M3))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared.prepare(tmp_path_factory.mktemp("load"), sources(), shards=2)


@pytest.fixture(scope="module")
def expected(output: Path) -> dict[str, torch.Tensor]:
    return prepared.stored(output)


@pytest.fixture(params=["meta", "cpu"])
def model(request: pytest.FixtureRequest) -> Model:
    with torch.device(request.param):
        return Model()


def experts(expected: dict[str, torch.Tensor], kind: str, *matrices: str) -> torch.Tensor:
    stacks = [
        torch.cat([expected[f"experts.{expert}.{name}.{kind}"].view(torch.uint8) for name in matrices])
        for expert in range(EXPERTS)
    ]
    return torch.stack(stacks)


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_values_and_everything_attached(
    model: Model, output: Path, expected: dict[str, torch.Tensor], access: str
) -> None:
    checkpoint = PreparedCheckpoint(output, access=access)  # type: ignore[arg-type]
    report = load_weights(model, checkpoint, rename=rename)
    assert same_bytes(model.norm.weight, expected["norm.weight"])
    assert same_bytes(model.gate.bias, expected["gate.bias"])
    weight = model.proj.weight
    assert same_bytes(weight, expected["proj.weight"])
    assert same_bytes(attribute(weight, "sf"), expected["proj.scale"])
    assert torch.equal(attribute(weight, "_nki_scale"), expected["proj.scale"].view(torch.uint8))
    assert attribute(weight, "_nki_weight").dtype == torch.uint8
    assert attribute(weight, "_nki_weight").data_ptr() == weight.data_ptr()
    fn = model.hc_attn_fn
    assert same_bytes(fn, expected["hc_attn_fn"])
    assert same_bytes(attribute(fn, "_nki_fn_hi"), expected["hc_attn_fn.hi"])
    assert same_bytes(attribute(fn, "_nki_fn_lo"), expected["hc_attn_fn.lo"])
    assert not hasattr(model.norm.weight, "sf")
    assert report.tensors == 7
    assert (report.missing, report.unexpected) == ((), ())


def test_merged_parameters(model: Model, output: Path, expected: dict[str, torch.Tensor]) -> None:
    load_weights(model, output, rename=rename)
    for parameter, matrices in ((model.w13, ("w1", "w3")), (model.w2, ("w2",))):
        assert parameter.dtype == torch.int8
        assert torch.equal(parameter.view(torch.uint8), experts(expected, "weight", *matrices))
        assert attribute(parameter, "sf").dtype == E8M0
        assert torch.equal(attribute(parameter, "sf").view(torch.uint8), experts(expected, "scale", *matrices))
        assert torch.equal(attribute(parameter, "_nki_scale"), experts(expected, "scale", *matrices))
        assert attribute(parameter, "_nki_weight").data_ptr() == parameter.data_ptr()
        assert attribute(parameter, "_nki_weight").shape == parameter.shape
    for kind, found in (("weight", model.shared), ("scale", attribute(model.shared, "sf"))):
        both = torch.cat([expected[f"shared.{name}.{kind}"].view(torch.uint8) for name in ("w1", "w3")])
        assert torch.equal(found.view(torch.uint8), both)


def test_memory_that_exists_is_filled_in_place(output: Path) -> None:
    model = Model()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    load_weights(model, output, rename=rename)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_a_parameter_that_is_not_row_major_is_filled_and_gets_no_kernel(
    output: Path, expected: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    model.proj.weight = frozen(torch.zeros(64, 72, dtype=E4M3).t())
    load_weights(model, output, rename=rename)
    assert same_bytes(model.proj.weight, expected["proj.weight"])
    assert not hasattr(model.proj.weight, "_nki_weight")
    assert "proj.weight" in caplog.text


def test_everything_wrong_is_named_at_once_and_nothing_changes(output: Path) -> None:
    model = Model()
    model.norm.weight = frozen(torch.zeros(65, dtype=torch.bfloat16))
    model.gate.bias = torch.zeros(3, dtype=torch.float64)
    model.extra = frozen(torch.zeros(2))
    del model.hc_attn_fn
    with pytest.raises(RefusedError) as caught:
        load_weights(model, output, rename=rename)
    text = str(caught.value)
    for words in (
        str(output),
        r"norm.weight: wrong shape: the model has [65], the checkpoint gives [64] (from 'norm.weight')",
        "gate.bias: wrong dtype: the model has torch.float64, the checkpoint gives torch.float32",
        "1 missing: no tensor of the checkpoint goes to extra",
        "1 unexpected: the model has no place for hc_attn_fn",
        "Nothing was loaded",
    ):
        assert words in text
    assert not model.proj.weight.view(torch.uint8).any()
    assert not hasattr(model.proj.weight, "sf")


def test_names_beyond_a_screenful_are_counted(output: Path) -> None:
    model = nn.Module()
    for number in range(50):
        setattr(model, f"absent{number}", frozen(torch.zeros(1)))
    with pytest.raises(RefusedError, match=r"50 missing: .* and 30 more"):
        load_weights(model, output)


def test_not_strict_reports_what_is_left_out(output: Path) -> None:
    model = Model()
    model.extra = frozen(torch.zeros(2))
    del model.hc_attn_fn
    report = load_weights(model, output, rename=rename, strict=False)
    assert report.missing == ("extra",)
    assert report.unexpected == ("hc_attn_fn",)
    assert "1 missing, 1 unexpected" in str(report)
    assert model.proj.weight.view(torch.uint8).any()


def test_not_strict_still_refuses_a_wrong_shape(output: Path) -> None:
    model = Model()
    model.norm.weight = frozen(torch.zeros(65, dtype=torch.bfloat16))
    with pytest.raises(RefusedError, match="wrong shape"):
        load_weights(model, output, rename=rename, strict=False)


def test_an_absent_expert_is_named(output: Path) -> None:
    def without(name: str) -> str | Target | None:
        return None if name.startswith("experts.1.") else rename(name)

    with pytest.raises(RefusedError, match=r"w2: expert 1 of 'experts\.0\.w2\.weight' to"):
        load_weights(Model(), output, rename=without)


def test_two_tensors_for_one_place_are_refused(output: Path) -> None:
    def clash(name: str) -> str | Target | None:
        return "shared" if name.startswith("shared.w") and name.endswith("weight") else rename(name)

    with pytest.raises(RefusedError, match=r"'shared\.w1\.weight' and 'shared\.w3\.weight' both want the same place"):
        load_weights(Model(), output, rename=clash)


def test_weights_of_different_kinds_do_not_share_a_parameter(tmp_path: Path) -> None:
    tensors = {
        "a.weight": prepared.fp8((64, 64)),
        "a.scale": prepared.e8m0((64, 2)),
        "b.weight": prepared.fp8((64, 64)),
        "b.scale": prepared.e8m0((2, 2)),
    }
    output = prepared.prepare(tmp_path, tensors)
    model = Holder(both=torch.zeros(128, 64, dtype=E4M3))
    with pytest.raises(RefusedError, match="quantized in different blocks \\(1x32 and 32x32\\)"):
        load_weights(
            model, output, rename=lambda name: Target("both", part=int(name[0] == "b")) if "we" in name else None
        )


def test_stacked_weights_must_end_with_whole_blocks(tmp_path: Path) -> None:
    tensors = {
        "a.weight": prepared.fp8((40, 64)),
        "a.scale": prepared.e8m0((2, 2)),
        "b.weight": prepared.fp8((64, 64)),
        "b.scale": prepared.e8m0((2, 2)),
    }
    output = prepared.prepare(tmp_path, tensors)
    model = Holder(both=torch.zeros(104, 64, dtype=E4M3))
    with pytest.raises(RefusedError, match=r"'a\.weight' has 40 rows and 'b\.weight' follows, but 32 rows share"):
        load_weights(
            model, output, rename=lambda name: Target("both", part=int(name[0] == "b")) if "we" in name else None
        )
    report = load_weights(
        model, output, rename=lambda name: Target("both", part=int(name[0] == "a")) if "we" in name else None
    )
    assert report.tensors == 1


def test_tied_parameters_are_read_once(tmp_path: Path) -> None:
    tensors = {"embed.weight": prepared.bf16((256, 64), 1), "head.weight": prepared.bf16((256, 64), 2)}
    output = prepared.prepare(
        tmp_path, tensors | {"n.weight": prepared.fp8((32, 32)), "n.scale": prepared.e8m0((1, 1))}
    )
    with torch.device("meta"):
        model = nn.Module()
        model.embed = Holder(weight=torch.zeros(256, 64, dtype=torch.bfloat16))
        model.head = nn.Module()
        model.head.weight = model.embed.weight
        model.n = Holder(weight=torch.zeros(32, 32, dtype=E4M3))
    report = load_weights(model, PreparedCheckpoint(output, access="pread"))
    assert model.head.weight is model.embed.weight
    assert same_bytes(model.embed.weight, prepared.stored(output)["embed.weight"])
    assert report.tied == {"head.weight": "embed.weight"}
    assert report.bytes_loaded == 256 * 64 * 2 + 32 * 32 + 1


def test_a_tied_parameter_needs_one_of_its_names_only(tmp_path: Path) -> None:
    output = prepared.prepare(tmp_path, {"head.weight": prepared.bf16((8, 64))})
    model = nn.Module()
    model.embed = Holder(weight=torch.zeros(8, 64, dtype=torch.bfloat16))
    model.head = nn.Module()
    model.head.weight = model.embed.weight
    assert not load_weights(model, output).missing
    assert same_bytes(model.embed.weight, prepared.stored(output)["head.weight"])


def test_a_module_held_twice_is_loaded_once(output: Path, expected: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        model = Model()
        model.again = model.proj
    assert load_weights(model, output, rename=rename).tensors == 7
    assert model.again.weight is model.proj.weight
    assert same_bytes(model.again.weight, expected["proj.weight"])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_scale_that_the_model_holds_itself_is_the_one_attached(
    output: Path, expected: dict[str, torch.Tensor], device: str
) -> None:
    with torch.device(device):
        model = Model()
        model.proj.scale = frozen(torch.zeros(3, 2, dtype=E8M0))
    load_weights(model, output, rename=rename)
    assert attribute(model.proj.weight, "sf") is model.proj.scale
    assert same_bytes(model.proj.scale, expected["proj.scale"])
    assert attribute(model.proj.weight, "_nki_scale").data_ptr() == model.proj.scale.data_ptr()


def test_bytes_under_another_dtype(output: Path, expected: dict[str, torch.Tensor]) -> None:
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = Model()
            model.proj.weight = frozen(torch.zeros(72, 64, dtype=torch.uint8))
            model.w2 = frozen(torch.zeros(EXPERTS, 64, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
        load_weights(model, output, rename=rename)
        assert model.proj.weight.dtype == torch.uint8
        assert torch.equal(model.proj.weight, expected["proj.weight"].view(torch.uint8))
        assert model.w2.dtype == torch.float4_e2m1fn_x2
        assert torch.equal(model.w2.view(torch.uint8), experts(expected, "weight", "w2"))


def test_class_attributes_and_gradient_of_a_parameter_are_kept(output: Path) -> None:
    class Special(nn.Parameter):
        pass

    with torch.device("meta"):
        model = Model()
        model.norm.weight = Special(torch.zeros(64, dtype=torch.bfloat16), requires_grad=True)
        model.norm.weight.weight_loader = rename
    load_weights(model, output, rename=rename)
    assert type(model.norm.weight) is Special
    assert model.norm.weight.requires_grad
    assert model.norm.weight.weight_loader is rename
    assert not model.proj.weight.requires_grad


def test_buffers_that_no_checkpoint_fills_are_reported(output: Path) -> None:
    with torch.device("meta"):
        model = Model()
    report = load_weights(model, output, rename=rename)
    assert report.left_on_meta == ("gate.cache",)
    assert "1 on meta" in str(report)


def test_attributes_of_an_earlier_load_go(output: Path) -> None:
    model = Model()
    model.norm.weight.sf = torch.ones(1)
    model.norm.weight._nki_scale = torch.ones(1)
    model.proj.weight._nki_block_scale = torch.ones(1)
    load_weights(model, output, rename=rename)
    assert not hasattr(model.norm.weight, "sf")
    assert not hasattr(model.norm.weight, "_nki_scale")
    assert not hasattr(model.proj.weight, "_nki_block_scale")


def test_targets_count_experts_from_zero() -> None:
    with pytest.raises(ValueError, match="return None"):
        Target("w", -1)


def test_slices_of_one_rank(output: Path, expected: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        model = Model()
        model.proj = Holder(weight=torch.zeros(40, 64, dtype=E4M3))
    load_weights(
        model, output, rename=rename, slices=lambda name: Slice(rows=(32, 72)) if name == "proj.weight" else None
    )
    assert same_bytes(model.proj.weight, expected["proj.weight"][32:])
    assert same_bytes(attribute(model.proj.weight, "sf"), expected["proj.scale"][1:])


def test_a_scale_that_is_a_parameter_follows_the_slice_of_its_weight(
    output: Path, expected: dict[str, torch.Tensor]
) -> None:
    with torch.device("meta"):
        model = Model()
        model.proj = Holder(weight=torch.zeros(40, 64, dtype=E4M3), scale=torch.zeros(2, 2, dtype=E8M0))
    load_weights(
        model, output, rename=rename, slices=lambda name: Slice(rows=(32, 72)) if name == "proj.weight" else None
    )
    assert same_bytes(model.proj.scale, expected["proj.scale"][1:])
    assert attribute(model.proj.weight, "sf") is model.proj.scale


def test_a_slice_through_a_block_is_one_of_the_refusals(output: Path) -> None:
    model = Model()
    model.proj = Holder(weight=torch.zeros(62, 64, dtype=E4M3))
    with pytest.raises(RefusedError, match="rows 10 to 72 cut through blocks of 32 rows"):
        load_weights(
            model, output, rename=rename, slices=lambda name: Slice(rows=(10, 72)) if name == "proj.weight" else None
        )


def test_a_path_that_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        load_weights(Model(), tmp_path)


def test_one_summary_line(output: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deepinfer_prep")
    report = load_weights(Model(), output, rename=rename, progress=False)
    lines = [record.getMessage() for record in caplog.records if record.name == "deepinfer_prep.runtime.load"]
    assert lines == [f"{output}: {report}"]
    assert re.match(r"loaded 7 tensors, 0\.0\d GB in \d+\.\d\d s \(\d+\.\d\d GB/s\), 0\.0\d GB read", str(report))


@pytest.mark.parametrize("shown", [True, False])
def test_the_progress_bar_counts_every_byte_and_is_for_terminals(
    output: Path, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    bars = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, **options: object) -> None:
            bars.append(options | {"done": 0})
            super().__init__(**options)

        def update(self, count: float | None = 1) -> None:
            bars[-1]["done"] += count

    monkeypatch.setattr("deepinfer_prep.runtime.load.tqdm", Bar)
    load_weights(Model(), output, rename=rename, progress=shown)
    list(weights_iterator(output, progress=shown))
    assert [bar["done"] for bar in bars] == [bar["total"] for bar in bars]
    assert bars[0]["total"] > 30_000
    assert [bar["disable"] for bar in bars] == [None if shown else True] * 2


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_the_iterator_gives_the_source_names_in_the_order_of_the_files(
    output: Path, expected: dict[str, torch.Tensor], access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_prep.runtime.load._BATCH_BYTES", 5000)
    checkpoint = PreparedCheckpoint(output, access=access)  # type: ignore[arg-type]
    found = list(weights_iterator(checkpoint))
    assert [name for name, _ in found] == list(checkpoint.names)
    assert {name for name, _ in found} == set(sources())
    for name, tensor in found:
        assert same_bytes(tensor, expected[name]), name


def test_the_iterator_reads_only_what_is_selected(output: Path) -> None:
    checkpoint = PreparedCheckpoint(output, access="pread")
    names = [name for name, _ in weights_iterator(checkpoint, select=lambda name: name.startswith("experts.1."))]
    assert sorted(names) == sorted(name for name in sources() if name.startswith("experts.1."))
    assert checkpoint.bytes_read == 3 * (64 * 32 + 64 * 2)


def test_an_abandoned_iterator_leaves_nothing_running(output: Path) -> None:
    iterator = weights_iterator(output, progress=False)
    next(iterator)
    iterator.close()
    assert next(weights_iterator(output))[1].numel()


def test_the_iterator_feeds_a_loader_of_the_usual_kind(output: Path, expected: dict[str, torch.Tensor]) -> None:
    target = torch.zeros(72, 64, dtype=E4M3)
    loaders = {"proj.weight": target.copy_}
    for name, tensor in weights_iterator(output):
        loaders.get(name, lambda tensor: None)(tensor)
    assert same_bytes(target, expected["proj.weight"])
