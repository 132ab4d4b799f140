"""The planned peak against the tensors that are alive in a training step of Octavo's own models on the CPU."""

from dataclasses import replace

import pytest
import torch
from operation_counts import LiveMemory, saved_tensors
from tiny_models import built, with_slow
from torch import nn
from transformers import AutoModelForCausalLM

import octavo
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build, vision
from octavo.nn import use_fp8_attention
from octavo.plan.memory import block_bytes, plan_memory, saved_bytes
from octavo.plan.model_shape import describe_architecture
from octavo.plan.setup import Setup, make_setup, states_of
from octavo.rates.measured import find_gpu
from octavo.recipe import bf16
from octavo.train.config import Config
from octavo.train.model import make_loss, prepare_blocks
from octavo.train.optimizer import make_optimizer

CHECKPOINTING = pytest.mark.parametrize("mode", ["none", "full", "selective"])


@CHECKPOINTING
@pytest.mark.parametrize(("kind", "recipe"), [("gpt2", "bf16"), ("gpt2", "rowwise"), ("llama", "rowwise")])
def test_the_peak_of_a_step(kind, recipe, mode):
    """Of a forward and backward pass, with the weights and the states of the optimizer."""
    logits = "chunked" if kind == "llama" else "whole"
    common = {"vocabulary": 1024, "layers": 2, "width": 128, "heads": 4, "context": 512}
    sizes = LlamaConfig(**common, kv_heads=2, mlp_width=512) if kind == "llama" else GPT2Config(**common)
    changes = {"context": 512, "batch": 1, "activation_checkpointing.mode": mode, "loss.logits": logits}
    config = Config(recipe=recipe).change(**changes, **{"loss.chunk": 128})
    model = build(sizes)
    loss = make_loss(config, model)
    octavo.convert(model, config.recipe)
    prepare_blocks(model, config)
    tokens = torch.randint(1024, (1, 512))
    with LiveMemory(model.parameters()) as memory:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, tokens, tokens)
        value.backward()
    plan = plan_memory(make_setup(describe_architecture(kind, sizes.to_hf()), config, find_gpu("h200"), 1))
    expected = memory.peak + plan.parts["weights"] + plan.parts["optimizer"]
    assert plan.peak - plan.parts["fp8_copies"] == pytest.approx(expected, rel=0.05)


# ---- Planned activations against the tensors that Octavo's own models hold after the forward pass


TOKENS, WIDTH, VOCABULARY = 256, 128, 64
PARTITION = "aot_eager_decomp_partition"  # decides what to save as Inductor does, and compiles no C++
THEIRS = ("qwen3", "mixtral", "qwen3moe")  # models of transformers


def sizes(kind: str, layers: int) -> LlamaConfig | GPT2Config:
    common = {"vocabulary": VOCABULARY, "layers": layers, "width": WIDTH, "heads": 4, "context": TOKENS}
    if kind == "mixture":
        return MixtureConfig(**common, kv_heads=2, mlp_width=384, experts=8, top_k=2)
    if kind in THEIRS:
        return built(kind, num_hidden_layers=layers, max_position_embeddings=TOKENS, use_cache=False).config
    return LlamaConfig(**common, kv_heads=2, mlp_width=384) if kind == "llama" else GPT2Config(**common)


def prepared(kind, recipe, mode, layers, *, compiled=False, fp8_attention=False):
    torch.manual_seed(0)
    model = (AutoModelForCausalLM.from_config if kind in THEIRS else build)(sizes(kind, layers))
    octavo.convert(model, recipe)
    if fp8_attention:
        use_fp8_attention(model, shortest=TOKENS)
    settings = {"activation_checkpointing.mode": mode, "compile.blocks": compiled, "compile.backend": PARTITION}
    prepare_blocks(model, Config().change(**settings))
    return model


def held(kind: str, recipe: str, mode: str, *, fp8_attention: bool = False) -> int:
    """Bytes of a block that are alive after the forward pass: what one more block holds."""
    found = []
    for layers in (1, 2):
        model = prepared(kind, recipe, mode, layers, fp8_attention=fp8_attention)
        tokens = torch.randint(VOCABULARY, (1, TOKENS))
        with LiveMemory(model.parameters()) as memory, torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens)[0].float().sum()
            found.append(memory.now())
        assert loss.requires_grad
    return found[1] - found[0]


def saved(kind: str, recipe: str, layers: int) -> int:
    """Bytes that the compiled blocks of a model, its norm and its head save."""
    torch.compiler.reset()  # which counts the compilations of blocks in other models too
    model, tokens = prepared(kind, recipe, "none", layers, compiled=True), torch.randint(VOCABULARY, (1, TOKENS))
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)  # the histories of `delayed` begin
        octavo.scales.update_scales(model)
        model(tokens)  # compiles, which hooks would hinder
        kept = [t.untyped_storage() for t in saved_tensors(lambda: model(tokens))]
    return sum({s._cdata: s.nbytes() for s in kept if s._cdata not in weights}.values())


class WithFp8Attention(Setup):
    """The models here have heads that no kernel takes."""

    fp8_attention = True


