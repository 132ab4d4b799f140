"""A piece of a prompt into a cache that is not empty: float64, the memory it takes, and a count that replays moved."""

import pytest
import torch
from attention_oracle import DTYPES, attention64, given
from bits import on_gpu
from kv_cache_examples import model_of
from metrics import sqnr
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.kv_cache.layer import LayerKVCache
from octavo.kv_cache.transformers_cache import QuantizedKVCache

pytestmark = pytest.mark.gpu

BOUND = 2**-6  # keys, values and probabilities are BF16


def store_of(kind: str, sizes: tuple[int, ...], used: int) -> tuple[torch.Tensor, LayerKVCache]:
    """Queries, and a cache that holds `used` tokens."""
    q, *filled = on_gpu(given(kind, *sizes))
    batch, _, kv_heads, _, dim, room = sizes
    scales = None if kind == "bf16" else filled[2:]
    store = LayerKVCache((batch, kv_heads, room, dim), kind, scales=scales, device="cuda")
    store.keys, store.values = filled[:2]
    store.count.advance(used)
    return q, store


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 2, 40, 64, 300, 130), (1, 4, 4, 77, 128, 200, 200)], ids=str)
@pytest.mark.parametrize("kind", DTYPES)
def test_against_float64(kind, shape, padded):
    *sizes, used = shape
    first = [(7 * b) % 20 for b in range(sizes[0])] if padded else None
    q, store = store_of(kind, tuple(sizes), used)
    cached = (store.keys, store.values, store.k_scale, store.v_scale)
    expected, size = attention64(q.cpu(), *(None if t is None else t.cpu() for t in cached), used, first, 0.1)
    places = None if first is None else torch.tensor(first, dtype=torch.int32, device="cuda")
    actual = store.attend(q, first=places, scale=0.1)
    assert ((actual.cpu().double() - expected).abs() <= BOUND * size).all()


def test_without_padding_no_mask_is_made():
    q, store = store_of("bf16", (1, 8, 2, 40, 64, 300), 130)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert store.attend(q).isfinite().all()


@pytest.mark.parametrize("kind", DTYPES)
def test_memory_does_not_grow_with_the_room(kind):
    peaks = []
    for room in (512, 65536):
        q, store = store_of(kind, (1, 8, 2, 128, 64, room), 400)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        store.attend(q)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0] + 2**20


def test_a_count_that_the_host_does_not_know_gives_nan():
    q, store = store_of("bf16", (1, 8, 2, 40, 64, 300), 130)
    store.length.add_(1)  # as the replay of a graph does
    assert store.attend(q).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(dtype):
    model = model_of("llama").bfloat16().cuda()
    ids, found = torch.randint(1, 97, (2, 120), device="cuda"), []
    scales = None if dtype == "bf16" else [(torch.tensor([0.05]), torch.tensor([0.05]))] * 2
    for step in (120, 48):
        cache = QuantizedKVCache.for_model(model, 128, dtype, scales=scales)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split(step, 1)]
        found.append(torch.cat(parts, 1).float())
    assert sqnr(*found) > (35 if dtype == "bf16" else 12)  # the whole prompt attends to unrounded keys and values
