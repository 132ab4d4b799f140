"""The cache of one layer: scales that are given, computed in a warm-up, and frozen; stored numbers against float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attention_oracle import attention64
from generation_examples import LARGEST, model_of
from metrics import sqnr

from octavo.inference import kv_cache
from octavo.inference.engine import Engine
from octavo.inference.kv_cache import ModelKVCache, fp8_prompt_attention, is_faster_in_fp8, prompt_attention
from octavo.inference.session import pad_prompts
from octavo.numerics.scaling import SMALLEST_SCALE


def tokens(new: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [2, 3, new, 16], the heads of different size."""
    heads = torch.tensor([1.0, 3.0, 0.5]).view(-1, 1, 1)
    return torch.randn(2, 3, new, 16) * heads * size, torch.randn(2, 3, new, 16) * heads * size / 7


def contents(cache: kv_cache.LayerKVCache) -> tuple[torch.Tensor, torch.Tensor]:
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
    caches = ModelKVCache(1, 40, dtype, per=per, margin=1.5, freezes=False)
    k, v = tokens(9)
    cache = caches.append(0, k, v).store
    for x, scale in ((k, cache.k_scale), (v, cache.v_scale)):
        amax = x.abs().amax((0, 2, 3))
        amax = amax if per == "head" else amax.max().expand(3)
        assert torch.allclose(scale, amax * 1.5 / LARGEST[dtype], rtol=1e-6)
    cache.warming = False
    before = cache.k_scale.clone(), cache.keys.view(torch.uint8).clone()
    more = tokens(5, 4.0)
    caches.append(0, *more)
    assert torch.equal(cache.k_scale, before[0])
    assert torch.equal(cache.keys.view(torch.uint8)[:, :, :9], before[1][:, :, :9])
    limits = [s.view(-1, 1, 1) * LARGEST[dtype] for s in (cache.k_scale, cache.v_scale)]
    whole = (torch.cat(pair, 2) for pair in zip((k, v), more, strict=True))
    scales = cache.k_scale, cache.v_scale
    for x, limit, found, scale in zip(whole, limits, contents(cache), scales, strict=True):
        required = x.clamp(-limit, limit)
        assert ((found - required).abs() <= steps(dtype, required, scale.view(-1, 1, 1))).all()
    rounds = {"fp8": 464 / 448, "int8": 127.5 / 127}[dtype]
    lost = [int((x.abs() > limit * rounds).sum()) for x, limit in zip(more, limits, strict=True)]
    assert cache.clipped.tolist() == lost
    assert min(lost) > 0


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_warm_up_casts_again_what_no_longer_fits(dtype):
    """Such a number is rounded twice."""
    caches = ModelKVCache(1, 40, dtype, margin=1.0, freezes=False)
    k, v = tokens(6)
    more = tokens(6, 5.0)
    cache = caches.append(0, k, v).store
    small = cache.k_scale.clone()
    caches.append(0, *more)
    assert (cache.k_scale > 1.5 * small).all()
    assert cache.clipped.tolist() == [0, 0]
    whole = (torch.cat(pair, 2) for pair in zip((k, v), more, strict=True))
    for x, found, scale in zip(whole, contents(cache), (cache.k_scale, cache.v_scale), strict=True):
        assert ((found - x).abs() <= 2.2 * steps(dtype, x, scale.view(-1, 1, 1))).all()


def test_a_warm_up_that_needs_no_larger_scale_changes_no_byte_and_reset_begins_it_anew():
    cache = ModelKVCache(1, 40, "fp8", freezes=False)
    store = cache.append(0, *tokens(6)).store
    before = store.keys.view(torch.uint8)[:, :, :6].clone()
    cache.append(0, *tokens(6, 0.1))
    assert torch.equal(store.keys.view(torch.uint8)[:, :, :6], before)
    cache.reset()
    assert (store.k_scale == SMALLEST_SCALE).all()
    k, v = tokens(6, 0.1)
    cache.append(0, k, v)
    assert torch.allclose(store.k_scale, k.abs().max() * 2 / 448)


