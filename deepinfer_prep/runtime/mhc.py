"""Hyper-connections (mHC) with four residual streams: kernels on a Neuron device, the same in torch elsewhere.

The residual trunk is bf16 [..., 4, h], mixes are fp32. `DEEPINFER_NEURON_NKI_HC=0` turns the kernels off.

Inside a compiled graph the compiler narrows fp32 matmul operands to bf16 and folds an in-graph split away, so
a mixing matrix is split before tracing (`prepare_model`, or loading a prepared checkpoint): `_nki_fn_hi` and
`_nki_fn_lo`, two bf16 tensors, |fn - hi - lo| <= 2^-17 |fn|.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from deepinfer_prep import fp8
from deepinfer_prep.errors import PrepError, RefusedError
from deepinfer_prep.kernels import reference
from deepinfer_prep.naming import SPLIT_SUFFIXES
from deepinfer_prep.runtime import kernel_launch, neuron
from deepinfer_prep.runtime.attributes import HI, LO, SPLIT_VERSION
from deepinfer_prep.runtime.held_tensors import held_tensors

__all__ = [
    "expand",
    "expand_supported",
    "mixes",
    "mixes_supported",
    "post",
    "pre_apply_mix",
    "pre_big_fuse",
    "prepare_model",
    "split_fn",
]

_POST_FACTOR = 2.0


def split_fn(fn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a mixing matrix: hi = bf16(fn), lo = bf16(fn - hi), on its own device.

    Args:
        fn: float32, any shape.

    Raises:
        deepinfer_prep.fp8.NoExactResultError: a value is not finite, or too large for bf16.
    """
    hi, lo = fp8.split_hi_lo(fn.detach().cpu().contiguous().numpy())
    halves = [torch.from_numpy(half.view("int16")).view(torch.bfloat16).to(fn.device) for half in (hi, lo)]
    return halves[0], halves[1]


def attach_split(fn: torch.Tensor) -> None:
    """Split a mixing matrix and attach the two matrices to it as `_nki_fn_hi` and `_nki_fn_lo`.

    Raises:
        deepinfer_prep.fp8.NoExactResultError: as `split_fn`.
    """
    _attach(fn, *split_fn(fn))


def prepare_model(model: nn.Module) -> int:
    """Attach `_nki_fn_hi` and `_nki_fn_lo` to every 2-D float32 `...hc_attn_fn` and `...hc_ffn_fn`.

    Call it after moving the model to its device, and again when weights were loaded anew.

    Returns:
        How many matrices are split.

    Raises:
        RefusedError: a matrix holds values that bf16 cannot; all such are named, and nothing was attached.
    """
    halves: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    reasons = []
    for held in held_tensors(model):
        fn = held.tensor
        if fn.dim() != 2 or fn.dtype != torch.float32 or not held.name.endswith(SPLIT_SUFFIXES) or id(fn) in halves:
            continue
        try:
            halves[id(fn)] = (fn, *split_fn(fn))
        except fp8.NoExactResultError as error:
            reasons.append(f"{held.name}: {error}")
    if reasons:
        raise RefusedError(*(*reasons, "No matrix was split; load a sound checkpoint."))
    for fn, hi, lo in halves.values():
        _attach(fn, hi, lo)
    return len(halves)


def expand_supported(hidden: torch.Tensor, hc_mult: int) -> bool:
    """Whether the kernel makes the copies: bf16 on a Neuron device, four streams, kernels not turned off."""
    return hc_mult == reference.HC and _on_kernel(hidden)


def expand(hidden: torch.Tensor, hc_mult: int) -> torch.Tensor:
    """[..., h] -> [..., hc_mult, h], equal copies."""
    if expand_supported(hidden, hc_mult):
        copies = kernel_launch.kernel("hc_expand")(_tokens(hidden, 1))
        return copies.reshape(*hidden.shape[:-1], hc_mult, hidden.shape[-1])  # type: ignore[no-any-return]
    return hidden.unsqueeze(-2).expand(*hidden.shape[:-1], hc_mult, hidden.shape[-1]).contiguous()


