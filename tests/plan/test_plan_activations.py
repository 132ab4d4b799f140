"""Planned activations against the tensors that Octavo's own models hold after the forward pass."""

from dataclasses import replace

import pytest
import torch
from support.live_memory import LiveMemory
from torch import nn

import octavo
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build, vision
from octavo.nn import use_fp8_attention
from octavo.plan.activations import block_bytes, checkpointed_bytes, element_bytes
from octavo.plan.architecture import Block
from octavo.plan.families import describe_architecture
from octavo.recipe import get_recipe
from octavo.train.blocks import prepare_blocks
from octavo.train.config import Config

TOKENS, WIDTH, VOCABULARY = 256, 128, 64
PARTITION = "aot_eager_decomp_partition"  # decides what to save as Inductor does, and compiles no C++


def sizes(kind: str, layers: int) -> LlamaConfig | GPT2Config:
    common = {"vocabulary": VOCABULARY, "layers": layers, "width": WIDTH, "heads": 4, "context": TOKENS}
    if kind == "mixture":
        return MixtureConfig(**common, kv_heads=2, mlp_width=384, experts=8, top_k=2)
    return LlamaConfig(**common, kv_heads=2, mlp_width=384) if kind == "llama" else GPT2Config(**common)


def prepared(
    kind: str, recipe: str, mode: str, layers: int, *, compiled: bool = False, fp8_attention: bool = False
) -> nn.Module:
    torch.manual_seed(0)
    model = build(sizes(kind, layers))
    octavo.convert(model, recipe)
    if fp8_attention:
        use_fp8_attention(model, shortest=TOKENS)
    settings = {"activation_checkpointing.mode": mode, "compile.blocks": compiled, "compile.backend": PARTITION}
    prepare_blocks(model, Config().change(**settings))
    return model


def held(kind: str, recipe: str, mode: str, layers: int, *, fp8_attention: bool = False) -> int:
    """Bytes that are alive after the forward pass."""
    model = prepared(kind, recipe, mode, layers, fp8_attention=fp8_attention)
    tokens = torch.randint(VOCABULARY, (1, TOKENS))
    with LiveMemory(model.parameters()) as memory, torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens).float().sum()
        found = memory.now()
    assert loss.requires_grad
    return found


def saved(kind: str, recipe: str, layers: int) -> int:
    """Bytes that the compiled blocks of a model, its norm and its head save."""
    torch.compiler.reset()  # which counts the compilations of blocks in other models too
    model, tokens = prepared(kind, recipe, "none", layers, compiled=True), torch.randint(VOCABULARY, (1, TOKENS))
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    storages = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage
        return tensor

    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)  # the histories of `delayed` begin
        octavo.update_scales(model)
        model(tokens)  # compiles, which hooks would hinder
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            model(tokens)
    return sum(storage.nbytes() for storage in storages.values())


def planned(kind: str, recipe: str, mode: str, *, compiled: bool = False, fp8_attention: bool = False) -> float:
    model = describe_architecture(kind, sizes(kind, 2).to_hf())
    block, used = model.blocks[0], get_recipe(recipe)
    if mode != "none":
        return checkpointed_bytes(block, model, used, mode, 4, fp8_attention=fp8_attention)
    fp8_experts = used.fusable is not None
    return block_bytes(
        block, model, used, residual=4, compiled=compiled, fp8_attention=fp8_attention, fp8_experts=fp8_experts
    )


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "tensorwise", "rowwise_dw_bf16", "groupwise"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_block_saves_what_is_planned(kind, recipe, mode):
    block = (held(kind, recipe, mode, 4) - held(kind, recipe, mode, 2)) / 2
    if kind == "llama" and mode == "none" and recipe != "rowwise":
        block -= 2 * 4 * WIDTH * TOKENS  # nn.RMSNorm on the CPU is several operations, and saves one tensor more
    assert planned(kind, recipe, mode) * TOKENS == pytest.approx(block, rel=0.05)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize(("kind", "recipe"), [("llama", "bf16"), ("llama", "rowwise"), ("gpt2", "rowwise")])
