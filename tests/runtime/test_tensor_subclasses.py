"""fp8 values inside tensor subclasses are never passed over: rescaled, or refused by name."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from deepinfer_prep.errors import LegalizationError, RefusedError
from deepinfer_prep.fp8 import ABOVE_240_CODES
from deepinfer_prep.runtime import gemm, rescale_fp8_weights

quantization = pytest.importorskip("torchao.quantization")


def quantized(granularity: str) -> nn.Sequential:
    """Two linear layers with torchao's weights, one scale a row or one a tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)).bfloat16()
    kind = getattr(quantization, granularity)()
    for layer in model:
        weight = quantization.Float8Tensor.from_hp(layer.weight.detach(), granularity=kind)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return model


def above_240(model: nn.Sequential) -> int:
    codes = torch.tensor(ABOVE_240_CODES)
    return sum(int(torch.isin(layer.weight.qdata.view(torch.uint8), codes).sum()) for layer in model)


@pytest.mark.parametrize("granularity", ["PerRow", "PerTensor"])
def test_values_inside_are_halved_and_their_scales_doubled(granularity: str) -> None:
    model = quantized(granularity)
    before = [(layer.weight.qdata.float() * layer.weight.scale.float()).clone() for layer in model]
    scales = [layer.weight.scale.clone() for layer in model]
    assert above_240(model) > 0
    assert rescale_fp8_weights(model) == 2
    assert above_240(model) == 0
    for layer, expected, scale in zip(model, before, scales, strict=True):
        assert torch.equal(layer.weight.scale, 2 * scale)
        # Half a step of the smallest codes is all that halving may change.
        assert ((layer.weight.qdata.float() * layer.weight.scale.float() - expected).abs() <= scale * 2**-9).all()
    assert rescale_fp8_weights(model) == 0


def test_preparing_refuses_what_would_be_misread() -> None:
    with pytest.raises(RefusedError, match=r"0\.weight\.qdata"):
        gemm.prepare_model(quantized("PerRow"))


def test_preparing_says_that_no_kernel_takes_them(caplog: pytest.LogCaptureFixture) -> None:
    model = quantized("PerRow")
    rescale_fp8_weights(model)
    with caplog.at_level(logging.WARNING):
        assert gemm.prepare_model(model) == 0
    assert "no kernel for 2 weights" in caplog.text
    assert "Float8Tensor" in caplog.text


def test_the_compile_backend_does_not_let_them_pass() -> None:
    run = torch.compile(quantized("PerRow"), backend="deepinfer_neuron", options={"base_backend": "aot_eager"})
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(torch.randn(4, 64, dtype=torch.bfloat16))
    assert isinstance(caught.value.inner_exception, LegalizationError)
    assert "Float8Tensor" in str(caught.value.inner_exception)