def pre_apply_mix(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Sum over m of mix[..., m] * x[..., m, :], accumulated in fp32.

    Args:
        x: bf16 [..., hc, h].
        mix: fp32 [..., hc], or [..., hc, 1] as `mixes` returns it.

    Returns:
        bf16 [..., h].
    """
    mix = mix.reshape(x.shape[:-1])
    if _streams_on_kernel(x):
        collapsed = kernel_launch.kernel("hc_collapse")(_tokens(x, 2), _tokens(mix.float(), 1))
        return collapsed.reshape(*x.shape[:-2], x.shape[-1])  # type: ignore[no-any-return]
    return reference.hc_collapse(x, mix)  # type: ignore[no-any-return]


def post(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """out[..., j, :] = post[..., j] * x + sum over i of comb[..., i, j] * residual[..., i, :].

    Args:
        x: bf16 [..., h], a layer's output.
        residual: bf16 [..., hc, h].
        post: fp32 [..., hc], or [..., hc, 1] as `mixes` returns it.
        comb: fp32 [..., hc, hc].

    Returns:
        bf16 [..., hc, h].
    """
    post = post.reshape(residual.shape[:-1])
    if _streams_on_kernel(residual):
        tokens = (_tokens(x, 1), _tokens(residual, 2), _tokens(post.float(), 1), _tokens(comb.float(), 2))
        return kernel_launch.kernel("hc_attn_out")(*tokens).reshape(residual.shape)  # type: ignore[no-any-return]
    return reference.hc_attn_out(x, residual, post, comb)  # type: ignore[no-any-return]


def mixes_supported(
    residual: torch.Tensor,
    norm_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult_value: float,
    sinkhorn_repeat: int,
) -> bool:
    """Whether the kernel computes the mixes: these constants are the ones it bakes, and it can run here."""
    baked = (reference.NORM_EPS, reference.HC_EPS, reference.HC_EPS, _POST_FACTOR, reference.SINKHORN_ITERS)
    asked = (norm_eps, pre_eps, sinkhorn_eps, post_mult_value, sinkhorn_repeat)
    return asked == baked and _mixes_on_kernel(residual)


def mixes(
    residual: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How much of each stream goes into a layer, out of it and on: pre, post and comb.

    Args:
        residual: bf16 [..., hc, h].
        fn: fp32 [(2 + hc) * hc, hc * h]; on a Neuron device it has to be prepared.
        scale: fp32 [3].
        base: fp32 [(2 + hc) * hc].

    Returns:
        pre [..., hc, 1], post [..., hc, 1] and comb [..., hc, hc], fp32.

    Raises:
        PrepError: a graph is being compiled for a Neuron device and `fn` is not prepared.
    """
    lead, tokens = residual.shape[:-2], _tokens(residual, 2)
    if not neuron.holds(residual):
        pre, out, comb = reference.mixes(tokens, fn, scale, base)
    elif _mixes_on_kernel(residual):
        adjustment = scale.float().contiguous(), base.float().contiguous()
        pre, out, comb = kernel_launch.kernel("hc_mixes")(tokens, *_halves(fn), *adjustment)
    else:
        pre, out, comb = mixes_of_halves(tokens, *_halves(fn), scale, base)
    hc = residual.shape[-2]
    return pre.reshape(*lead, hc, 1), out.reshape(*lead, hc, 1), comb.reshape(*lead, hc, hc)


def mixes_of_halves(
    residual: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mixes` as two matmuls whose operands are exact in bf16, so that a compiler may narrow them.

    residual bf16 [t, 4, h], hi and lo bf16 [24, 4 * h], scale fp32 [3], base fp32 [24] -> pre [t, 4],
    post [t, 4], comb [t, 4, 4], fp32.
    """
    hc = reference.HC
    flat = residual.flatten(-2).float()
    inverse_rms = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + reference.NORM_EPS)
    raw = (linear(flat, hi.float()) + linear(flat, lo.float())) * inverse_rms
    factor = torch.cat([scale[0].expand(hc), scale[1].expand(hc), scale[2].expand(hc * hc)])
    logits = raw * factor + base
    pre = torch.sigmoid(logits[:, :hc]) + reference.HC_EPS
    comb = reference.sinkhorn(logits[:, 2 * hc :].reshape(-1, hc, hc))
    return pre, _POST_FACTOR * torch.sigmoid(logits[:, hc : 2 * hc]), comb


def pre_big_fuse(
    residual: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mixes`, then the layer's input from `pre_apply_mix`: returns (post, comb, layer_input)."""
    pre, out, comb = mixes(residual, fn, scale, base)
    return out, comb, pre_apply_mix(residual, pre)


def _halves(fn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hi, lo = getattr(fn, HI, None), getattr(fn, LO, None)
    if torch.compiler.is_compiling():
        if hi is None or lo is None:
            raise PrepError(
                f"a mixing matrix of shape {list(fn.shape)} is not split, and a compiled graph cannot split it. Call "
                "mhc.prepare_model(model) before compiling, or load a prepared checkpoint."
            )
        return hi, lo
    if hi is None or lo is None or hi.device != fn.device or getattr(fn, SPLIT_VERSION, _version(fn)) != _version(fn):
        attach_split(fn)
    return getattr(fn, HI), getattr(fn, LO)


def _attach(fn: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    setattr(fn, HI, hi)
    setattr(fn, LO, lo)
    setattr(fn, SPLIT_VERSION, _version(fn))


def _version(fn: torch.Tensor) -> int | None:
    """The change counter of a matrix; None for inference tensors, which keep none."""
    return None if fn.is_inference() else fn._version


def _on_kernel(tensor: torch.Tensor) -> bool:
    fits = tensor.dtype == torch.bfloat16 and tensor.numel() > 0
    return fits and neuron.holds(tensor) and kernel_launch.hc_kernels()


def _streams_on_kernel(streams: torch.Tensor) -> bool:
    return streams.shape[-2] == reference.HC and _on_kernel(streams)


def _mixes_on_kernel(residual: torch.Tensor) -> bool:
    # The kernel takes a token's values in rows of 128.
    return residual.shape[-2] * residual.shape[-1] % 128 == 0 and _streams_on_kernel(residual)


def _tokens(tensor: torch.Tensor, kept: int) -> torch.Tensor:
    """All but the last `kept` axes as one, contiguous as kernels need it."""
    return tensor.reshape(-1, *tensor.shape[-kept:]).contiguous()
