"""The cache of one layer: scales that are given, computed in a warm-up, and frozen; stored numbers against float64."""

import pytest
import torch
import torch.nn.functional as F

from octavo.kv_cache.layer import LayerKVCache
from octavo.kv_cache.prompts import prompt_attention
from octavo.numerics.scaling import SMALLEST_SCALE

LARGEST = {"fp8": 448.0, "int8": 127.0}


def tokens(new: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [2, 3, new, 16], the heads of different size."""
    heads = torch.tensor([1.0, 3.0, 0.5]).view(-1, 1, 1)
    return torch.randn(2, 3, new, 16) * heads * size, torch.randn(2, 3, new, 16) * heads * size / 7


def contents(cache: LayerKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values that the cache holds, in float64."""
    used = int(cache.length)
    scales = [1 if s is None else s.double().view(-1, 1, 1) for s in (cache.k_scale, cache.v_scale)]
    return cache.keys[:, :, :used].double() * scales[0], cache.values[:, :, :used].double() * scales[1]


def steps(dtype: str, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The largest rounding error of a stored x: half of the spacing of the format there."""
    if dtype == "int8":
        return scale / 2 + x.abs() * 1e-6
    return (x.abs() / 16 * (1 + 1e-6)).clamp(min=2.0**-10 * scale.min())


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_warm_up_finds_the_scales(dtype, per):
    cache = LayerKVCache((2, 3, 40, 16), dtype, per=per, margin=1.5)
    k, v = tokens(9)
    cache.append(k, v)
    for x, scale in ((k, cache.k_scale), (v, cache.v_scale)):
        amax = x.abs().amax((0, 2, 3))
        amax = amax if per == "head" else amax.max().expand(3)
        assert torch.allclose(scale, amax * 1.5 / LARGEST[dtype], rtol=1e-6)
    cache.freeze()
    before = cache.k_scale.clone(), cache.keys.view(torch.uint8).clone()
    more = tokens(5, 4.0)
    cache.append(*more)
    assert torch.equal(cache.k_scale, before[0])
    assert torch.equal(cache.keys.view(torch.uint8)[:, :, :9], before[1][:, :, :9])
    limits = [s.view(-1, 1, 1) * LARGEST[dtype] for s in (cache.k_scale, cache.v_scale)]
    for x, limit, found, scale in zip(
        (torch.cat((a, b), 2) for a, b in zip((k, v), more, strict=True)),
        limits,
        contents(cache),
        (cache.k_scale, cache.v_scale),
        strict=True,
    ):
        required = x.clamp(-limit, limit)
        assert ((found - required).abs() <= steps(dtype, required, scale.view(-1, 1, 1))).all()
    rounds = {"fp8": 464 / 448, "int8": 127.5 / 127}[dtype]
    lost = [int((x.abs() > limit * rounds).sum()) for x, limit in zip(more, limits, strict=True)]
    assert cache.clipped.tolist() == lost
    assert min(lost) > 0


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_warm_up_casts_again_what_no_longer_fits(dtype):
    """Such a number is rounded twice."""
    cache = LayerKVCache((2, 3, 40, 16), dtype, margin=1.0)
    k, v = tokens(6)
    more = tokens(6, 5.0)
    cache.append(k, v)
    small = cache.k_scale.clone()
    cache.append(*more)
    assert (cache.k_scale > 1.5 * small).all()
    assert cache.clipped.tolist() == [0, 0]
    for found, parts, scale in zip(
        contents(cache), zip((k, v), more, strict=True), (cache.k_scale, cache.v_scale), strict=True
    ):
        x = torch.cat(parts, 2)
        assert ((found - x).abs() <= 2.2 * steps(dtype, x, scale.view(-1, 1, 1))).all()


def test_a_warm_up_that_needs_no_larger_scale_changes_no_byte():
    cache = LayerKVCache((2, 3, 40, 16), "fp8")
    cache.append(*tokens(6))
    before = cache.keys.view(torch.uint8)[:, :, :6].clone()
    cache.append(*tokens(6, 0.1))
    assert torch.equal(cache.keys.view(torch.uint8)[:, :, :6], before)


@pytest.mark.parametrize("given", [torch.tensor(0.02), torch.tensor([0.02]), torch.tensor([0.01, 0.02, 0.03])])
def test_given_scales_are_used_and_stay(given):
    cache = LayerKVCache((2, 3, 40, 16), "fp8", scales=(given, given * 2))
    assert not cache.warming
    cache.append(*tokens(6))
    cache.reset()
    assert torch.equal(cache.k_scale, given.expand(3))
    assert torch.equal(cache.v_scale, given.expand(3) * 2)


def test_the_same_prompt_gives_the_same_bytes_once_frozen():
    k, v = tokens(6)
    cache = LayerKVCache((2, 3, 40, 16), "int8")
    cache.append(*tokens(6, 3.0))
    cache.freeze()
    found = []
    for _ in range(2):
        cache.reset()
        assert (int(cache.length), cache.clipped.tolist()) == (0, [0, 0])
        cache.append(k, v)
        found.append(cache.keys[:, :, :6].clone())
    assert torch.equal(*found)


def test_reset_begins_a_warm_up_anew():
    cache = LayerKVCache((2, 3, 40, 16), "fp8")
    cache.append(*tokens(6, 100.0))
    cache.reset()
    assert (cache.k_scale == SMALLEST_SCALE).all()
    k, v = tokens(6)
    cache.append(k, v)
    assert torch.allclose(cache.k_scale, k.abs().max() * 2 / 448)


def test_bf16_rounds_and_does_no_more():
    cache = LayerKVCache((2, 3, 40, 16), "bf16")
    k, v = tokens(6)
    cache.append(k, v)
    assert torch.equal(contents(cache)[0], k.bfloat16().double())
    assert torch.equal(contents(cache)[1], v.bfloat16().double())
    assert (cache.k_scale, cache.warming) == (None, False)


def test_attend_reads_what_is_stored():
    cache = LayerKVCache((2, 3, 40, 16), "fp8")
    k, v = tokens(9)
    cache.append(k[:, :, :7], v[:, :, :7])
    cache.append(k[:, :, 7:], v[:, :, 7:])
    q = torch.randn(2, 6, 2, 16)
    stored = [x.repeat_interleave(2, 1) for x in contents(cache)]
    s = q.double() @ stored[0].transpose(2, 3) * 0.3
    s[:, :, 0, 8] = -torch.inf
    s[1, :, :, :4] = -torch.inf
    found = cache.attend(q, first=torch.tensor([0, 4], dtype=torch.int32), scale=0.3)
    assert torch.allclose(found.double(), s.softmax(3) @ stored[1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8"])
def test_sequences_can_be_chosen_and_repeated(dtype):
    cache = LayerKVCache((2, 3, 40, 16), dtype)
    cache.append(*tokens(6))
    before, address = contents(cache), cache.keys.data_ptr()
    cache.select(torch.tensor([1, 0]))
    assert cache.keys.data_ptr() == address
    assert all(torch.equal(one, other[[1, 0]]) for one, other in zip(contents(cache), before, strict=True))
    cache.select(torch.tensor([0, 0, 1]))
    assert all(torch.equal(one, other[[1, 1, 0]]) for one, other in zip(contents(cache), before, strict=True))


def test_crop_forgets_the_last_tokens():
    cache = LayerKVCache((2, 3, 10, 16), "bf16")
    k, v = tokens(9)
    cache.append(k, v)
    cache.crop(4)
    assert int(cache.length) == 5
    cache.append(k[:, :, :5], v[:, :, :5])
    assert torch.equal(contents(cache)[0][:, :, 5:], k[:, :, :5].bfloat16().double())


def test_a_full_cache_is_an_error():
    cache = LayerKVCache((2, 3, 10, 16), "fp8")
    cache.append(*tokens(9))
    with pytest.raises(RuntimeError, match="a cache of 10 tokens is full: it holds 9 and got 2 more"):
        cache.append(*tokens(2))
    cache.append(*tokens(1))


def test_gradients_are_refused():
    k, v = tokens(1)
    with pytest.raises(RuntimeError, match="under torch.no_grad"):
        LayerKVCache((2, 3, 10, 16)).append(k.requires_grad_(), v)


def test_nothing_to_freeze():
    with pytest.raises(RuntimeError, match="the warm-up saw no token"):
        LayerKVCache((2, 3, 10, 16)).freeze()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp4"}, "unknown dtype 'fp4'"),
        ({"per": "token"}, "per tensor or per head, got 'token'"),
        ({"margin": 0.5}, "at least 1, got 0.5"),
        ({"margin": float("nan")}, "at least 1"),
        ({"scales": (torch.ones(2), torch.ones(3))}, "one element or 3"),
        ({"scales": (torch.zeros(1), torch.ones(1))}, "positive and finite"),
        ({"scales": (torch.ones(1), torch.tensor([torch.nan]))}, "positive and finite"),
        ({"dtype": "bf16", "scales": (torch.ones(1), torch.ones(1))}, "bf16 have no scales"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        LayerKVCache((2, 3, 10, 16), **settings)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_scale_found_on_what_is_not_finite_is_nan(bad):
    k, v = tokens(3)
    k[0, 1, 2, 3] = bad
    cache = LayerKVCache((2, 3, 10, 16), "fp8")
    cache.append(k, v)
    assert cache.attend(torch.randn(2, 3, 1, 16)).isnan().all()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_the_last_tokens_of_a_text_attend_to_those_up_to_them(new, padded):
    q, (k, v) = torch.randn(2, 6, 5, 16), tokens(5)
    first = torch.tensor([0, 2], dtype=torch.int32)
    s = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) * 0.3
    seen = torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5).clone()
    if padded:
        seen[1, :, :, :2] = False
        seen[1, :, 0, 0] = seen[1, :, 1, 1] = True
    required = s.masked_fill(~seen, -torch.inf).softmax(3) @ v.double().repeat_interleave(2, 1)
    found = prompt_attention(q[:, :, 5 - new :], k, v, first=first if padded else None, scale=0.3)
    assert torch.allclose(found.double(), required[:, :, 5 - new :], atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_attention_over_numbers_that_are_not_quantized_is_that_of_pytorch_on_a_cpu(dtype):
    cache = LayerKVCache((2, 3, 40, 16), dtype)
    k, v = (x.to(cache.keys.dtype) for x in tokens(9))
    q = torch.randn(2, 6, 1, 16, dtype=k.dtype)
    cache.append(k, v)
    required = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(cache.attend(q), required)
