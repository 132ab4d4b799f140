"""timm's blocks run norm and projections, and norm and MLP, in one pass each, and save little for the backward pass."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo

vision_transformer = pytest.importorskip("timm.models.vision_transformer")


def block(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return vision_transformer.Block(32, 4, qkv_bias=True, **options)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


def unfused(model: nn.Module, recipe: str = "rowwise") -> nn.Module:
    """A converted copy whose layers run one by one: a hook on a module keeps it from being fused."""
    model = copy.deepcopy(model)
    octavo.convert(model, recipe)
    model.mlp.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("options", [{}, {"init_values": 0.1}, {"qk_norm": True}], ids=["", "layer scale", "qk norm"])
def test_a_fused_block_agrees_with_its_layers_one_by_one(options: dict) -> None:
    fused, x = block(**options), torch.randn(2, 5, 32)
    apart = unfused(fused)
    report = octavo.convert(fused)
    assert set(report.fused) == {"fused_qkv", "fused_mlp"}
    torch.testing.assert_close(fused(x), apart(x), rtol=1e-3, atol=1e-3)
    for found, known in zip(gradients(fused, x), gradients(apart, x), strict=True):
        assert (found - known).norm() < 0.03 * known.norm() + 1e-5
    assert fused.attn.proj.input_is_saved


def test_less_is_saved_for_the_backward_pass() -> None:
    x = torch.randn(2, 5, 32, requires_grad=True)
    plain, fused = block(), block()
    octavo.convert(fused)
    sizes = {}
    for name, model in (("plain", plain), ("fused", fused)):
        saved: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t,
            lambda t: t,
        ):
            model(x)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes[name] = sum(size for pointer, size in saved.items() if pointer not in weights)
    row = 2 * 5 * 32 * 4  # of float32
    assert sizes["fused"] < 10.5 * row + 2000  # x, z, q, k, v, the attention's output and u: 1 + 1 + 3 + 1 + 4
    assert sizes["plain"] > 15 * row


def test_blocks_of_another_kind_stay_unfused_and_restore_gives_the_class_back() -> None:
    assert octavo.convert(block(act_layer=nn.SiLU)).fused == {}
    assert octavo.convert(block(proj_drop=0.1)).fused == {}
    model, x = block(), torch.randn(2, 5, 32)
    before, attributes = model(x), set(vars(model))
    octavo.convert(model)
    octavo.restore(model)
    assert type(model) is vision_transformer.Block
    assert set(vars(model)) == attributes
    assert torch.equal(model(x), before)
    assert "input_is_saved" not in vars(model.attn.proj)


def test_a_fused_block_compiles() -> None:
    model, x = block(), torch.randn(2, 5, 32)
    octavo.convert(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_attention_without_a_norm_is_converted() -> None:
    """BEiT's has the class name of the vision transformer's, and no module `norm`."""
    beit = importlib.import_module("timm.models.beit")
    model = nn.Sequential(beit.Block(32, 4, qkv_bias=True))
    octavo.convert(model)
    assert all(gradient.isfinite().all() for gradient in gradients(model, torch.randn(2, 5, 32)))
