"""The memory of a cache, and the error when it does not suffice."""

import pytest
import torch
from generation_examples import batch, pair
from model_examples import GQA, lively

from octavo.generation import engine as engine_module
from octavo.generation import memory
from octavo.generation.forward import KeyShape, key_shape
from octavo.generation.memory import check_memory, free_bytes

LLAMA_3_8B = KeyShape(32, 8, 128, torch.bfloat16)
GIB = 1 << 30


def test_the_bytes_of_a_token():
    assert LLAMA_3_8B.nbytes(1, None) == 2 * 32 * 8 * 128 * 2
    assert LLAMA_3_8B.nbytes(4096, torch.float8_e4m3fn) == GIB // 4


def test_the_sizes_are_those_of_the_cache():
    _, fast = pair("qwen3")
    fast.generate(**batch(), max_new_tokens=2, do_sample=False)
    (session,) = fast.octavo_engine.sessions
    assert key_shape(fast).nbytes(3 * session.capacity, None) == session.cache.nbytes


def test_what_fits_passes():
    check_memory(LLAMA_3_8B, 2, 4096, None, GIB)
    check_memory(LLAMA_3_8B, 1000, 4096, None, None)
    assert free_bytes(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("batch", "tokens", "dtype", "fits"),
    [
        (8, 4096, None, "2 sequences of 4096 tokens or 1024 tokens for 8 sequences. kv_cache='fp8'"),
        (2, 8192, None, "one sequence of 8192 tokens or 4096 tokens for 2 sequences. kv_cache='fp8'"),
        (8, 4096, "fp8", r"4 sequences of 4096 tokens or 2048 tokens for 8 sequences\.$"),
        (10_000, 16_384, None, "No sequence fits"),
    ],
)
def test_the_error_says_what_fits(batch, tokens, dtype, fits):
    with pytest.raises(MemoryError, match=f"{batch} sequences of {tokens} tokens need .* GiB in .* are free.* {fits}"):
        check_memory(LLAMA_3_8B, batch, tokens, dtype, GIB)


def test_nothing_runs_where_the_cache_does_not_fit(monkeypatch):
    _, fast = pair("llama")
    for module in (memory, engine_module):
        monkeypatch.setattr(module, "free_bytes", lambda device: 10_000)
    seen: list[int] = []
    fast.model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(MemoryError, match="3 sequences of 34 tokens need"):
        fast.generate(**batch(), max_new_tokens=24, do_sample=False)
    assert seen == []


def test_unused_sessions_make_room(monkeypatch):
    """A cache of a former batch goes before a new one is refused; a tight one takes no more than it needs."""
    _, fast = pair("llama")
    token = key_shape(fast).nbytes(1, None)
    fast.generate(**batch(rows=2), max_new_tokens=24, do_sample=False)
    engine = fast.octavo_engine

    def free(device: torch.device) -> int:
        return 3 * 40 * token - sum(session.cache.nbytes for session in engine.sessions)

    for module in (memory, engine_module):
        monkeypatch.setattr(module, "free_bytes", free)
    fast.generate(**batch(), max_new_tokens=24, do_sample=False)
    assert [(session.batch, session.capacity) for session in engine.sessions] == [(3, 34)]


def test_a_model_of_ours():
    assert key_shape(lively(GQA)) == (GQA.layers, GQA.kv_heads, GQA.head_dim, torch.float32)
