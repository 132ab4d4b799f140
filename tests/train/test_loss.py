"""The loss of a run: which of the two the settings choose, and that both are the same function."""

import copy

import pytest
import torch
from ranks import run_ranks
from tiny_models import built
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PhiConfig, PhiForCausalLM, masking_utils

import octavo
from octavo.distributed import tensor_parallel
from octavo.models import GPT2Config, LlamaConfig, build
from octavo.nn.fused_loss import Head
from octavo.nn.module_tools import spare_search
from octavo.train.config import LARGE_VOCABULARY, ConfigError
from octavo.train.loss import chunked_loss, whole_loss
from octavo.train.model import make_loss

VOCABULARY, HEAD = 50, Head("lm_head")


def llama(tied=True, vocabulary=VOCABULARY):
    torch.manual_seed(0)
    return build(LlamaConfig(vocabulary, 2, 32, 2, 2, 64, 16, tied=tied))


def tokens(count=16):
    drawn = torch.randint(VOCABULARY, (2, count + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1], drawn[:, 1:]


def gradients(model, loss, *head):
    value = loss(*head, model, *tokens())
    value.backward()
    return {"loss": value.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        llama,
        lambda: llama(tied=False),
        lambda: build(GPT2Config(VOCABULARY, 2, 32, 2, 16)),
        lambda: built("llama", vocab_size=VOCABULARY),
        lambda: built("mamba", vocab_size=VOCABULARY),
    ],
    ids=["tied", "own head", "gpt2", "transformers", "mamba"],
)
def test_chunks_give_the_gradients_of_the_whole_and_leave_the_model_as_it_was(make):
    model = make()
    other, names = copy.deepcopy(model), [name for name, _ in model.named_modules()]
    expected = gradients(other, whole_loss)
    found = gradients(model, chunked_loss, HEAD, 10)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    assert [name for name, _ in model.named_modules()] == names
    assert model(tokens()[0])[0].shape[-1] == VOCABULARY


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3moe"])
def test_a_model_of_transformers_does_not_look_for_packed_sequences_and_wait_for_the_gpu(name, monkeypatch):
    model = built(name, vocab_size=VOCABULARY, use_cache=False)
    expected = gradients(copy.deepcopy(model), whole_loss)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: pytest.fail("it looks"))
    monkeypatch.delattr("transformers.Cache.update")  # no layer stores its keys
    spare_search(model)
    assert all(torch.equal(t, expected[name]) for name, t in gradients(model, whole_loss).items())
    octavo.convert(model)
    gradients(model, chunked_loss, HEAD, 10)


def test_the_head_comes_back_after_an_error():
    model = llama()
    head = model.lm_head
    with pytest.raises(ValueError, match="context is 16 tokens"):
        chunked_loss(HEAD, 10, model, *tokens(count=17))
    assert model.lm_head is head


def test_chunks_are_taken_of_a_large_vocabulary_unless_the_settings_say_otherwise(settings):
    large, small = llama(vocabulary=LARGE_VOCABULARY), llama()
    assert make_loss(settings(), large).func is chunked_loss
    assert make_loss(settings(), small) is whole_loss
    assert make_loss(settings(loss={"logits": "whole"}), large) is whole_loss
    assert make_loss(settings(loss={"logits": "chunked"}), small).func is chunked_loss


def test_a_model_whose_head_has_a_bias_needs_its_logits_whole(settings):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    biased = PhiForCausalLM(PhiConfig(vocab_size=LARGE_VOCABULARY, **sizes))
    assert make_loss(settings(), biased) is whole_loss
    with pytest.raises(ConfigError, match=r"loss\.logits chunked requires .* PhiForCausalLM"):
        make_loss(settings(loss={"logits": "chunked"}), biased)


def sharded_gradients(rank):
    """Those of one process under FSDP2, whose root has the head and frees its weights after the forward pass, and under
    tensor parallelism, where each rank has a part of the vocabulary, and of the sequence or not."""
    expected = gradients(llama(), chunked_loss, HEAD, 10)
    for layout in ("fsdp", "sequence", "tensor"):
        model, mesh = llama(), init_device_mesh("cpu", (2,))
        if layout == "fsdp":
            for block in model.model.layers:
                fully_shard(block)
            fully_shard(model, reshard_after_forward=True)
        else:
            tensor_parallel(model, mesh, sequence=layout == "sequence")
        found = gradients(model, chunked_loss, HEAD, 10)
        assert found.keys() == expected.keys()
        for name, t in found.items():
            torch.testing.assert_close(t.full_tensor() if hasattr(t, "full_tensor") else t, expected[name])


@pytest.mark.slow
def test_the_head_of_a_sharded_model_is_read_where_it_is_gathered():
    run_ranks(2, sharded_gradients)
