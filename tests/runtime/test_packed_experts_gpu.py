"""Packed experts on a Hopper GPU: against float64 from the bytes, training's bits, and a CUDA graph."""

import pytest
import torch
from gpu_memory import no_waits, poison
from hopper import ONLY_HOPPER
from metrics import distance, sqnr
from mixtures import packed_mixtral
from packed_experts import K, oracle, packed_experts, routed

import octavo
from octavo.nn import Experts
from octavo.recipe import rowwise

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]


@pytest.mark.parametrize("scheme", ["channel", "tensor", "static", "block", "mx", "group32", "group64", "weight"])
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


@pytest.mark.parametrize("scheme", ["channel", "static", "block", "mx", "weight"])
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


@pytest.mark.filterwarnings("ignore")  # the compiler's own, and transformers' about attention masks
def test_a_packed_mixtral_has_the_bits_of_training_and_generates(tmp_path):
    model, folder = packed_mixtral(tmp_path)
    packed = octavo.load(folder, "cuda")
    model = model.cuda()
    octavo.convert(model, "rowwise")
    ids = torch.randint(0, 99, (2, 13), generator=torch.Generator().manual_seed(2)).cuda()
    with torch.inference_mode():
        assert torch.equal(packed(ids).logits, model(ids).logits)
    one = ids[:1]
    found = packed.generate(one, max_new_tokens=12, do_sample=False)
    assert found.shape == (1, 25)
    with torch.inference_mode():  # a cached step sees the numbers of the whole text, up to roundings
        logits = packed(found).logits[0, 12:-1].float()
    chosen = logits.gather(1, found[0, 13:, None])
    assert (logits.amax(1, keepdim=True) - chosen < 0.1 * logits.std()).all()


@pytest.mark.filterwarnings("ignore")
def test_blocks_of_a_mixtral_give_the_numbers_of_a_cpu(tmp_path):
    _, folder = packed_mixtral(tmp_path, "block")
    ids = torch.randint(0, 99, (2, 13), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = octavo.load(folder)(ids).logits
        actual = octavo.load(folder, "cuda")(ids.cuda()).logits
    assert distance(actual, expected) < 0.2  # a router may choose another of two near experts
