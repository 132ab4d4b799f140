"""Blocks of diffusers run norm and projections, and norm and MLP, in one pass each, and save little for backward."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo

attention = pytest.importorskip("diffusers.models.attention")

WIDTH, HEADS = 32, 4
X, TEXT = (2, 6, WIDTH), (2, 3, 24)


def block(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return attention.BasicTransformerBlock(WIDTH, HEADS, WIDTH // HEADS, cross_attention_dim=24, **options)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(X), torch.randn(TEXT)


def gradients(model: nn.Module) -> list[Tensor]:
    x, text = (t.requires_grad_() for t in inputs())
    y = model(x, encoder_hidden_states=text)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, text, *model.parameters()])]


def unfused(model: nn.Module) -> nn.Module:
    """A converted copy whose layers run one by one: a hook on a module keeps it from being fused."""
    model = copy.deepcopy(model)
    octavo.convert(model, "rowwise")
    for module in (model.ff, *(m for name, m in model.named_modules() if name.endswith(("norm1", "norm2")))):
        module.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "final_dropout": True}], ids=["", "bias"])
def test_a_fused_block_agrees_with_its_layers_one_by_one(options: dict) -> None:
    fused = block(**options)
    apart = unfused(fused)
    report = octavo.convert(fused)
    assert set(report.fused) == {"fused_qkv", "fused_q", "fused_mlp"}
    assert fused.attn1.to_out[0].input_is_saved
    assert fused.attn2.to_out[0].input_is_saved
    for found, known in zip(gradients(fused), gradients(apart), strict=True):
        assert (found - known).norm() < 0.03 * known.norm() + 1e-5


def test_a_mask_reaches_the_attention() -> None:
    fused = block()
    apart = unfused(fused)
    octavo.convert(fused)
    x, text = inputs()
    hidden = torch.zeros(2, 1, 3)
    hidden[:, :, 2] = -1e4
    found, known = (m(x, encoder_hidden_states=text, encoder_attention_mask=hidden) for m in (fused, apart))
    torch.testing.assert_close(found, known, rtol=1e-2, atol=1e-2)
    text[:, 2] += 1
    assert torch.equal(fused(x, encoder_hidden_states=text, encoder_attention_mask=hidden), found)


def test_less_is_saved_for_the_backward_pass() -> None:
    sizes = {}
    for name, model in (("plain", block()), ("fused", block())):
        if name == "fused":
            octavo.convert(model)
        saved: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t,
            lambda t: t,
        ):
            x, text = inputs()
            model(x.requires_grad_(), encoder_hidden_states=text)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes[name] = sum(size for pointer, size in saved.items() if pointer not in weights)
    row = 2 * 6 * WIDTH * 4  # of float32
    # The three x, q, k and v of the self-attention, q of the other, both outputs, and u; and k and v of the text.
    assert sizes["fused"] < (3 + 3 + 1 + 2 + 8 + 1) * row + 4000
    assert sizes["plain"] > 25 * row


@pytest.mark.parametrize(
    "options",
    [{"activation_fn": "gelu"}, {"dropout": 0.1}, {"only_cross_attention": True}, {"norm_type": "ada_norm_single"}],
)
def test_blocks_of_another_kind_stay_unfused(options: dict) -> None:
    assert octavo.convert(block(**options)).fused == {}


def test_calls_of_another_kind_run_diffusers_own_code_and_restore_gives_the_class_back() -> None:
    model = block(double_self_attention=True)
    (x, _), attributes = inputs(), set(vars(model))
    before = model(x)
    octavo.convert(model)
    assert (model(x) - before).norm() < 0.1 * before.norm()  # without a text, attn2 reads its own input
    octavo.restore(model)
    assert type(model) is attention.BasicTransformerBlock
    assert set(vars(model)) == attributes
    assert torch.equal(model(x), before)


def test_a_fused_block_compiles() -> None:
    model = block()
    octavo.convert(model)
    x, text = inputs()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(x, encoder_hidden_states=text), model(x, encoder_hidden_states=text), rtol=1e-4, atol=1e-4
    )
