"""Norms and MLPs of packed models, fused, against training and against the layers one by one."""

from pathlib import Path

import pytest
import torch
from metrics import distance
from operation_counts import operations
from packed_examples import Example
from runtime_examples import ARCHITECTURES, layer_by_layer, logits, make_model, tokens
from torch import Tensor, nn

import octavo
from octavo.packing import pack
from octavo.runtime import load_packed
from octavo.runtime.fused import PackedMLP, PackedNormLinear, fuse


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_pass_is_that_of_training_to_the_bit(
    folders: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    trained, packed = make_model(name), octavo.load(folders[name])
    report = octavo.convert(trained, "rowwise")
    assert len(report.fused) == 4
    if dtype == torch.bfloat16:  # the weights that training casts are the masters, as they were when it was packed
        for key, p in trained.named_parameters():
            if not key.endswith("_proj.weight"):
                p.data = p.data.bfloat16()
    else:
        for p in packed.parameters():
            p.data = p.data.float()
    found, required = logits(packed), logits(trained)
    assert found.dtype == dtype
    assert torch.equal(found, required)


@pytest.mark.parametrize(
    ("name", "scheme", "product", "limit"),
    [*((name, "channel", "octavo::scaled_mm", 0.018) for name in ARCHITECTURES),  # 35 dB
     *((name, "int8", "octavo::int8_mm", 2e-3) for name in ("llama with biases", "qwen3"))],
)  # fmt: skip
def test_norms_and_activations_are_fused_and_layers_stacked(
    folders: dict[str, Path], tmp_path: Path, name: str, scheme: str, product: str, limit: float
) -> None:
    pack(folders[name].with_name(name), tmp_path / "packed", scheme=scheme)
    model = octavo.load(tmp_path / "packed")
    seen = operations(lambda: logits(model))
    assert seen["octavo::norm_quantize"] == 4
    assert seen["octavo::activation_quantize"] == 2
    assert seen["octavo::quantize"] == 2  # the attention's output
    assert seen[product] == 8
    reference = layer_by_layer(model)
    apart = operations(lambda: logits(reference))
    assert (apart["octavo::norm_quantize"], apart[product]) == (0, 14)
    for each in (model, reference):
        each.float()  # in which a norm's output is not rounded on its way to the quantizer
    assert distance(logits(model), logits(reference)) < limit


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_token_is_the_same_alone_as_among_others(folders: dict[str, Path], name: str) -> None:
    model = octavo.load(folders[name])
    cache, steps = None, []
    for i in range(7):
        with torch.no_grad():
            out = model(tokens(7)[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert distance(torch.cat(steps, 1), logits(model, tokens(7))) < 0.03


def test_our_own_models_are_fused_too(packed: dict[str, Example]) -> None:
    for name, fused in (("llama", 4), ("gpt2", 4)):
        model = load_packed(packed[name].packed).model
        with torch.no_grad():
            seen = operations(lambda model=model: model(tokens(9)))  # type: ignore[misc]
        assert seen["octavo::norm_quantize"] == fused


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"])
def test_what_a_library_puts_in_a_layers_place_runs(folders: dict[str, Path], path: str) -> None:
    model = octavo.load(folders["llama"])
    before, layer = logits(model), model.model.layers[1].get_submodule(path)
    setattr(model.model.layers[1].get_submodule(path.split(".")[0]), path.split(".")[1], Doubled(layer))
    doubled = logits(model)
    setattr(model.model.layers[1].get_submodule(path.split(".")[0]), path.split(".")[1], layer)
    layer.weight_scale.mul_(2)  # of the stack, where it has one
    assert distance(doubled, before) > 0.01
    assert distance(logits(model), doubled) < 0.03


def test_fusing_twice_is_fusing_once(folders: dict[str, Path]) -> None:
    model = octavo.load(folders["llama"])
    classes = [type(m) for m in model.modules()]
    fuse(model)
    assert [type(m) for m in model.modules()] == classes
    assert sum(isinstance(m, PackedNormLinear) for m in model.modules()) == 2
    assert len({type(m) for m in model.modules() if isinstance(m, PackedMLP)}) == 1


def test_no_tokens_and_a_vector(folders: dict[str, Path]) -> None:
    model = octavo.load(folders["llama"])
    mlp, norm = model.model.layers[0].mlp, model.model.layers[0].post_attention_layernorm
    for shape in ((0, 64), (2, 0, 64), (64,), (1, 2, 3, 64)):
        x = torch.randn(shape).bfloat16()
        assert mlp(x).shape == x.shape
        y, total = mlp(x, norm, x)
        assert y.shape == total.shape == x.shape
        assert torch.equal(total, x + x)
