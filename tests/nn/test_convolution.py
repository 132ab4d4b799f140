"""Convolutions that are matrix products, and transformers' linear layers, run as the linear layers that they are."""

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear

import octavo
from octavo.nn.linear import Conv1D

PRODUCTS = {
    "patches": (nn.Conv2d(24, 16, 4, 4), (2, 24, 8, 12)),
    "patches, pixels left over": (nn.Conv2d(24, 16, 4, 4), (2, 24, 11, 9)),
    "oblong patches": (nn.Conv2d(24, 16, (2, 4), (2, 4), bias=False), (2, 24, 8, 8)),
    "1 x 1": (nn.Conv2d(8, 16, 1), (2, 8, 3, 5)),
    "1 x 1 with a stride": (nn.Conv2d(8, 16, 1, 2), (2, 8, 5, 4)),
    "1 x 1, padding by name": (nn.Conv2d(8, 16, 1, padding="same"), (2, 8, 3, 5)),
    "one image": (nn.Conv2d(24, 16, 4, 4), (24, 8, 8)),
    "signal": (nn.Conv1d(24, 8, 5, 5), (2, 24, 16)),
    "volume": (nn.Conv3d(24, 8, (1, 2, 2), (1, 2, 2)), (2, 24, 3, 4, 6)),
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


@pytest.mark.parametrize(("layer", "shape"), PRODUCTS.values(), ids=PRODUCTS)
def test_without_quantization_it_is_the_same_function(layer: nn.Module, shape: tuple[int, ...]) -> None:
    plain, converted, x = layer, copy.deepcopy(layer), torch.randn(shape, requires_grad=True)
    assert octavo.convert(converted, "bf16").converted == [""]
    torch.testing.assert_close(converted(input=x), plain(input=x), rtol=1e-4, atol=1e-5)
    for found, known in zip(gradients(converted, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-4)
    assert octavo.convert(converted, skip=["*"]).skipped == {"": "skip='*'"}
    assert type(converted) is type(plain)


def test_it_has_the_bits_of_a_linear_layer_of_the_patches() -> None:
    layer, x = nn.Conv2d(24, 16, 4, 4), torch.randn(2, 24, 8, 8)
    linear = nn.Linear(384, 16)
    linear.load_state_dict({"weight": layer.weight.detach().flatten(1), "bias": layer.bias.detach()})
    patches = nn.functional.unfold(x, 4, stride=4).transpose(1, 2)  # [B, T, C p p]
    for model in (layer, linear):
        octavo.convert(model, "rowwise")
    assert layer.state_dict().keys() == {"weight", "bias"}
    assert torch.equal(layer(x).flatten(2).transpose(1, 2), linear(patches))
    assert not torch.equal(layer(x), torch.conv2d(x, layer.weight, layer.bias, 4))


SPECIAL = [{"groups": 2}, {"padding": 1}, {"dilation": 2}]


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(3, 8, 2, 2), *(nn.Conv2d(4, 8, 2, 2, **each) for each in SPECIAL)]
)
def test_other_convolutions_stay_and_are_named(layer: nn.Module) -> None:
    report = octavo.convert(nn.ModuleDict({"layer": layer, "body": nn.Linear(8, 8)}))
    assert report.converted == ["body"]
    assert [(entry.name, entry.kind) for entry in report.coverage.left] == [("layer.weight", "convolution")]


@pytest.mark.parametrize("channels", [1, 3, 16])
def test_one_that_reads_an_image_stays_and_the_report_says_why(channels: int) -> None:
    model = nn.ModuleDict({"patches": nn.Conv2d(channels, 32, 4, 4), "mix": nn.Conv2d(channels, 32, 1)})
    report = octavo.convert(model)
    assert report.converted == ["mix"]
    assert "it reads the image" in report.skipped["patches"]
    assert type(model["patches"]) is nn.Conv2d


# ---- `Conv1D` and `FalconLinear` of transformers


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "tensorwise", "blockwise", "delayed", "rowwise_dw_bf16"])
def test_they_compute_what_a_linear_layer_computes(recipe):
    linear, conv, falcon = nn.Linear(64, 96), transformers.pytorch_utils.Conv1D(96, 64), FalconLinear(64, 96, True)
    conv.load_state_dict({"weight": linear.weight.t(), "bias": linear.bias})
    falcon.load_state_dict(linear.state_dict())
    octavo.convert(nn.ModuleList([linear, conv, falcon]), recipe)
    x = torch.randn(2, 32, 64, requires_grad=True)
    expected, (y, dx, dw, db), found = ((layer(x), *gradients(layer, x)) for layer in (linear, conv, falcon))
    for actual in ((y, dx, dw.t(), db), found):
        assert all(map(torch.equal, actual, expected))
    conv(x).sum().backward()
    assert conv.weight.grad.is_contiguous()


def test_every_layer_of_a_gpt2_is_converted_and_trains():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    plain = copy.deepcopy(model).eval()
    report = octavo.convert(model, "rowwise")
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert report.converted == [f"transformer.h.{layer}.{name}" for layer in (0, 1) for name in names]
    assert {row.name: row.shape for row in report.rows}["transformer.h.0.attn.c_attn"] == (96, 32)
    assert report.skipped == {"lm_head": "it shares its weight with the embedding"}
    layers = [m for m in model.modules() if isinstance(m, Conv1D)]
    assert all(isinstance(m, transformers.pytorch_utils.Conv1D) and type(m).__name__ == "Conv1D" for m in layers)
    share = sum(m.weight.numel() for m in layers) / sum(p.numel() for p in model.parameters())
    assert report.coverage.computed == pytest.approx(share)
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        difference = (model.eval()(tokens).logits - plain(tokens).logits).norm() / plain(tokens).logits.norm()
    assert 1e-4 < difference < 0.1
    model.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
