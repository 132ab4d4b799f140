"""Blocks of timm and diffusers run norm and projections, and norm and MLP, in one pass each, and save little."""

import copy

import pytest
import torch
from linear_examples import converted_model
from operation_counts import saved_tensors
from torch import nn

import octavo

WIDTH, HEADS = 32, 4


def vision(**options):
    timm = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    return timm.Block(WIDTH, HEADS, qkv_bias=True, **options)


def diffusion(**options):
    diffusers = pytest.importorskip("diffusers.models.attention")
    torch.manual_seed(0)
    return diffusers.BasicTransformerBlock(WIDTH, HEADS, WIDTH // HEADS, cross_attention_dim=24, **options)


def inputs(model):
    """x, and the text that a block of diffusers reads."""
    torch.manual_seed(1)
    return [torch.randn(2, 6, WIDTH), torch.randn(2, 3, 24)][: 2 if hasattr(model, "attn2") else 1]


def run(model, x, *text):
    return model(x, **dict(zip(["encoder_hidden_states"], text, strict=False)))


def gradients(model):
    given = [t.requires_grad_() for t in inputs(model)]
    y = run(model, *given)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [*given, *model.parameters()])]


def unfused(model):
    """A converted copy whose layers run one by one: a hook on a module keeps it from being fused."""
    model = converted_model(copy.deepcopy(model), "rowwise")
    for name, module in model.named_modules():
        if name.endswith(("mlp", "ff", "norm1", "norm2")):
            module.register_forward_hook(lambda *_: None)
    return model


FUSED = {vision: {"fused_qkv", "fused_mlp"}, diffusion: {"fused_qkv", "fused_q", "fused_mlp"}}
AFTER_ATTENTION = {vision: ("attn.proj",), diffusion: ("attn1.to_out.0", "attn2.to_out.0")}


@pytest.mark.parametrize(
    ("make", "options"),
    [(vision, {}), (vision, {"init_values": 0.1}), (vision, {"qk_norm": True}), (diffusion, {}),
     (diffusion, {"attention_bias": True, "final_dropout": True})],
)  # fmt: skip
def test_a_fused_block_agrees_with_its_layers_one_by_one(make, options):
    fused = make(**options)
    apart = unfused(fused)
    assert set(octavo.convert(fused).fused) == FUSED[make]
    assert all(fused.get_submodule(name).input_is_saved for name in AFTER_ATTENTION[make])
    results = list(zip(gradients(fused), gradients(apart), strict=True))
    if make is vision:
        torch.testing.assert_close(*results[0], rtol=1e-3, atol=1e-3)
    for found, known in results:
        assert (found - known).norm() < 0.03 * known.norm() + 1e-5


def test_a_mask_reaches_the_attention():
    """All arguments are given by position, as diffusers gives them to a block with activation checkpointing."""
    fused = diffusion()
    apart = unfused(fused)
    octavo.convert(fused)
    x, text = inputs(fused)
    arguments = None, text, torch.tensor([0, 0, -1e4]).expand(2, 1, 3), None, None, None
    found, known = (model(x, *arguments) for model in (fused, apart))
    torch.testing.assert_close(found, known, rtol=1e-2, atol=1e-2)
    text[:, 2] += 1
    assert torch.equal(fused(x, *arguments), found)


def saved(model):
    """The bytes that a forward pass keeps for the backward pass, other than weights."""
    x, *text = inputs(model)
    kept = [t.untyped_storage() for t in saved_tensors(lambda: run(model, x.requires_grad_(), *text))]
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum({s.data_ptr(): s.nbytes() for s in kept if s.data_ptr() not in weights}.values())


# Of timm: x, z, q, k, v, the attention's output and u. Of diffusers: the three x, q, k and v of the self-attention, q
# of the other, both outputs, and u; and k and v of the text.
@pytest.mark.parametrize(
    ("make", "most", "spare", "plain"),
    [(vision, 1 + 1 + 3 + 1 + 4 + 0.5, 2000, 15), (diffusion, 3 + 3 + 1 + 2 + 8 + 1, 4000, 25)],
)
def test_less_is_saved_for_the_backward_pass(make, most, spare, plain):
    fused, row = converted_model(make()), 2 * 6 * WIDTH * 4  # of float32
    assert saved(fused) < most * row + spare
    assert saved(make()) > plain * row


@pytest.mark.parametrize(
    ("make", "options"),
    [(vision, {"act_layer": nn.SiLU}), (vision, {"proj_drop": 0.1}), (diffusion, {"activation_fn": "gelu"}),
     (diffusion, {"dropout": 0.1}), (diffusion, {"only_cross_attention": True}),
     (diffusion, {"norm_type": "ada_norm_single"})],
)  # fmt: skip
def test_blocks_of_another_kind_stay_unfused(make, options):
    assert octavo.convert(make(**options)).fused == {}


@pytest.mark.parametrize(("make", "options"), [(vision, {}), (diffusion, {"double_self_attention": True})])
def test_restore_gives_the_class_back(make, options):
    """The block of diffusers is called without a text: attn2 reads its own input, in diffusers' own code."""
    model = make(**options)
    x, kind, attributes = inputs(model)[0], type(model), set(vars(model))
    before = model(x)
    octavo.convert(model)
    assert (model(x) - before).norm() < 0.1 * before.norm()
    octavo.restore(model)
    assert type(model) is kind
    assert set(vars(model)) == attributes
    assert torch.equal(model(x), before)
    assert not any("input_is_saved" in vars(module) for module in model.modules())


@pytest.mark.parametrize("make", [vision, diffusion])
def test_a_fused_block_compiles(make):
    model = converted_model(make())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, *inputs(model)), run(model, *inputs(model)), rtol=1e-4, atol=1e-4)


def test_attention_without_a_norm_is_converted():
    """BEiT's has the class name of the vision transformer's, and no module `norm`."""
    model = converted_model(nn.Sequential(pytest.importorskip("timm.models.beit").Block(WIDTH, HEADS, qkv_bias=True)))
    x = inputs(model)[0].requires_grad_()
    leaves = [x, *model.parameters()]
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(model(x).square().sum(), leaves))
