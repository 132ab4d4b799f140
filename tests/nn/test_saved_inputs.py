"""The layer after attention saves its input itself where PyTorch's attention saves it too."""

import pytest
import torch
from kv_cache_examples import model_of
from torch import Tensor, nn

import octavo
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.models.vision import ImageConfig, VisionTransformer
from octavo.nn import use_bf16_attention, use_fp8_attention

SIZES = {"vocabulary": 97, "layers": 2, "width": 64, "heads": 4, "context": 32}
IMAGES = ImageConfig(image=8, patch=2, channels=3, classes=5, layers=2, width=64, heads=4)
MODELS = {
    "llama": lambda: build(LlamaConfig(**SIZES, kv_heads=2, mlp_width=96)),
    "mixture": lambda: build(MixtureConfig(**SIZES, kv_heads=2, mlp_width=96, experts=4, top_k=2)),
    "gpt2": lambda: build(GPT2Config(**SIZES)),
    "vision": lambda: VisionTransformer(IMAGES),
    "transformers": lambda: model_of("llama").train(),
}
AFTER = ("o_proj", "out_proj", "attention.proj")  # names of the layers after attention


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def marked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if getattr(module, "input_is_saved", False)]


def after_attention(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(AFTER)]


def gradients(name: str, model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, 3, 8, 8, generator=generator) if name == "vision" else torch.arange(32).view(2, 16)
    y = model(inputs)
    return list(torch.autograd.grad(getattr(y, "logits", y).square().mean(), list(model.parameters())))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_layers_after_attention_are_marked_and_compute_the_same_bits(recipe: str, name: str) -> None:
    model = make(name)
    octavo.convert(model, recipe)
    assert len(marked(model)) == 2
    assert marked(model) == after_attention(model)
    found = gradients(name, model)
    for layer in after_attention(model):
        model.get_submodule(layer).input_is_saved = False
    assert all(map(torch.equal, found, gradients(name, model)))
    octavo.restore(model)
    assert marked(model) == []


@pytest.mark.parametrize("name", ["llama", "transformers"])
@pytest.mark.parametrize("converted_first", [True, False])
def test_attention_in_fp8_saves_other_bytes(converted_first: bool, name: str) -> None:
    model = make(name)
    steps = [lambda: octavo.convert(model, "rowwise"), lambda: use_fp8_attention(model, shortest=16)]
    for step in steps if converted_first else reversed(steps):
        step()
    assert marked(model) == []
    use_bf16_attention(model)
    assert marked(model) == after_attention(model)


def test_attention_that_is_not_pytorchs_saves_no_output() -> None:
    model = make("transformers")
    model.set_attn_implementation("eager")
    octavo.convert(model, "rowwise")
    assert marked(model) == []
