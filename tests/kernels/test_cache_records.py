"""Records of the caches against ml_dtypes: every code, every scale, and values beside every border."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from deepinfer_prep.kernels import cache_records, reference

E4M3FN = ml_dtypes.float8_e4m3fn
E2M1 = ml_dtypes.float4_e2m1fn
ALL_BYTES = np.arange(256, dtype=np.uint8)


def values(seed: int = 0, rows: int = 64, width: int = 512) -> torch.Tensor:
    """Blocks of many magnitudes, with zeros, negative zeros and single spikes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.exp2(torch.linspace(-30, 30, rows))[:, None]
    x[0], x[1] = 0.0, -0.0
    x[2, ::32] = 1e5
    return x.bfloat16()


def stated_power_scale(block: np.ndarray, largest: float, floor: float) -> float:
    """The smallest power of two s with max(|block|, floor) / s <= largest, by trying."""
    amax = max(float(np.abs(block).max()), float(np.float32(floor)))
    exponent = int(np.floor(np.log2(amax / largest))) - 1
    while amax / 2.0**exponent > largest:
        exponent += 1
    return 2.0**exponent


@pytest.mark.parametrize("largest", [448.0, 224.0])
def test_window_records_hold_what_ml_dtypes_rounds(largest: float) -> None:
    x = values()
    records = cache_records.encode_window(x, largest)
    assert records.shape == (64, cache_records.WINDOW_BYTES)
    for row, record in zip(x.double().numpy(), records.numpy(), strict=True):
        for block in range(16):
            part = row[32 * block : 32 * block + 32]
            scale = stated_power_scale(part, largest, 1e-4)
            codes = (part / scale).astype(np.float32).astype(E4M3FN).view(np.uint8)
            np.testing.assert_array_equal(record[32 * block : 32 * block + 32], codes)
            assert 2.0 ** (int(record[512 + block]) - 127) == scale


def test_at_224_no_code_exceeds_what_the_device_reads() -> None:
    codes = cache_records.encode_window(values(), 224.0)[:, :512]
    assert int((codes & 0x7F).max()) <= 0x77


def test_at_224_values_differ_in_the_lowest_codes_only() -> None:
    wide, narrow = (cache_records.encode_e4m3(values(), largest) for largest in (448.0, 224.0))
    assert torch.equal(wide[1][2:] + 1, narrow[1][2:])
    differs = cache_records.decode_e4m3(*wide) != cache_records.decode_e4m3(*narrow)
    assert int((wide[0][differs] & 0x7F).max()) < 0x10


def test_every_window_byte_decodes_as_ml_dtypes_reads_it() -> None:
    records = torch.from_numpy(np.tile(ALL_BYTES, (255, 3))[:, : cache_records.WINDOW_BYTES].copy())
    records[:, 512:] = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16).clamp(min=16, max=240)
    found = cache_records.decode_window(records).double().numpy()
    codes = records[:, :512].numpy().view(E4M3FN).astype(np.float64)
    scales = records[:, 512:].numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(found, codes * scales.repeat(32, axis=1))


def borders(grid: np.ndarray) -> torch.Tensor:
    """Every value of a grid, every middle between neighbours, and the fp32 numbers on both sides of those."""
    middles = (grid[1:] + grid[:-1]) / 2
    points = np.concatenate([grid, middles]).astype(np.float32)
    both = np.concatenate([points, np.nextafter(points, np.float32(99)), np.nextafter(points, np.float32(-99))])
    return torch.from_numpy(np.concatenate([both, -both]))


def test_e2m1_codes_round_to_nearest_even_and_saturate() -> None:
    grid = np.arange(8, dtype=np.uint8).view(E2M1).astype(np.float32)
    x = torch.cat([borders(grid), torch.tensor([6.5, 100.0, -100.0, torch.inf, 0.0, -0.0])])
    expected = x.clamp(-6, 6).numpy().astype(E2M1).view(np.uint8) & 15
    np.testing.assert_array_equal(cache_records.e2m1_codes(x).numpy(), expected)


def unpacked(pairs: torch.Tensor) -> np.ndarray:
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).numpy()


def test_index_pages_hold_pairs_and_then_scales() -> None:
    keys = values(width=128)
    page = cache_records.encode_index_page(keys)
    assert page.shape == (64 * cache_records.INDEX_BYTES,)
    nibbles, scales = unpacked(page[: 64 * 64].view(64, 64)), page[64 * 64 :].view(64, 4)
    for row, codes, bytes_ in zip(keys.double().numpy(), nibbles, scales.numpy(), strict=True):
        for block in range(4):
            part = row[32 * block : 32 * block + 32]
            scale = stated_power_scale(part, 6.0, 6 * 2.0**-126)
            expected = (part / scale).astype(np.float32).astype(E2M1).view(np.uint8) & 15
            np.testing.assert_array_equal(codes[32 * block : 32 * block + 32], expected)
            assert 2.0 ** (int(bytes_[block]) - 127) == scale


@pytest.mark.parametrize("largest", [448.0, 240.0])
def test_compressed_records_hold_what_ml_dtypes_rounds(largest: float) -> None:
    x = values(1)
    records = cache_records.encode_compressed(x, largest)
    assert records.shape == (64, cache_records.COMPRESSED_BYTES)
    blocks = x.float().numpy().reshape(64, 32, 16)
    amax = np.maximum(np.abs(blocks).max(-1), np.float32(6 * 2.0**-9))
    scales = np.minimum(amax / np.float32(6), np.float32(largest)).astype(E4M3FN)
    np.testing.assert_array_equal(records[:, 256:].numpy(), scales.view(np.uint8))
    quotients = blocks / scales.astype(np.float32)[..., None]
    expected = np.clip(quotients, -6, 6).astype(E2M1).view(np.uint8).reshape(64, 512) & 15
    np.testing.assert_array_equal(unpacked(records[:, :256]), expected)
    assert int(records[:, 256:].max()) <= {448.0: 0x7E, 240.0: 0x77}[largest]


def test_every_pair_and_scale_of_a_compressed_record_decodes_exactly() -> None:
    records = torch.zeros(127, cache_records.COMPRESSED_BYTES, dtype=torch.uint8)
    records[:, :256] = torch.from_numpy(ALL_BYTES.copy())
    records[:, 256:] = torch.arange(127, dtype=torch.uint8)[:, None]
    found = cache_records.decode_compressed(records).double().numpy()
    codes = unpacked(records[:, :256]).astype(np.uint8).view(E2M1).astype(np.float64)
    scales = records[:, 256:].numpy().view(E4M3FN).astype(np.float64)
    np.testing.assert_array_equal(found, codes * scales.repeat(16, axis=1))


ROUND_TRIPS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], int]] = {
    "window": (cache_records.encode_window, cache_records.decode_window, 512),
    "index": (cache_records.encode_index_page, cache_records.decode_index_page, 128),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_what_was_decoded_once_comes_back_unchanged(name: str) -> None:
    encode, decode, width = ROUND_TRIPS[name]
    once = decode(encode(values(2, width=width)[20:44]))
    assert torch.equal(decode(encode(once)), once)


def test_window_records_at_224_equal_the_activation_round_trip() -> None:
    x = values(3)
    round_trip = cache_records.decode_window(cache_records.encode_window(x, 224.0))
    assert torch.equal(round_trip, reference.fp8_round_trip(x))