def test_a_block_with_attention_in_fp8_saves_what_is_planned(kind, recipe, mode):
    block = (held(kind, recipe, mode, 4, fp8_attention=True) - held(kind, recipe, mode, 2, fp8_attention=True)) / 2
    if mode == "none" and recipe == "bf16":
        block -= 2 * 4 * WIDTH * TOKENS  # as above
    assert planned(kind, recipe, mode, fp8_attention=True) * TOKENS == pytest.approx(block, rel=0.05)


@pytest.mark.parametrize(("recipe", "plain_norms"), [("bf16", 2), ("tensorwise", 2), ("rowwise", 1)])
def test_a_block_of_experts_saves_what_is_planned(recipe, plain_norms):
    block = (held("mixture", recipe, "none", 4) - held("mixture", recipe, "none", 2)) / 2
    block -= plain_norms * 4 * WIDTH * TOKENS  # as above
    casts = 0 if recipe == "rowwise" else 2 * sum(e.weights for e in described("mixture").layers if e.copies > 1)
    assert planned("mixture", recipe, "none") * TOKENS + casts == pytest.approx(block, rel=0.05)


def test_a_block_on_images_saves_queries_keys_and_values_once():
    """As views of one tensor: the output of one layer, as in timm's blocks."""

    def alive(layers: int) -> int:
        blocks = nn.Sequential(*(vision.Block(WIDTH, 4) for _ in range(layers))).bfloat16()
        assert len(octavo.convert(blocks).fused) == 2 * layers
        x = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with LiveMemory(blocks.parameters()) as memory:
            y = blocks(x)
            found = memory.now()
        assert y.requires_grad
        return found

    fields = {"model_type": "vit", "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    fields |= {"num_hidden_layers": 2, "image_size": 32, "patch_size": 4, "num_channels": 3}
    model = replace(describe_architecture("vit", fields), fused=True)
    options = {"residual": 2, "compiled": False, "fp8_attention": False, "fp8_experts": False}
    block = block_bytes(model.blocks[0], model, get_recipe("rowwise"), **options)
    assert block * TOKENS == pytest.approx((alive(4) - alive(2)) / 2, rel=0.03)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
@pytest.mark.parametrize("kind", ["llama", pytest.param("mixture", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_compiled_blocks_save_each_input_once(kind, recipe):
    found = (saved(kind, recipe, 3) - saved(kind, recipe, 1)) / 2
    casts = 2 * described(kind).weights if recipe == "bf16" else 0  # the BF16 copies of the FP32 weights
    assert planned(kind, recipe, "none", compiled=True) * TOKENS + casts == pytest.approx(found, rel=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_save_an_input_once_for_each_history():
    recipes = ("delayed", "tensorwise")
    delayed, tensorwise = ((saved("llama", each, 3) - saved("llama", each, 1)) / 2 for each in recipes)
    more = planned("llama", "delayed", "none", compiled=True) - planned("llama", "tensorwise", "none", compiled=True)
    assert delayed - tensorwise == pytest.approx(more * TOKENS, rel=0.01)


def test_layers_with_histories_of_their_own_share_no_input():
    more = planned("llama", "delayed", "none", compiled=True) - planned("llama", "tensorwise", "none", compiled=True)
    assert more == (2 + 1) * WIDTH  # q, k and v; gate and up


def described(kind: str) -> Block:
    return describe_architecture(kind, sizes(kind, 2).to_hf()).blocks[0]


def test_an_input_takes_the_bytes_that_dw_reads():
    by_recipe = {name: element_bytes(256, get_recipe(name)) for name in ("bf16", "tensorwise", "rowwise", "groupwise")}
    assert by_recipe == {"bf16": 512, "tensorwise": 256, "rowwise": 260, "groupwise": 256 + 4 * 4}
