"""Packed experts: every scheme against float64 from the bytes, and `channel` against training's bits."""

import pytest
import torch
from gpus import ONLY_HOPPER, poison
from metrics import sqnr
from operation_counts import operations
from packed_experts import TOP_K, E, K, oracle, packed_experts, packed_mixtral, routed

import octavo
from octavo.checkpoint.scheme import SCHEMES
from octavo.nn import Experts
from octavo.nn.experts import rows_of
from octavo.ops import quantize, sort_by_expert
from octavo.recipe import rowwise

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ONLY_HOPPER])])
FP8 = [name for name, scheme in SCHEMES.items() if scheme.weight.format == "e4m3"]


@DEVICES
@pytest.mark.parametrize("schemes", [*((scheme, scheme) for scheme in FP8), ("block", "channel")], ids="-".join)
def test_every_scheme_gives_what_its_bytes_say(schemes, device):
    experts, _, _ = packed_experts(schemes)
    values = routed()
    expected = oracle(experts, *values)
    experts, values = experts.to(device), [t.to(device) for t in values]
    if device == "cuda":
        poison()
    actual = experts(*values)
    assert sqnr(expected, actual) > (40 if device == "cpu" else 38)
    assert all(torch.equal(actual, experts(*values)) for _ in range(3))
    x, index, weight = values
    assert not experts(torch.zeros_like(x), index, weight).any()


@pytest.mark.parametrize("scheme", [name for name in FP8 if name not in ("static", "weight")])
def test_a_token_is_quantized_once_for_all_its_experts(scheme):
    experts, _, _ = packed_experts((scheme, "weight"))
    x, index, weight = routed()
    counts = operations(lambda: experts(x, index, weight))
    assert (counts["octavo::quantize"], counts["octavo::gather_quantize"]) == (1, 0)
    token, layer = sort_by_expert(index, E).slot // TOP_K, experts.gate_up_proj
    once, each = rows_of(quantize(x, layer.input_cast), token), quantize(x[token], layer.input_cast)
    assert torch.equal(once.data.view(torch.uint8), each.data.view(torch.uint8))
    assert torch.equal(once.scale.view(torch.uint8), each.scale.view(torch.uint8))


@DEVICES
def test_channel_has_the_bits_of_training(device):
    packed, w_in, w_out = packed_experts(("channel", "channel"), device)
    values = [t.to(device) for t in routed()]
    trained = Experts(len(w_in), K, w_out.shape[2]).bfloat16().to(device)
    with torch.no_grad():
        trained.gate_up_proj.copy_(w_in)
        trained.down_proj.copy_(w_out)
    trained.recipe = rowwise()
    assert torch.equal(packed(*values), trained(*values))


def test_the_gradients_are_those_of_the_widened_experts():
    packed, _, _ = packed_experts(("channel", "block"))
    x, index, weight = routed()
    index = index.clamp(max=3)
    plain, found = Experts(4, K, 128).bfloat16(), []
    with torch.no_grad():
        plain.gate_up_proj.copy_(packed.gate_up_proj.dequantize(torch.bfloat16))
        plain.down_proj.copy_(packed.down_proj.dequantize(torch.bfloat16))
    for experts in (packed, plain):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = experts(leaves[0], index, leaves[1])
        found.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_tokens_and_no_rows_for_an_expert():
    packed, _, _ = packed_experts(("channel", "static"))
    x, index, weight = routed()
    assert packed(x[:0], index[:0], weight[:0]).shape == (0, K)
    assert not packed(x, torch.full_like(index, 4), weight).any()
    with pytest.raises(ValueError, match=r"need the experts and weights \[T, top_k\] of x \[24, 256\]"):
        packed(x, index[:-1], weight)


def test_casting_the_model_keeps_the_bytes():
    packed, _, _ = packed_experts(("static", "mx"))
    before = {name: t.clone() for name, t in packed.state_dict().items()}
    packed.half()
    for name, t in packed.state_dict().items():
        assert t.dtype == before[name].dtype, name
        assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8)), name


@DEVICES
@pytest.mark.filterwarnings("ignore")  # the compiler's own, and transformers' about attention masks
def test_a_packed_mixtral_has_the_bits_of_training_and_generates(tmp_path, device):
    model, folder = packed_mixtral(tmp_path)
    packed, model = octavo.load(folder, device), model.to(device)
    octavo.convert(model, "rowwise")
    ids = torch.randint(0, 99, (2, 13), generator=torch.Generator().manual_seed(2)).to(device)
    with torch.inference_mode():
        assert torch.equal(packed(ids).logits, model(ids).logits)
    found = packed.generate(ids[:1], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert found.shape == (1, 25)
    with torch.inference_mode():  # a cached step sees the numbers of the whole text, up to the casts of its one row
        logits = packed(found).logits[0, 12:-1].float()
    chosen = logits.gather(1, found[0, 13:, None])
    assert (logits.amax(1, keepdim=True) - chosen < 0.2 * logits.std()).all()