@pytest.mark.parametrize("given", [torch.tensor(0.02), torch.tensor([0.02]), torch.tensor([0.01, 0.02, 0.03])])
def test_given_scales_are_used_and_stay(given):
    cache = ModelKVCache(1, 40, "fp8", scales=[(given, given * 2)])
    store = cache.append(0, *tokens(6)).store
    assert not store.warming
    cache.reset(scales=True)
    assert torch.equal(store.k_scale, given.expand(3))
    assert torch.equal(store.v_scale, given.expand(3) * 2)


def test_the_same_prompt_gives_the_same_bytes_once_frozen():
    cache, found = ModelKVCache(1, 40, "int8"), []
    store = cache.append(0, *tokens(6)).store
    k, v = tokens(6, 3.0)
    for _ in range(2):
        cache.reset()
        assert (int(store.length), store.clipped.tolist()) == (0, [0, 0])
        cache.append(0, k, v)
        found.append(store.keys[:, :, :6].clone())
    assert torch.equal(*found)
    assert store.clipped.all()


def test_attend_reads_what_is_stored():
    caches = ModelKVCache(1, 40, "fp8", freezes=False)
    k, v = tokens(9)
    caches.append(0, k[:, :, :7], v[:, :, :7])
    cache = caches.append(0, k[:, :, 7:], v[:, :, 7:]).store
    q = torch.randn(2, 6, 2, 16)
    expected, size = attention64(q, cache.keys, cache.values, cache.k_scale, cache.v_scale, 9, [0, 4], 0.3)
    found = cache.attend(q, first=torch.tensor([0, 4], dtype=torch.int32), scale=0.3)
    assert ((found.double() - expected).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8"])
def test_sequences_can_be_chosen_and_repeated(dtype):
    cache = ModelKVCache(1, 40, dtype).append(0, *tokens(6)).store
    before, address = contents(cache), cache.keys.data_ptr()
    cache.select(torch.tensor([1, 0]))
    assert cache.keys.data_ptr() == address
    assert all(torch.equal(one, other[[1, 0]]) for one, other in zip(contents(cache), before, strict=True))
    cache.select(torch.tensor([0, 0, 1]))
    assert all(torch.equal(one, other[[1, 1, 0]]) for one, other in zip(contents(cache), before, strict=True))


def test_bf16_rounds_and_does_no_more_and_crop_forgets_the_last_tokens():
    caches = ModelKVCache(1, 10, "bf16")
    k, v = tokens(9)
    cache = caches.append(0, k, v).store
    cache.count.crop(4)
    assert int(cache.length) == 5
    caches.append(0, k[:, :, :5], v[:, :, :5])
    for found, x in zip(contents(cache), (k, v), strict=True):
        assert torch.equal(found, torch.cat([x[:, :, :5]] * 2, 2).bfloat16().double())
    assert (cache.k_scale, cache.v_scale, cache.warming) == (None, None, False)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_scale_found_on_what_is_not_finite_is_nan(bad):
    k, v = tokens(3)
    k[0, 1, 2, 3] = bad
    cache = ModelKVCache(1, 10, "fp8").append(0, k, v).store
    assert cache.attend(torch.randn(2, 3, 1, 16), None, 0.3).isnan().all()


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
    k, v = (x.to(kv_cache.DTYPES[dtype]) for x in tokens(9))
    q = torch.randn(2, 6, 1, 16, dtype=k.dtype)
    cache = ModelKVCache(1, 40, dtype).append(0, k, v).store
    required = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3)
    assert torch.equal(cache.attend(q, None, 0.3), required)


# ---- Attention of long prompts in E4M3: when it runs, and what it computes, on a CPU that is taken for a GPU


TOKENS = 40


