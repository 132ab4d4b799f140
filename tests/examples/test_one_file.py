"""examples/octavo_in_one_file.py computes what the package computes: the same bytes, gradients and packed folder."""

import json
from pathlib import Path

import pytest
import torch
from ml_dtypes import float8_e4m3fn
from safetensors.torch import load_file
from torch import Tensor, nn

import octavo
from examples import octavo_in_one_file as one_file
from octavo.packing import pack


def test_every_number_has_the_code_of_ml_dtypes() -> None:
    x = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()  # all of BF16
    x = x[x.abs() <= 448]  # ml_dtypes does not saturate
    theirs = torch.from_numpy(x.numpy().astype(float8_e4m3fn).view("uint8"))
    assert torch.equal(one_file.encode(x), theirs)
    codes = torch.arange(256).to(torch.uint8)
    numbers = torch.from_numpy(codes.numpy().view(float8_e4m3fn).astype("float32"))
    assert torch.equal(one_file.decode(codes).nan_to_num(-1), numbers.nan_to_num(-1))
    assert one_file.encode(torch.tensor([1e9, -torch.inf, torch.nan])).tolist() == [0x7E, 0xFE, 0x7F]


def gradients(layer: nn.Module, autocast: bool) -> list[Tensor]:
    """y, dx and dw on inputs of every magnitude, with rows of zeros."""
    torch.manual_seed(1)
    x = torch.randn(2, 16, 48) * torch.logspace(-6, 6, 16)[:, None]
    dy = torch.randn(2, 16, 32) * torch.logspace(-3, -9, 16)[:, None]
    x[0, 3] = dy[1, 5] = 0
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_computes_the_same_bits(autocast: bool) -> None:
    layers = []
    for convert in (one_file.convert, octavo.convert):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 32, bias=False))
        model[0].weight.data[3] *= 1e-6  # below the floor of the scales
        model[0].weight.data[4] = 0
        convert(model)
        layers.append(model[0])
    for ours, packages in zip(*(gradients(layer, autocast) for layer in layers), strict=True):
        assert ours.dtype == packages.dtype
        assert torch.equal(ours, packages)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that the file packs, beside the unpacked model in FP32."""
    model = one_file.convert(one_file.Llama(one_file.CONFIG))
    one_file.pack(model, tmp_path / "packed")
    (tmp_path / "model").mkdir()
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    one_file.write_safetensors(tmp_path / "model" / "model.safetensors", tensors)
    (tmp_path / "model" / "config.json").write_text(json.dumps(one_file.CONFIG | {"dtype": "float32"}))
    return tmp_path


def test_the_packed_folder_is_that_of_the_package(folder: Path) -> None:
    theirs = pack(folder / "model", folder / "theirs").folder
    ours = load_file(folder / "packed" / "model.safetensors")
    packages = load_file(theirs / "model.safetensors")
    assert ours.keys() == packages.keys()
    for name, t in packages.items():
        same = t if "scale" in name or t.dtype == torch.float8_e4m3fn else t.bfloat16()
        assert torch.equal(ours[name].view(torch.uint8), same.view(torch.uint8)), name
    configs = [json.loads((path / "config.json").read_text()) for path in (folder / "packed", theirs)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


@torch.no_grad()
def test_the_folder_runs_as_in_the_package(folder: Path) -> None:
    ours, theirs = one_file.load(folder / "packed"), octavo.load(folder / "packed")
    layers = {name: layer for name, layer in ours.named_modules() if isinstance(layer, one_file.PackedLinear)}
    assert len(layers) == 2 * 7
    for name, layer in layers.items():
        x = torch.randn(5, layer.w_q.shape[1], dtype=torch.bfloat16)
        assert torch.equal(layer(x), theirs.get_submodule(name)(x)), name
    tokens = torch.arange(32)[None]
    logits = [ours(tokens).float().flatten(), theirs(tokens).logits.float().flatten()]
    assert torch.cosine_similarity(*logits, dim=0) > 0.99  # norms round in other places
    assert one_file.generate(ours, "def ", 5).startswith("def ")
