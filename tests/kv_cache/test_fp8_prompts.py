"""Attention of long prompts in E4M3: when it runs, and what it computes, on a CPU that is taken for a GPU."""

import copy

import pytest
import torch
from generation_examples import batch
from kv_cache_examples import model_of
from metrics import sqnr

from octavo.generation import Engine
from octavo.kv_cache import fp8_prompts
from octavo.kv_cache.fp8_prompts import fp8_prompt_attention, is_faster_in_fp8
from octavo.kv_cache.layer import LayerKVCache
from octavo.kv_cache.prompts import prompt_attention

TOKENS = 40


@pytest.fixture
def counted(monkeypatch):
    """Attention in FP8 wherever texts are long enough, and how often it ran."""
    calls = []

    def run(*args, **kwargs):
        calls.append(args[0].shape[2])
        return fp8_prompt_attention(*args, **kwargs)

    monkeypatch.setattr(fp8_prompts, "fp8_attention_limit", lambda *_: "")
    monkeypatch.setattr(fp8_prompts, "SHORTEST", TOKENS)
    monkeypatch.setattr(fp8_prompts, "FEWEST", 9)
    monkeypatch.setattr("octavo.kv_cache.layer.fp8_prompt_attention", run)
    monkeypatch.setattr(LayerKVCache, "_is_piece", lambda self, q: q.shape[2] > 8)
    monkeypatch.setattr(LayerKVCache, "_plain", lambda self, x: False)
    return calls


def operands(tokens: int, heads: int = 4, kv_heads: int = 2, dim: int = 128):
    return (torch.randn(1, n, tokens, dim).bfloat16() for n in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8"])
def test_a_prompt_and_its_pieces_are_near_bf16(counted, kind):
    q, k, v = operands(2 * TOKENS)
    store = LayerKVCache((1, 2, 2 * TOKENS, 128), kind, fp8_attention=True)
    found = []
    for part in (slice(0, TOKENS), slice(TOKENS, 2 * TOKENS)):
        store.append(k[:, :, part], v[:, :, part])
        found.append(store.attend(q[:, :, part]))
    expected = prompt_attention(q, k, v, scale=128**-0.5)
    assert counted == [TOKENS, TOKENS]
    assert sqnr(expected, torch.cat(found, 2)) > 18


def test_a_count_that_the_host_does_not_know_gives_nan(counted):
    q, k, v = operands(TOKENS)
    store = LayerKVCache((1, 2, 50, 128), "fp8", fp8_attention=True)
    store.append(k, v)
    assert store.attend(q).isfinite().all()
    store.length.add_(1)
    assert store.attend(q).isnan().all()


def test_stored_bytes_are_read_as_they_are(counted):
    q, k, v = operands(TOKENS)
    scales = torch.tensor([0.02]), torch.tensor([0.01])
    store = LayerKVCache((1, 2, 50, 128), "fp8", scales=scales, fp8_attention=True)
    store.append(k, v)
    stored = store.keys[:, :, :TOKENS], store.values[:, :, :TOKENS]
    assert torch.equal(store.attend(q), fp8_prompt_attention(q, *stored, scales, scale=128**-0.5))


def test_where_it_runs(monkeypatch):
    q = torch.zeros(1, 2, 2000, 128)
    assert not is_faster_in_fp8(q, 4096, None)  # a CPU
    monkeypatch.setattr(fp8_prompts, "fp8_attention_limit", lambda *_: "")
    assert is_faster_in_fp8(q, 4096, None)
    assert not is_faster_in_fp8(q, 4000, None)
    assert not is_faster_in_fp8(q[:, :, :100], 4096, None)
    assert not is_faster_in_fp8(q, 4096, torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_with_an_engine(counted, kind, padded):
    """The first logits differ from BF16's by the rounding alone; padded prompts stay in BF16."""
    model, found = model_of("llama", head_dim=128, max_position_embeddings=256).bfloat16(), []
    prompts = batch(rows=2, length=64, padding=(0, 3) if padded else ())
    for attention in ("bf16", "fp8"):
        engine = Engine(copy.deepcopy(model), context=256, kv_cache=kind, attention="bf16")
        engine.fp8_attention = attention == "fp8"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("octavo.generation.prompt_attention.fp8_attention_limit", lambda *_: "")
            session = engine._new_session(2, 100)
        ids = [row[row != 0].tolist() for row in prompts["input_ids"]]
        from octavo.generation.prompts import pad_prompts

        with torch.no_grad():
            found.append(session.prefill(pad_prompts(ids, engine.device)).float())
    assert bool(counted) != padded
    if padded:
        assert torch.equal(*found)
    else:
        assert sqnr(*found) > 15


def test_an_unknown_attention_is_refused():
    with pytest.raises(ValueError, match=r"attention must be one of bf16, fp8, got 'int8'"):
        Engine(model_of("llama"), context=128, attention="int8")


def test_where_it_cannot_run_a_warning_says_so():
    engine = Engine(model_of("llama"), context=128, attention="fp8")
    with pytest.warns(UserWarning, match=r"runs in BF16: FP8 attention needs an NVIDIA GPU"):
        session = engine._new_session(1, 20)
    assert not session.cache.fp8_attention
