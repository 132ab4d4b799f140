"""The gradient of the input of packed layers, against the gradient of the dequantized weight in float64."""

import pytest
import torch
from metrics import distance
from operation_counts import operations
from packed_layers import INPUTS, TOKENS, gradients, packed_layer, worst_row
from runtime_examples import layer_by_layer, logits
from tiny_models import IDS, Folders
from transformers import AutoModelForCausalLM

import octavo
from octavo.artifact.packed.scheme import SCHEMES


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gradient_is_that_of_the_dequantized_weight(scheme: str) -> None:
    """dy is rounded to three bits after the leading one (31 dB on average), or not at all where dx is not in FP8."""
    layer = packed_layer(scheme)
    dx, expected = gradients(layer)
    in_fp8 = layer.scheme.weight.granularity.cols is None or layer.scheme.weight.granularity.transposes
    assert worst_row(dx, expected) > (26 if in_fp8 else 120)
    dx, expected = gradients(layer, torch.bfloat16)
    assert dx.dtype == torch.bfloat16
    assert worst_row(dx, expected) > 26


def test_blocks_at_the_edge_may_be_smaller() -> None:
    layer = packed_layer("block", inputs=200, outputs=328)
    assert worst_row(*gradients(layer)) > 26


@pytest.mark.parametrize("scheme", ["channel", "block", "mx"])
def test_the_gemm_of_the_gradient_runs_in_eight_bits_where_the_scales_allow_it(scheme: str) -> None:
    layer = packed_layer(scheme)
    x = torch.randn(TOKENS, INPUTS, requires_grad=True)
    counts = operations(lambda: layer(x).sum().backward())
    assert counts["octavo::scaled_mm"] == (1 if scheme == "mx" else 2)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.detach().requires_grad_()))


def test_the_weight_is_frozen_and_nothing_of_the_input_is_saved() -> None:
    layer = packed_layer("channel")
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(TOKENS, INPUTS, requires_grad=True))
    assert {t.data_ptr() for t in saved} == {layer.weight.data_ptr(), layer.weight_scale.data_ptr()}
    assert "frozen" in repr(layer)
    assert list(layer.parameters()) == []


def test_compiled_code_has_the_gradient_too() -> None:
    layer = packed_layer("channel")
    eager, _ = gradients(layer)
    layer.compile(fullgraph=True, backend="aot_eager")
    compiled, _ = gradients(layer)
    assert torch.equal(eager, compiled)


@pytest.mark.parametrize("scheme", ["channel", "mx"])  # without gradients, the first is fused with quantization
def test_the_gradient_goes_through_a_whole_model(made: Folders, scheme: str) -> None:
    model = octavo.load(made("llama", scheme=scheme))
    assert not model(IDS).logits.requires_grad
    before = logits(layer_by_layer(model), IDS)
    source = AutoModelForCausalLM.from_pretrained(made("llama"), dtype=torch.float32)
    found = []
    for each in (model, source):
        embedding = each.get_input_embeddings().weight.requires_grad_()
        now = each(IDS).logits
        now.float().log_softmax(-1)[..., 0].sum().backward()
        found.append(embedding.grad.double())
        if each is model:
            assert torch.equal(now, before)
    assert distance(*found) < 0.2  # eight bits in either pass
