"""Packed experts on a Hopper GPU: against float64 from the bytes, training's bits, and a CUDA graph."""

import pytest
import torch
from gpu_memory import no_waits, poison
from hopper import ONLY_HOPPER
from metrics import sqnr
from packed_experts import K, oracle, packed_experts, routed

from octavo.nn import Experts
from octavo.recipe import rowwise

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]


@pytest.mark.parametrize("scheme", ["channel", "tensor", "static", "block"])
def test_every_scheme_gives_what_its_bytes_say(scheme):
    experts, _, _ = packed_experts((scheme, scheme))
    values = routed()
    expected = oracle(experts, *values)
    experts, values = experts.cuda(), [t.cuda() for t in values]
    poison()
    actual = experts(*values)
    assert sqnr(expected, actual) > 38
    assert all(torch.equal(actual, experts(*values)) for _ in range(3))


def test_channel_has_the_bits_of_training():
    packed, w_in, w_out = packed_experts(("channel", "channel"), "cuda")
    values = [t.cuda() for t in routed()]
    trained = Experts(len(w_in), K, w_out.shape[2]).bfloat16().cuda()
    with torch.no_grad():
        trained.gate_up_proj.copy_(w_in)
        trained.down_proj.copy_(w_out)
    trained.recipe = rowwise()
    assert torch.equal(packed(*values), trained(*values))


@pytest.mark.parametrize("scheme", ["channel", "static"])
def test_a_step_waits_for_nothing_and_becomes_a_graph(scheme):
    experts, _, _ = packed_experts((scheme, scheme), "cuda")
    x, index, weight = (t.cuda() for t in routed())
    with torch.inference_mode():
        expected = [experts(x, index, weight), experts(2 * x, index.flip(0), weight)]
        with no_waits():
            experts(x, index, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(x, index, weight)
        graph.replay()
        assert torch.equal(y, expected[0])
        x.mul_(2)
        index.copy_(index.flip(0))
        poison()
        graph.replay()
        assert torch.equal(y, expected[1])
