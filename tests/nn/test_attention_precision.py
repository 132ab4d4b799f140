"""`use_fp8_attention` on models of ours and of transformers: what runs in E4M3, what does not, and its undoing."""

import copy

import pytest
import torch
from kv_cache_examples import model_of
from metrics import sqnr
from operation_counts import operations
from torch import nn

import octavo
from octavo.models import GPT2Config, LlamaConfig, build
from octavo.nn import use_bf16_attention, use_fp8_attention

SIZES = {"vocabulary": 97, "layers": 2, "width": 64, "heads": 4, "mlp_width": 96, "context": 32}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, kv_heads=2),
    "gpt2": GPT2Config(**{name: size for name, size in SIZES.items() if name != "mlp_width"}),
}
FORWARD, BACKWARD = "octavo::fp8_attention", "octavo::fp8_attention_backward"
IDS = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))


def results(model, **inputs):
    """Logits, and the gradient of the first weight of an attention."""
    model.zero_grad()
    output = model(IDS, **inputs)
    logits = getattr(output, "logits", output).float()
    logits.square().mean().backward()
    weight = next(p for name, p in model.named_parameters() if "q_proj.weight" in name)
    return logits.detach(), weight.grad.clone()


def models():
    torch.manual_seed(0)
    ours = {name: build(config) for name, config in CONFIGS.items()}
    return ours | {"transformers": model_of("llama").train(), "qwen3": model_of("qwen3").train()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "transformers", "qwen3"])
def test_both_passes_run_in_fp8_and_are_near_bf16(name):
    model = models()[name]
    expected, keys = results(model), list(model.state_dict())
    assert len(use_fp8_attention(model, shortest=16)) == 2
    seen = operations(lambda: results(model))
    assert (seen[FORWARD], seen[BACKWARD]) == (2, 2)
    for one, other in zip(expected, results(model), strict=True):
        assert sqnr(one, other) > 9
        assert not torch.equal(one, other)
    assert list(model.state_dict()) == keys
    use_bf16_attention(model)
    for one, other in zip(expected, results(model), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["llama", "transformers"])
def test_short_texts_stay_in_bf16(name):
    model = models()[name]
    expected = results(model)
    use_fp8_attention(model)
    for one, other in zip(expected, results(model), strict=True):
        assert torch.equal(one, other)


def test_padding_stays_in_bf16():
    model, mask = models()["transformers"], torch.ones_like(IDS)
    mask[0, :3] = 0
    expected = results(model, attention_mask=mask)
    use_fp8_attention(model, shortest=16)
    for one, other in zip(expected, results(model, attention_mask=mask), strict=True):
        assert torch.equal(one, other)


def test_with_converted_layers_and_a_copy_of_the_model():
    model = models()["transformers"].bfloat16()
    octavo.convert(model, "rowwise")
    use_fp8_attention(model, shortest=16)
    expected = results(model)
    for one, other in zip(expected, results(copy.deepcopy(model)), strict=True):
        assert sqnr(one, other) > 20  # the scales of the gradients are those of one more pass
    octavo.restore(model)
    assert operations(lambda: results(model))[FORWARD] == 2


def test_the_flow_of_dtypes_counts_as_many_flops_in_fp8():
    model = models()["llama"]
    plain = octavo.dtype_flow(model, IDS).flops
    use_fp8_attention(model, shortest=16)
    found = octavo.dtype_flow(model, IDS).flops
    attention = {"forward": 2 * 4, "backward": 5 * 4}  # products of 4 heads
    for phase, products in attention.items():
        assert found[phase]["FP8"] == 2 * products * 2 * (2 * 16 * 16 * 16)  # layers, texts
        assert sum(found[phase].values()) == sum(plain[phase].values())


def test_a_model_on_the_meta_device_gets_scales_of_zeros():
    with torch.device("meta"):
        model = build(CONFIGS["llama"])
    use_fp8_attention(model)
    model.to_empty(device="cpu").bfloat16()
    scales = [m.fp8_gradients.amax for m in model.modules() if hasattr(m, "fp8_gradients")]
    assert [(s.tolist(), s.dtype) for s in scales] == [([0, 0, 0], torch.float32)] * 2


def test_a_model_without_causal_attention_is_refused():
    with pytest.raises(ValueError, match="Sequential has no causal attention"):
        use_fp8_attention(nn.Sequential(nn.Linear(8, 8)))


def test_a_gpu_without_it_is_refused(monkeypatch):
    monkeypatch.setattr("octavo.nn.attention_precision.fp8_attention_limit", lambda *_: "no cuDNN")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: no cuDNN\. Leave attention in BF16"):
        use_fp8_attention(models()["llama"], device="cuda")
