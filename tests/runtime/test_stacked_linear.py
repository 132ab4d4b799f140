"""The buffers that packed layers share, and what a model's state says of them."""

import copy
from pathlib import Path

import pytest
import torch
from metrics import distance
from runtime_examples import logits
from safetensors.torch import load_file
from tiny_models import same_bits, same_bytes
from torch import nn

import octavo
from octavo.artifact.packed.scheme import CHANNEL, INT8, Scheme
from octavo.ops import quantize
from octavo.runtime.packed_linear import swap_linears
from octavo.runtime.stacked_linear import PackedShare, PackedStack

NAME = "model.layers.0.mlp.up_proj"


def test_the_layers_bytes_are_views_of_one_buffer_and_keep_their_names(folders: dict[str, Path]) -> None:
    folder = folders["llama with biases"]
    model = octavo.load(folder)
    state = model.state_dict()
    assert same_bits(state, load_file(folder / "model.safetensors"))
    stack = model.model.layers[1].mlp.stack
    assert isinstance(stack, PackedStack)
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, PackedShare)
    assert layer.weight.untyped_storage().data_ptr() == stack.weight.untyped_storage().data_ptr()
    assert torch.equal(layer.weight.view(torch.uint8), stack.weight[96:].view(torch.uint8))
    assert "stack" not in " ".join(state)


@pytest.mark.parametrize("scheme", [CHANNEL, INT8], ids=lambda scheme: scheme.name)
def test_a_stack_is_its_layers_side_by_side_whichever_has_a_bias(scheme: Scheme) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(48, n, bias=name != "b") for name, n in (("a", 17), ("b", 5), ("c", 32))})
    state = {}
    for name, linear in model.items():
        q = quantize(linear.weight.detach(), scheme.weight)
        state |= {f"{name}.weight": q.data, f"{name}.weight_scale": q.scale}
        state |= {f"{name}.bias": linear.bias.bfloat16()} if name != "b" else {}
    swap_linears(model, dict.fromkeys(model, scheme))
    model.load_state_dict(state, assign=True)
    x = torch.randn(9, 48)
    apart = [layer(x) for layer in model.values()]
    stack = PackedStack(list(model.values()))
    assert stack.input_cast == scheme.inputs
    y = stack(quantize(x, scheme.inputs), torch.float32)
    assert torch.equal(y, torch.cat(apart, 1))
    assert all(torch.equal(layer(x), alone) for layer, alone in zip(model.values(), apart, strict=True))
    assert model.state_dict().keys() == state.keys()


def test_a_saved_model_opens_again(folders: dict[str, Path], tmp_path: Path) -> None:
    model = octavo.load(folders["qwen3"])
    model.save_pretrained(tmp_path / "again")
    assert same_bytes(folders["qwen3"], tmp_path / "again")
    assert torch.equal(logits(octavo.load(tmp_path / "again")), logits(model))


def test_another_models_state_is_taken_in_place(folders: dict[str, Path]) -> None:
    model, state = octavo.load(folders["llama"]), octavo.load(folders["llama"]).state_dict()
    before, bytes_at = logits(model), model.model.layers[0].mlp.stack.weight.data_ptr()
    state[f"{NAME}.weight_scale"] = 2 * state[f"{NAME}.weight_scale"]
    model.load_state_dict(state)
    assert model.model.layers[0].mlp.stack.weight.data_ptr() == bytes_at
    assert distance(logits(model), before) > 0.01
    assert torch.equal(logits(model), logits(copy.deepcopy(model)))
    del state[f"{NAME}.weight"]
    with pytest.raises(RuntimeError, match=rf"Missing key.*{NAME}\.weight"):
        model.load_state_dict(state)
    state[f"{NAME}.weight"] = torch.zeros(3, 4)
    with pytest.raises(
        RuntimeError, match=r"up_proj\.weight must be torch\.float8_e4m3fn \[96, 64\], got torch.float32"
    ):
        model.load_state_dict(state)


def test_casting_a_model_leaves_bytes_and_scales_as_they_are(folders: dict[str, Path]) -> None:
    model = octavo.load(folders["llama"])
    before = {key: t.clone() for key, t in model.state_dict().items()}
    model.float()
    for key, tensor in model.state_dict().items():
        packed = "_proj." in key
        assert tensor.dtype == (before[key].dtype if packed else torch.float32), key
        assert torch.equal(tensor.to(before[key].dtype).view(torch.uint8), before[key].view(torch.uint8)), key
    assert logits(model).dtype == torch.float32
    moved = copy.deepcopy(model).to("meta")
    assert {t.device.type for t in moved.state_dict().values()} == {"meta"}
