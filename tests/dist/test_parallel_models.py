"""A model that two ranks share computes what one rank computes, before and after conversion, and trains alike."""

import pytest
import torch
from metrics import sqnr
from ranks import run_ranks
from tensor_parallel_examples import (
    batch,
    converted,
    difference,
    difference_of_all,
    logits_of,
    make_model,
    mesh_of,
    parameters_of,
    train,
    whole,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.dist import tensor_parallel
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig

pytestmark = pytest.mark.slow

# kind, recipe, whether each rank has a part of the sequence, whether the model is converted first
ROWWISE = [
    ("llama", "rowwise", True, True),
    ("llama", "rowwise", False, False),
    ("gpt2", "rowwise", True, False),
    ("LlamaForCausalLM", "rowwise", True, True),
    ("MistralForCausalLM", "rowwise", True, False),
    ("Qwen2ForCausalLM", "rowwise", False, True),
]
UNCONVERTED = [("llama", None, True, True), ("gpt2", None, False, True), ("Qwen3ForCausalLM", None, True, True)]
# Every rank has scales of its own in these recipes, or, in Qwen3, bytes that the norm of the heads may move.
OTHERS = [("llama", recipe, True, True) for recipe in ("rowwise_dw_bf16", "delayed", "blockwise")]
OTHERS += [("Qwen3ForCausalLM", "rowwise", True, True), ("LlamaForCausalLM", "tensorwise", True, False)]


def differences(rank, cases):
    """Of the first logits, the first gradients, and the parameters after three steps; None where those are wrong."""
    mesh, results = mesh_of(2), []
    for kind, recipe, sequence, first in cases:
        one = converted(kind, recipe)
        model = converted(kind, recipe, lambda m, cut=sequence: tensor_parallel(m, mesh, sequence=cut), first=first)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert model.state_dict().keys() == one.state_dict().keys()
        (logits, gradients), (expected, expected_gradients) = train(model), train(one)
        results.append(
            (
                difference(logits, expected),
                difference_of_all(gradients, expected_gradients),
                difference_of_all(parameters_of(model), parameters_of(one)),
            )
        )
    return results


def assert_within(cases, logits, gradients, parameters):
    """The differences of each case are below these bounds, and alike on both ranks."""
    here, there = run_ranks(2, differences, cases)
    assert here == there
    for case, found in zip(cases, here, strict=True):
        assert found[0] < logits, (case, found)
        assert found[1] < gradients, (case, found)
        assert found[2] < parameters, (case, found)


@pytest.mark.parametrize("cases", [ROWWISE[:3], ROWWISE[3:]], ids=["ours", "transformers"])
def test_rowwise(cases):
    """Bytes and scales are those of one rank, but for gradients at the border of two codes."""
    assert_within(cases, logits=1e-6, gradients=2e-3, parameters=1e-3)


def test_a_model_that_is_not_converted():
    assert_within(UNCONVERTED, logits=1e-6, gradients=1e-6, parameters=1e-4)


def test_recipes_that_quantize_parts_by_themselves():
    """Within the error of the recipe itself."""
    assert_within(OTHERS, logits=0.05, gradients=0.2, parameters=0.01)


def refuse(rank):
    mesh, messages = mesh_of(2), []

    def refused(model, mesh=mesh):
        before = parameters_of(model) if not any(isinstance(p, DTensor) for p in model.parameters()) else None
        with pytest.raises(ValueError, match=r".") as error:
            tensor_parallel(model, mesh)
        assert before is None or not any(isinstance(p, DTensor) for p in model.parameters())
        messages.append(str(error.value))

    sizes = {"vocabulary": 61, "layers": 1, "context": 32}
    refused(nn.Sequential(nn.Linear(8, 8)))
    refused(Llama(LlamaConfig(width=64, heads=4, kv_heads=1, mlp_width=96, **sizes)))
    refused(Llama(LlamaConfig(width=64, heads=4, kv_heads=2, mlp_width=97, **sizes)))
    refused(GPT2(GPT2Config(width=63, heads=3, **sizes)))
    refused(make_model("llama"), mesh_of(2, 1))
    model = make_model("LlamaForCausalLM")
    tensor_parallel(model, mesh)
    refused(model)
    refused(fully_shard(make_model("llama")))
    with pytest.raises(TypeError, match="takes a DeviceMesh"):
        tensor_parallel(make_model("llama"), 2)
    with pytest.raises(ValueError, match="length of a sequence must be a multiple of 2") as error:
        model(torch.zeros(2, 7, dtype=torch.int64))
    return [*messages, str(error.value)]


def test_what_cannot_be_cut_is_refused_before_anything_changes():
    expected = [
        "got Sequential: give its layers the styles octavo.dist.ColumnParallel",
        "2 ranks cannot share 1 heads of keys and values of a layer",
        "2 ranks cannot share 97 columns inside the MLP of a layer",
        "2 ranks cannot share 3 heads, 3 heads of keys and values of a layer",
        "tensor parallelism takes a mesh of one dimension",
        "is a DTensor already: call tensor_parallel once for a model",
        "is a DTensor already: call tensor_parallel once for a model, and before fully_shard",
        "degree of tensor parallelism, got tokens [2, 7]: pad them",
    ]
    for messages in run_ranks(2, refuse):
        for part, message in zip(expected, messages, strict=True):
            assert part in message


def on_meta(rank):
    """A model that was made, converted and cut on the meta device, then loaded."""
    one = converted("llama", "rowwise")
    with torch.device("meta"):
        model = make_model("llama")
    octavo.convert(model)
    tensor_parallel(model, mesh_of(2))
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        source = one.get_parameter(name)
        part = source.chunk(2, parameter.placements[0].dim)[rank] if parameter.placements[0].is_shard() else source
        parameter.to_local().data.copy_(part)
    tokens, _ = batch()
    return difference(logits_of(model, tokens), logits_of(one, tokens)), whole(model.model.norm.weight).shape


def test_a_model_on_the_meta_device():
    for found, shape in run_ranks(2, on_meta):
        assert found < 1e-6
        assert shape == (64,)


def in_bf16(rank):
    """The SQNR in dB of logits and gradients with BF16 weights, of one rank's FP8 and of that of two ranks."""
    results = []
    for recipe, ranks in ((None, 1), ("rowwise", 1), ("rowwise", 2)):
        model = make_model("llama").bfloat16()
        with torch.no_grad():
            for p in model.model.layers.parameters():
                p.copy_(p if p.ndim == 1 else 10 * p)  # so that the layers decide over the stream, as wide ones do
        if recipe is not None:
            octavo.convert(model, recipe)
        if ranks > 1:
            tensor_parallel(model, mesh_of(ranks))
        logits = logits_of(model, batch()[0])
        logits.float().square().mean().backward()
        results.append([whole(logits), *(whole(p.grad) for p in model.parameters())])
    expected, *found = results
    return [[sqnr(*pair) for pair in zip(expected, result, strict=True)] for result in found]


def test_bf16_weights_lose_nothing_more():
    for one, two in run_ranks(2, in_bf16):
        assert abs(one[0] - two[0]) < 0.3
        assert abs(sum(one) - sum(two)) < 0.3 * len(one)
