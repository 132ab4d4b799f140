"""dtype_flow of models of transformers and of ours: FLOPs of the phases, and what stays out of FP8."""

import pytest
import torch

import octavo
from octavo.models import GPT2Config, build

transformers = pytest.importorskip("transformers")
IDS = torch.zeros(1, 16, dtype=torch.long)
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}


@pytest.fixture
def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=300)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    octavo.convert(model, "rowwise", device="cpu")
    return model.train()


def test_a_llama_of_transformers(llama):
    flow = octavo.dtype_flow(llama, IDS, labels=IDS, use_cache=False)
    layers = 2 * 16 * 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert flow.flops["forward"]["FP8"] == layers
    assert flow.flops["backward"]["FP8"] == 2 * layers
    assert {each.module for each in flow.left_out} == {"lm_head", "model.layers.*.self_attn"}
    norms = [row for row in flow.rows if row.operation.module == "model.layers.*.input_layernorm"]
    assert {row.operation.computes_in for row in norms if row.operation.kind != "cast"} == {"FP32"}
    assert {row.count % 3 for row in norms} == {0}


def test_its_reentrant_checkpointing_recomputes_the_blocks(llama):
    llama._set_gradient_checkpointing(
        True, lambda function, *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)
    )
    flow = octavo.dtype_flow(llama, IDS, labels=IDS, use_cache=False)
    assert flow.flops["recomputation"]["FP8"] == flow.flops["forward"]["FP8"]


def test_a_vision_transformer():
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    model = transformers.ViTForImageClassification(config)
    octavo.convert(model, "tensorwise", skip=["*.projection"])
    flow = octavo.dtype_flow(model, torch.randn(2, 3, 32, 32))
    assert {each.what for each in flow.left_out} == {"convolution", "attention", "linear layer"}
    convolution = next(each for each in flow.left_out if each.what == "convolution")
    assert convolution.reason == "not converted: octavo.convert(model) would run it in FP8"
    total = sum(sum(each.values()) for each in flow.flops.values())
    assert convolution.share * total == pytest.approx(2 * 2 * 2 * 16 * 64 * 3 * 8 * 8)  # y and dw: the image has no dx


def test_a_gpt2_of_ours():
    with torch.device("meta"):
        model = build(
            GPT2Config(vocabulary=64, layers=2, width=32, heads=2, context=16, tied=True, bias=True, dropout=0.1)
        )
    octavo.convert(model, "delayed", device="cpu")
    flow = octavo.dtype_flow(model, IDS)
    assert flow.flops["backward"]["FP8"] == 2 * flow.flops["forward"]["FP8"] > 0
    assert "it shares its weight with the embedding" in [each.reason for each in flow.left_out]
    assert "layers.*" in str(flow)
