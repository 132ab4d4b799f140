"""The kernel against the reference, byte for byte, over poisoned memory and in a CUDA graph."""

import pytest
import torch
from bits import assert_same, bits, on_gpu
from gpu_memory import poison
from rotary_examples import DTYPES, cache, projections, tables

from octavo.ops import rotate_append

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SHAPES = [  # batch, tokens, H, G, D
    (1, 1, 32, 8, 128),
    (64, 1, 32, 8, 128),
    (3, 1, 4, 2, 64),
    (2, 5, 4, 1, 80),
    (1, 37, 2, 2, 96),
    (2, 19, 3, 3, 256),
    (2, 3, 2, 1, 12),
    (1, 1000, 8, 2, 128),
]


def check(shape, kind, dtype, table, *, norm: bool = False, one_table: bool = False, keep_k: bool = True, room=None):
    batch, tokens, _, kv_heads, dim = shape
    x, angles = projections(*shape, dtype), tables((1 if one_table else batch, tokens, dim), table)
    store = cache(kind, batch, kv_heads, room or tokens + 3, dim, used=tokens + 1)
    norms = {name: torch.randn(dim).to(dtype) for name in ("q_norm", "k_norm")} if norm else {}
    on_device = on_gpu(store)
    poison()
    moved = {name: weight.cuda() for name, weight in norms.items()}
    whole = torch.cat(x, -1).cuda().split([part.shape[2] for part in x], -1)  # views of one buffer, as in a model
    actual = rotate_append(*whole, *on_gpu(angles), *on_device, **moved, keep_k=keep_k)
    expected = rotate_append(*x, *angles, *store, **norms, keep_k=keep_k)
    if keep_k:
        assert_same(*(found[1].transpose(1, 2) for found in (actual, expected)))
    assert_same(*(found[0].transpose(1, 2) for found in (actual, expected)))  # in memory of [B, T, H, D]
    for one, other in zip(on_device, store, strict=True):
        if other is not None:
            assert_same(one, other)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_byte_for_byte(shape, kind, norm):
    check(shape, kind, BF16, BF16, norm=norm, one_table=norm, keep_k=not norm)


@pytest.mark.parametrize(("dtype", "table"), [(BF16, torch.float32), (torch.float16, torch.float16)])
def test_other_dtypes(dtype, table):
    for shape in SHAPES[:5]:
        check(shape, "fp8", dtype, table)


def test_tokens_beyond_the_room_are_dropped():
    x, angles = projections(1, 4, 2, 1, 64, BF16), tables((1, 4, 64), BF16)
    store = on_gpu(cache("bf16", 1, 1, 6, 64, used=8))
    rotate_append(*on_gpu(x), *on_gpu(angles), *store)
    assert torch.equal(store[0][:, :, :4].cpu(), torch.zeros(1, 1, 4, 64, dtype=BF16))
    assert store[0][:, :, 4:].any()


def test_one_cuda_graph_serves_every_length():
    x, angles = on_gpu(projections(2, 1, 4, 2, 64, BF16)), on_gpu(tables((2, 1, 64), BF16))
    store = on_gpu(cache("int8", 2, 2, 9, 64, used=1))
    again = on_gpu(cache("int8", 2, 2, 9, 64, used=1))
    again[2].copy_(store[2])
    again[3].copy_(store[3])
    rotate_append(*x, *angles, *store)  # compile
    store[4].zero_()
    store[5].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store[4].add_(1)
        rotated = rotate_append(*x, *angles, *store)[0]
    for _ in range(9):
        graph.replay()
    again[4].zero_()
    for _ in range(9):
        again[4].add_(1)
        expected = rotate_append(*x, *angles, *again)[0]
    assert torch.equal(bits(rotated), bits(expected))
    for one, other in zip(store, again, strict=True):
        assert torch.equal(bits(one), bits(other))
