"""The kernels against float64 on the same bytes, over poisoned memory, in graphs and in compiled code."""

import pytest
import torch
from attention_oracle import DTYPES, attention64, given, new_cache, projections, tables
from bits import bits, on_gpu
from gpus import capture, peak_of, poison
from operation_counts import calls
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from octavo.inference.kv_cache import ModelKVCache
from octavo.ops import append_kv, cached_attention, launching, rotate_append
from octavo.ops.attention import widened_attention
from octavo.ops.launching import Cache

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own

REPEATS, MANY = 3, 20
# The result is rounded to BF16 (2^-9 of it), the probabilities to float16 (2^-12) or, for BF16, to BF16 (2^-9).
BOUND = {"fp8": 2**-8, "int8": 2**-8, "bf16": 2**-7}
SHAPES = [  # batch, heads, heads of keys, new tokens, size, room, tokens
    (2, 8, 2, 1, 128, 1024, 1000),
    (1, 32, 8, 1, 128, 4096, 4096),
    (3, 4, 4, 3, 64, 300, 77),
    (1, 4, 1, 8, 128, 700, 699),  # 32 queries of one head of keys
    (2, 8, 8, 1, 96, 513, 1),
    (1, 4, 2, 2, 80, 200, 2),
    (1, 2, 2, 1, 256, 400, 399),
    (40, 8, 8, 1, 64, 500, 450),  # one part each
]


def length_of(used: int) -> Tensor:
    return torch.tensor(used, device="cuda")


def check(kind, sizes, used, first, dtype, repeats, bound=BOUND):
    q, *cache = given(kind, *sizes, dtype=dtype)
    expected, size = attention64(q, *cache, used, first, 0.1)
    q, *cache = on_gpu((q, *cache))
    places = None if first is None else torch.tensor(first, dtype=torch.int32, device="cuda")
    for _ in range(repeats):
        poison()
        actual = cached_attention(q, *cache, length_of(used), first=places, scale=0.1)
        assert (actual.dtype, actual.device.type) == (dtype, "cuda")
        assert ((actual.cpu().double() - expected).abs() <= bound[kind] * size).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_widened_by_integers_give_the_same_bits(shape):
    """As GPUs before Ada read E4M3: all 256 codes, NaN too."""
    from octavo.ops.kernels import attention as kernel

    *sizes, used = shape
    q, keys, values, k_scale, v_scale = on_gpu(given("fp8", *sizes, dtype=torch.bfloat16))
    for nan in (False, True):
        if nan:
            codes = torch.arange(values.numel(), device="cuda").to(torch.uint8)
            values = codes.view(values.shape).view(values.dtype)
        cache = Cache(keys, values, k_scale, v_scale, length_of(used))
        results = [kernel.cached_attention(q, cache, None, 0.1, native=False)]
        if torch.cuda.get_device_capability() >= (8, 9):
            results.append(kernel.cached_attention(q, cache, None, 0.1, native=True))
        results.append(cached_attention(q, *cache, scale=0.1))
        assert all(torch.equal(y.nan_to_num(9e9), results[0].nan_to_num(9e9)) for y in results)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", DTYPES)
def test_against_float64(kind, shape, padded):
    *sizes, used = shape
    first = [(7 * b) % used for b in range(sizes[0])] if padded else None
    check(kind, tuple(sizes), used, first, torch.bfloat16, REPEATS)


@pytest.mark.parametrize("kib", [99, 40], ids=["99 KiB", "40 KiB"])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[6]], ids=str)
@pytest.mark.parametrize("kind", DTYPES)
def test_the_smaller_tiles_of_gpus_with_less_shared_memory(kind, shape, kib, monkeypatch):
    from octavo.ops.kernels import attention as kernel

    monkeypatch.setattr(kernel, "shared_memory", lambda device: kib * 1024)
    monkeypatch.setattr(launching, "_recorded", {})
    *sizes, used = shape
    check(kind, tuple(sizes), used, None, torch.bfloat16, REPEATS)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_float16_queries(kind):
    check(kind, (2, 8, 2, 1, 128, 600), 555, None, torch.float16, REPEATS)


@pytest.mark.parametrize("kind", DTYPES)
def test_more_queries_than_the_kernel_takes(kind):
    wide = dict.fromkeys(DTYPES, 2**-6)  # keys and values are widened to BF16, and PyTorch's probabilities are BF16
    check(kind, (1, 8, 2, 40, 64, 300), 290, [5], torch.bfloat16, 1, wide)


@pytest.mark.parametrize("kind", DTYPES)
def test_queries_of_any_size(kind):
    """Rows of queries over 60 octaves: float16 does not hold their products."""
    q, *cache = on_gpu(given(kind, 1, 8, 2, 1, 128, 500))
    q = q * torch.exp2(torch.linspace(-60, 0, 8, device="cuda")).view(1, 8, 1, 1).bfloat16()
    q[:, 4:] *= 1e5
    expected, size = attention64(q, *(None if t is None else t.cpu() for t in cache), 480, None, 1e-5)
    actual = cached_attention(q, *cache, length_of(480), scale=1e-5)
    assert ((actual.cpu().double() - expected).abs() <= BOUND[kind] * size).all()