@pytest.fixture
def counted(monkeypatch):
    """Attention in FP8 wherever texts are long enough, and how often it ran."""
    calls = []

    def run(*args, **kwargs):
        calls.append(args[0].shape[2])
        return fp8_prompt_attention(*args, **kwargs)

    monkeypatch.setattr(kv_cache, "fp8_attention_limit", lambda *_: "")
    monkeypatch.setattr(kv_cache, "SHORTEST_PROMPT", TOKENS)
    monkeypatch.setattr(kv_cache, "FEWEST", 9)
    monkeypatch.setattr(kv_cache, "fp8_prompt_attention", run)
    monkeypatch.setattr(kv_cache.LayerKVCache, "_is_piece", lambda self, q: q.shape[2] > 8)
    monkeypatch.setattr(kv_cache.LayerKVCache, "_plain", lambda self, x: False)
    return calls


def operands(tokens: int):
    return (torch.randn(1, heads, tokens, 128).bfloat16() for heads in (4, 2, 2))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8"])
def test_a_prompt_and_its_pieces_are_near_bf16(counted, kind):
    q, k, v = operands(2 * TOKENS)
    cache = ModelKVCache(1, 2 * TOKENS, kind, freezes=False)
    cache.fp8_attention = True
    found = []
    for part in (slice(0, TOKENS), slice(TOKENS, 2 * TOKENS)):
        store = cache.append(0, k[:, :, part], v[:, :, part]).store
        found.append(store.attend(q[:, :, part], None, 128**-0.5))
    expected = prompt_attention(q, k, v, scale=128**-0.5)
    assert counted == [TOKENS, TOKENS]
    assert sqnr(expected, torch.cat(found, 2)) > 18
    store.length.add_(1)  # as the replay of a graph does, which the host does not count
    for fp8_attention in (True, False):
        store.fp8_attention = fp8_attention
        assert store.attend(q[:, :, part], None, 128**-0.5).isnan().all()


def test_stored_bytes_are_read_as_they_are(counted):
    q, k, v = operands(TOKENS)
    scales = torch.tensor([0.02]), torch.tensor([0.01])
    cache = ModelKVCache(1, 50, "fp8", scales=[scales])
    cache.fp8_attention = True
    store = cache.append(0, k, v).store
    stored = store.keys[:, :, :TOKENS], store.values[:, :, :TOKENS]
    assert torch.equal(store.attend(q, None, 128**-0.5), fp8_prompt_attention(q, *stored, scales, scale=128**-0.5))


def test_where_it_runs(monkeypatch):
    q = torch.zeros(1, 2, 2000, 128)
    assert not is_faster_in_fp8(q, 4096, None)  # a CPU
    monkeypatch.setattr(kv_cache, "fp8_attention_limit", lambda *_: "")
    assert is_faster_in_fp8(q, 4096, None)
    assert not is_faster_in_fp8(q, 4000, None)
    assert not is_faster_in_fp8(q[:, :, :100], 4096, None)
    assert not is_faster_in_fp8(q, 4096, torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_an_engine(monkeypatch, counted, kind, padded):
    """The first logits differ from BF16's by the rounding alone; padded prompts stay in BF16."""
    monkeypatch.setattr("octavo.inference.engine.fp8_attention_limit", lambda *_: "")
    model, found = model_of("llama", head_dim=128, max_position_embeddings=256).bfloat16(), []
    ids = [list(range(1, 65)), list(range(5, 65 if padded else 69))]
    for attention in ("bf16", "fp8"):
        engine = Engine(copy.deepcopy(model), context=256, kv_cache=kind, attention=attention)
        with torch.no_grad():
            found.append(engine._new_session(2, 100).prefill(pad_prompts(ids, engine.device)).float())
    assert bool(counted) != padded
    if padded:
        assert torch.equal(*found)
    else:
        assert sqnr(*found) > 15


def test_where_it_cannot_run_a_warning_says_so():
    engine = Engine(model_of("llama"), context=128, attention="fp8")
    with pytest.warns(UserWarning, match=r"runs in BF16: FP8 attention needs an NVIDIA GPU"):
        session = engine._new_session(1, 20)
    assert not session.cache.fp8_attention
