"""Convolutions that are matrix products are converted; the others stay, and are named."""

import copy

import pytest
import torch
from torch import Tensor, nn

import octavo

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
    torch.testing.assert_close(converted(x), plain(x), rtol=1e-4, atol=1e-5)
    for found, known in zip(gradients(converted, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-4)


def test_it_has_the_bits_of_a_linear_layer_of_the_patches() -> None:
    layer, x = nn.Conv2d(24, 16, 4, 4), torch.randn(2, 24, 8, 8)
    linear = nn.Linear(384, 16)
    linear.load_state_dict({"weight": layer.weight.detach().flatten(1), "bias": layer.bias.detach()})
    patches = nn.functional.unfold(x, 4, stride=4).transpose(1, 2)  # [B, T, C p p]
    keys = layer.state_dict().keys()
    for model in (layer, linear):
        octavo.convert(model, "rowwise")
    assert layer.state_dict().keys() == keys
    assert torch.equal(layer(x).flatten(2).transpose(1, 2), linear(patches))
    assert not torch.equal(layer(x), torch.conv2d(x, layer.weight, layer.bias, 4))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_it_compiles_and_agrees_with_eager(recipe: str) -> None:
    layer, x = nn.Conv2d(24, 16, 4, 4), torch.randn(2, 24, 8, 8)
    octavo.convert(layer, recipe)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(4, 8, 2, 2, groups=2),
        nn.Conv2d(3, 8, 2, 2, padding=1),
        nn.Conv2d(3, 8, 2, 2, dilation=2),
        nn.ConvTranspose2d(3, 8, 2, 2),
    ],
)
def test_other_convolutions_stay_and_are_named(layer: nn.Module) -> None:
    model = nn.ModuleDict({"layer": layer, "body": nn.Linear(8, 8)})
    report = octavo.convert(model)
    assert report.converted == ["body"]
    assert [(entry.name, entry.kind) for entry in report.coverage.left] == [("layer.weight", "convolution")]


@pytest.mark.parametrize("channels", [1, 3, 16])
def test_one_that_reads_an_image_stays_and_the_report_says_why(channels: int) -> None:
    model = nn.ModuleDict({"patches": nn.Conv2d(channels, 32, 4, 4), "mix": nn.Conv2d(channels, 32, 1)})
    report = octavo.convert(model)
    assert report.converted == ["mix"]
    assert "it reads the image" in report.skipped["patches"]
    assert type(model["patches"]) is nn.Conv2d


def test_a_convolution_that_a_second_conversion_skips_is_restored() -> None:
    model = nn.ModuleDict({"layer": nn.Conv2d(24, 8, 2, 2), "body": nn.Linear(8, 8)})
    octavo.convert(model, "tensorwise")
    assert octavo.convert(model, skip=["layer"]).skipped == {"layer": "skip='layer'"}
    assert type(model["layer"]) is nn.Conv2d


@pytest.mark.parametrize("shape", [(2, 24, 3, 8), (2, 4, 8, 8), (8, 8)])
def test_an_input_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    layer = nn.Conv2d(24, 16, 4, 4)
    octavo.convert(layer)
    with pytest.raises(ValueError, match=r"takes \[B, 24, \*sizes\] with sizes of at least \[4, 4\], got"):
        layer(torch.randn(shape))