def planned(kind: str, recipe: str, mode: str, *, compiled: bool = False, fp8_attention: bool = False) -> float:
    """Bytes that a block saves by the plan."""
    described = sizes(kind, 2)
    model = describe_architecture(kind, described.to_dict() if kind in THEIRS else described.to_hf())
    options = {"activation_checkpointing.mode": mode, "compile.blocks": compiled, "context": TOKENS, "batch": 1}
    setup = make_setup(model, Config(recipe=recipe).change(**options), find_gpu("h200"), 1)
    return saved_bytes(WithFp8Attention(**vars(setup)) if fp8_attention else setup, model.blocks[0])


RECIPES = ["bf16", "rowwise", "tensorwise", "rowwise_dw_bf16", "rowwise_forward", "groupwise"]
BLOCKS = [("llama", recipe, False) for recipe in RECIPES]
BLOCKS += [("gpt2", recipe, False) for recipe in ("bf16", "rowwise", "tensorwise")]
BLOCKS += [("llama", "bf16", True), ("llama", "rowwise", True), ("gpt2", "rowwise", True)]


@CHECKPOINTING
@pytest.mark.parametrize(("kind", "recipe", "fp8_attention"), BLOCKS)
def test_a_block_saves_what_is_planned(kind, recipe, fp8_attention, mode):
    block = held(kind, recipe, mode, fp8_attention=fp8_attention)
    if kind == "llama" and mode == "none" and recipe != "rowwise":
        block -= 2 * 4 * WIDTH * TOKENS  # nn.RMSNorm on the CPU is several operations, and saves one tensor more
    assert planned(kind, recipe, mode, fp8_attention=fp8_attention) == pytest.approx(block, rel=0.05)


MIXTURES = [("mixture", each) for each in ("bf16", "tensorwise", "rowwise", "blockwise", "mxfp8", "groupwise")]


@pytest.mark.parametrize(("kind", "recipe"), [*MIXTURES, ("mixtral", "bf16"), ("mixtral", "tensorwise")])
def test_a_block_of_experts_saves_what_is_planned(kind, recipe):
    block = held(kind, recipe, "none") - (1 if recipe == "rowwise" else 2) * 4 * WIDTH * TOKENS  # as above
    assert planned(kind, recipe, "none") == pytest.approx(block, rel=0.05)


def test_experts_compute_gate_and_up_again():
    saved, freed = ([of("mixture", "rowwise", mode) for mode in ("none", "selective")] for of in (held, planned))
    assert saved[0] - saved[1] == freed[0] - freed[1] > 0


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
    config = Config().change(**{"context": model.context, "batch": 1, "optimizer.weights": "bf16"})
    block = block_bytes(make_setup(model, config, find_gpu("h200"), 1), model.blocks[0])
    assert block * TOKENS == pytest.approx((alive(4) - alive(2)) / 2, rel=0.03)


COMPILED = [("llama", "bf16"), ("llama", "rowwise"), ("mixture", "bf16"), ("mixture", "rowwise"), ("qwen3", "bf16")]
COMPILED += [("qwen3moe", "bf16")]


@pytest.mark.parametrize(("kind", "recipe"), with_slow(COMPILED, COMPILED[:1]))
def test_compiled_blocks_save_each_input_once(kind, recipe):
    found = (saved(kind, recipe, 3) - saved(kind, recipe, 1)) / 2
    assert planned(kind, recipe, "none", compiled=True) == pytest.approx(found, rel=0.05)


@pytest.mark.slow
def test_compiled_layers_save_an_input_once_for_each_history():
    recipes = ("delayed", "tensorwise")
    delayed, tensorwise = ((saved("llama", each, 3) - saved("llama", each, 1)) / 2 for each in recipes)
    more = planned("llama", "delayed", "none", compiled=True) - planned("llama", "tensorwise", "none", compiled=True)
    assert delayed - tensorwise == pytest.approx(more, rel=0.01)


# ---- The bytes of a parameter against the optimizers' own tensors


@pytest.mark.parametrize("state", ["fp32", "8bit", "fp8"])
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_bytes_of_a_parameter_are_those_of_the_tensors(state, weights):
    if (state, weights) != ("fp32", "fp32"):
        pytest.importorskip("torchao")
    layer = nn.Linear(1024, 256, bias=False).to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[weights]))
    layer(torch.ones(1, 1024, dtype=layer.weight.dtype)).sum().backward()
    config = Config().change(**{"optimizer.state": state, "optimizer.weights": weights})
    optimizer = make_optimizer(layer, config)
    moments = [optimizer.state[layer.weight][name] for name in ("exp_avg", "exp_avg_sq")]
    planned = states_of(config.optimizer, bf16(), accumulate=1)
    count = layer.weight.numel()
    assert planned.weight * count == layer.weight.nbytes
    assert planned.gradient * count == layer.weight.grad.nbytes
    tensors = [part for m in moments for part in ([m] if type(m) is torch.Tensor else [m.codes, m.scale])]
    assert states_of(config.optimizer, bf16(), accumulate=2).gradient == 4  # in FP32
    assert planned.moments * count == sum(tensor.nbytes for tensor in tensors)
