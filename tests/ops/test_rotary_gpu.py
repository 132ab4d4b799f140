"""Rotary embedding beyond the room of a cache, and in a CUDA graph."""

import pytest
import torch
from bits import bits, on_gpu
from rotary_examples import cache, projections, tables

from octavo.ops import rotate_append

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


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