@pytest.mark.parametrize("kind", DTYPES)
def test_32768_tokens_again_and_again(kind):
    """Batch 8, 32 heads of queries and 8 of keys of size 128, against PyTorch in float32 on the widened bytes."""
    q, *cache = on_gpu(given(kind, 8, 32, 8, 1, 128, 32768))
    expected = [
        widened_attention(
            q[b : b + 1].float(), Cache(*(t[b : b + 1] for t in cache[:2]), *cache[2:], length_of(32700)), None, 0.05
        )
        for b in range(8)
    ]
    expected = torch.cat(expected)
    for _ in range(MANY):
        poison()
        actual = cached_attention(q, *cache, length_of(32700), scale=0.05).float()
        assert ((actual - expected).abs().amax((2, 3)) <= 2**-6 * expected.abs().amax((2, 3))).all()


def test_every_pair_of_bytes_is_widened_as_it_is_stored():
    """One-hot queries read the keys, sharp softmaxes the values: each of the 256 codes at each place of a word."""
    for kind, scale in (("fp8", 0.5), ("int8", 1.0)):
        codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256)
        if kind == "fp8":
            codes = torch.where(codes & 0x7F == 0x7F, 0, codes)  # NaN
        values = torch.cat([codes.roll(i, 3) for i in range(4)], 2).view(DTYPES[kind]).cuda()
        one = torch.full((1,), scale, device="cuda")
        keys = torch.zeros_like(values)
        for i in range(4):
            q = torch.zeros(1, 1, 1, 256, device="cuda", dtype=torch.float16)
            first = torch.tensor([i], dtype=torch.int32, device="cuda")
            actual = cached_attention(q, keys, values, one, one, length_of(i + 1), first=first)
            assert torch.equal(actual[0, 0, 0], (values[0, 0, i].float() * scale).half())


# ---- storing


def test_what_does_not_fit_is_dropped():
    k = torch.ones(1, 2, 3, 16, device="cuda", dtype=torch.bfloat16)
    buffer = torch.zeros(3, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
    append_kv(k, k, buffer[1:2], buffer[1:2].clone(), None, None, length_of(10), torch.zeros(2, device="cuda").long())
    assert not buffer[0].any()
    assert not buffer[2].any()
    assert int(buffer[1].sum()) == 2 * 16


# ---- a step


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
def test_a_graph_of_a_step_serves_every_step(kind, turned):
    """Every byte and result is that of an eager step. Beyond the room the result is NaN."""
    x = on_gpu((*projections(2, 24, 8, 2, 64, torch.bfloat16), *tables((2, 24, 64), torch.bfloat16)))
    caches = eager, replayed = [ModelKVCache(1, 24, kind) for _ in range(2)]

    def step(cache: ModelKVCache, *given: Tensor) -> Tensor:
        if turned:
            q, appended = cache.rotate_append(0, *given)
        else:
            q, k, v = (t.unflatten(2, (-1, 64)).transpose(1, 2) for t in given[:3])
            appended = cache.append(0, k, v)
        return appended.store.attend(q, None, 0.1)

    for cache in caches:
        step(cache, *(t[:, :10] for t in x))
    at = [t[:, 10:11].clone() for t in x]
    graph, y = capture(lambda: step(replayed, *at), warm_up=1)
    replayed.crop(1)
    for t in range(10, 24):
        for now, whole in zip(at, x, strict=True):
            now.copy_(whole[:, t : t + 1])
        graph.replay()
        assert torch.equal(y, step(eager, *at))
    for one, other in zip(*(cache.stores[0].buffers for cache in caches), strict=True):
        assert one is None or torch.equal(bits(one), bits(other))
    graph.replay()
    assert y.isnan().all()


@pytest.mark.parametrize("kind", DTYPES)
def test_compiled_code_launches_the_kernels(kind):
    torch.compiler.reset()
    k, v, q = (torch.randn(2, h, 12, 64, device="cuda").bfloat16() for h in (2, 2, 8))
    eager, compiled = (ModelKVCache(1, 1 << 16, kind) for _ in range(2))
    for cache in (eager, compiled):
        cache.append(0, k[:, :, :10], v[:, :, :10])

    def step(cache: ModelKVCache, t: int) -> Tensor:
        here = slice(t, t + 1)
        appended = cache.append(0, k[:, :, here] * 2, v[:, :, here] * 2)
        return appended.attend(q[:, :, here] * 2, None, 0.1) * 2

    fast = torch.compile(step, fullgraph=True, dynamic=False)
    actual, codes = run_and_get_code(fast, compiled, 10)
    assert calls(codes) == {"append_kv"}
    assert torch.equal(actual, step(eager, 10))
    assert torch.equal(*(cache.stores[0].keys.view(torch.uint8) for cache in (eager, compiled)))
    assert int(compiled.stores[0].length) == 11
    assert peak_of(lambda: fast(compiled, 10)) < compiled.nbytes // 4  # the cache is not copied


# ---- rotary embedding


def test_turned_tokens_beyond_the_room_are_dropped():
    x, angles = projections(1, 4, 2, 1, 64, torch.bfloat16), tables((1, 4, 64), torch.bfloat16)
    store = on_gpu(new_cache("bf16", 1, 1, 6, 64, used=8))
    rotate_append(*on_gpu(x), *on_gpu(angles), *store)
    assert torch.equal(store[0][:, :, :4].cpu(), torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16))
    assert store[0][:, :, 4:].any()
