"""`nn.MultiheadAttention`, converted: the same function and parameters, with its projections by the recipe."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import octavo

CAUSAL = torch.ones(5, 5).triu(1).bool()
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
SCORES = torch.linspace(-1, 1, 2 * 4 * 5 * 5).view(8, 5, 5)

CALLS = {
    "plain": {},
    "no weights": {"need_weights": False},
    "weights by head": {"average_attn_weights": False},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "padding, no weights": {"key_padding_mask": PADDING, "need_weights": False},
    "scores and padding": {"attn_mask": SCORES, "key_padding_mask": PADDING.float() * -3},
}


def attention(**options) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, **{"batch_first": True} | options)


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.square().sum(), list(model.parameters())))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"bias": False}], ids=["", "time first", "no bias"])
def test_without_quantization_it_is_the_same_function(options: dict, call: dict) -> None:
    plain = attention(**options)
    converted = copy.deepcopy(plain)
    octavo.convert(converted, "bf16")
    x = torch.randn(2, 5, 32)
    x = x if plain.batch_first else x.transpose(0, 1)
    (y, weights), (expected, expected_weights) = converted(x, x, x, **call), plain(x, x, x, **call)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert (weights is None) is (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)
    for found, known in zip(gradients(converted, y), gradients(plain, expected), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False], ids=["key is value", "three inputs"])
@pytest.mark.parametrize("options", [{}, {"kdim": 32, "vdim": 16}, {"kdim": 32, "vdim": 32}])
def test_cross_attention_is_the_same_function(options: dict, shared: bool) -> None:
    plain = attention(**options)
    q, k = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    v = k if shared and plain.vdim == 32 else torch.randn(2, 5, plain.vdim)
    converted = copy.deepcopy(plain)
    octavo.convert(converted, "bf16")
    torch.testing.assert_close(converted(q, k, v)[0], plain(q, k, v)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(converted(q[0], k[0], v[0])[1], plain(q[0], k[0], v[0])[1], rtol=1e-4, atol=1e-5)


def test_its_projections_are_the_bits_of_linear_layers() -> None:
    module = attention()
    inner, outer = nn.Linear(32, 96), nn.Linear(32, 32)
    inner.load_state_dict({"weight": module.in_proj_weight.detach(), "bias": module.in_proj_bias.detach()})
    outer.load_state_dict(module.out_proj.state_dict())
    linears = nn.ModuleList([inner, outer])
    for model in (module, linears):
        octavo.convert(model, "rowwise")
    x = torch.randn(2, 5, 32)
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in inner(x).chunk(3, -1))
    expected = outer(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    y, _ = module(x, x, x, need_weights=False)
    assert torch.equal(y, expected)
    for found, known in zip(gradients(module, y), gradients(linears, expected), strict=True):
        assert torch.equal(found, known)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_other_recipes_run_in_training_and_evaluation(recipe: str) -> None:
    module = attention(dropout=0.5)
    keys = module.state_dict().keys()
    report = octavo.convert(module, recipe)
    assert report.converted == ["out_proj", "in_proj_weight"]
    assert module.state_dict().keys() == keys
    x = torch.randn(2, 5, 32)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])  # dropout
    with torch.no_grad():
        assert torch.equal(module.eval()(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.slow
def test_an_encoder_compiles_and_agrees_with_eager() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    octavo.convert(layer, "rowwise")
    x = torch.randn(2, 5, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)


def test_an_empty_batch() -> None:
    module = attention()
    octavo.convert(module)
    x = torch.randn(0, 5, 32)
    assert module(x, x, x)[0].shape == (0, 5, 32)


def test_what_is_left_alone_is_named() -> None:
    class Own(nn.MultiheadAttention):
        pass

    parts = {
        "own": Own(32, 4),
        "with_keys": attention(add_bias_kv=True),
        "skipped": attention(),
        "body": nn.Linear(8, 8),
    }
    model = nn.ModuleDict(parts)
    report = octavo.convert(model, skip=["skipped"])
    assert report.converted == ["body"]
    left = {entry.name for entry in report.coverage.left}
    assert {"own.in_proj_weight", "with_keys.in_proj_weight", "skipped.in_proj_weight"} <= left
    assert report.skipped["skipped.in_proj_weight"] == "skip='skipped'"
    assert "reads its weight directly" in report.skipped["skipped.out_proj"]


def test_the_output_layer_can_be_skipped_alone() -> None:
    module = attention()
    report = octavo.convert(module, skip=["out_proj"])
    assert report.converted == ["in_proj_weight"]
    x = torch.randn(2, 5, 32)
    assert module(x, x, x)[0].shape == x.shape


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (partial(attention(), attn_mask=torch.zeros(4, 5)), r"must be \[5, 5\], got \[4, 5\]"),
        (partial(attention(), key_padding_mask=torch.zeros(2, 4)), r"must be \[2, 5\], got \[2, 4\]"),
        (partial(attention(), is_causal=True), "pass the causal mask as attn_mask too"),
    ],
)
def test_masks_that_do_not_fit_are_refused(call: partial, error: str) -> None:
    octavo.convert(call.func)
    x = torch.randn(2, 5, 32)
    with pytest.raises(ValueError, match=error):
        call(x, x, x)


def test_a_watch_and_delayed_scales_take_a_model_with_attention() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    octavo.convert(layer, "delayed")
    x = torch.randn(2, 5, 32)
    watch = octavo.watch(layer, interval=1)
    layer(x).sum().backward()
    watch.step()
    watch.close()
    octavo.update_scales(layer)
    assert octavo.scale_state(layer)["self_attn.histories.x.scale"] > 0
    assert torch.isfinite(layer(x)).all()
