"""The cache for transformers against an emulation of what it shall do: keys and values rounded in float64, in
transformers' own cache, under transformers' own attention."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from octavo.calibration.folder import Calibration
from octavo.calibration.observer import Observed
from octavo.calibration.statistics import Statistics
from octavo.kv_cache.layer import LayerKVCache
from octavo.kv_cache.transformers_cache import QuantizedKVCache, calibrated_scales

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LARGEST = {"fp8": 448.0, "int8": 127.0}
MARGIN = {"fp8": 2.0, "int8": 1.25}
DTYPES = ("bf16", "fp8", "int8")


def model_of(name: str, **changes: Any) -> Any:
    config, cls = MODELS[name]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    sizes |= {"vocab_size": 97, "num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 16}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(1)
    model = cls(config(**{**sizes, **ends, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model


class Emulated(DynamicCache):
    """Rounds what it keeps; a prompt attends to what came."""

    def __init__(self, config: Any, dtype: str, scales: list[tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__(config=config)
        self.dtype, self.found = dtype, dict(enumerate(scales or []))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx not in self.found and self.dtype != "bf16":
            self.found[layer_idx] = tuple(self.scale(x) for x in (key_states, value_states))
        scales = self.found.get(layer_idx, (torch.ones(1), torch.ones(1)))
        rounded = [self.rounded(x, s) for x, s in zip((key_states, value_states), scales, strict=True)]
        alone = super().get_seq_length(layer_idx) == 0 and key_states.shape[2] > 1
        kept = super().update(*rounded, layer_idx, *args, **kwargs)
        return (key_states, value_states) if alone else kept

    def scale(self, x: Tensor) -> Tensor:
        """Per tensor in E4M3, per head in INT8."""
        amax = x.abs().amax((0, 2, 3)) if self.dtype == "int8" else x.abs().amax().view(1)
        return amax * MARGIN[self.dtype] / LARGEST[self.dtype]

    def rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.dtype == "bf16":
            return x.bfloat16().to(x.dtype)
        s = scale.double().view(-1, 1, 1).numpy()
        y = np.clip(x.double().numpy() / s, -LARGEST[self.dtype], LARGEST[self.dtype])
        y = np.rint(y) if self.dtype == "int8" else y.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return torch.from_numpy(y * s).to(x.dtype)


def prompts(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(1, 97, (3, 9))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = mask[2, :1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, inputs: dict[str, Tensor], cache: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """The tokens and the logits [steps, B, V]."""
    settings = {"max_new_tokens": 16, "do_sample": False, **settings}
    made = model.generate(**inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **settings)
    return made.sequences, torch.stack(made.logits)


def check(name: str, dtype: str, padded: bool, scales: Any = None, **settings: Any) -> QuantizedKVCache:
    model, inputs = model_of(name), prompts(padded)
    model.set_attn_implementation("sdpa")
    required, exact = greedy(model, inputs, Emulated(model.config, dtype, scales))
    cache = QuantizedKVCache.for_model(model, 25, dtype, scales=scales, **settings)
    tokens, logits = greedy(model, inputs, cache)
    assert torch.equal(tokens, required)
    assert torch.allclose(logits, exact, atol=2e-4)
    return cache


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_generation_is_that_of_rounded_keys_and_values(name, dtype, padded):
    """Scales are given where there is padding: what that holds depends on the attention, and counts in a warm-up."""
    scales = [(torch.tensor([0.03]), torch.tensor([0.02]))] * 2 if padded and dtype != "bf16" else None
    cache = check(name, dtype, padded, scales)
    assert [int(store.length) for store in cache.stores] == [24, 24]
    assert [store.warming for store in cache.stores] == [False, False]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_rounding_shows(dtype):
    """So that the comparison above can fail."""
    model, inputs = model_of("llama"), prompts(False)
    _, exact = greedy(model, inputs, DynamicCache(config=model.config), max_new_tokens=2)
    _, logits = greedy(model, inputs, QuantizedKVCache.for_model(model, 25, dtype), max_new_tokens=2)
    assert torch.equal(logits[0], exact[0]) or torch.allclose(logits[0], exact[0], atol=1e-4)
    assert (logits[1] - exact[1]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_given_scales(dtype):
    scales = [(torch.tensor([0.02, 0.03]), torch.tensor([0.01])), (torch.tensor([0.04]), torch.tensor([0.02, 0.01]))]
    cache = check("llama", dtype, False, scales)
    assert torch.equal(cache.stores[0].k_scale, scales[0][0])
    assert torch.equal(cache.stores[1].k_scale, scales[1][0].expand(2))
    assert cache.clipped.shape == (2, 2)
    assert int(cache.clipped.sum()) > 0


def test_a_bf16_model_with_a_bf16_cache_is_near_transformers_own():
    model = model_of("llama").bfloat16()
    inputs = prompts(False)
    tokens, exact = greedy(model, inputs, DynamicCache(config=model.config))
    cache = QuantizedKVCache.for_model(model, 25, "bf16")
    with torch.no_grad():
        found = model(**inputs, past_key_values=cache).logits[:, -1:]
        for t in range(9, 24):
            found = torch.cat((found, model(tokens[:, t : t + 1], past_key_values=cache).logits), 1)
    noise = (found.transpose(0, 1).double() - exact.double()).square().mean()
    assert noise <= 3e-4 * exact.double().square().mean()  # 35 dB: what BF16 is good for


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_text_into_a_cache_that_holds_something(dtype):
    model, ids = model_of("llama"), prompts(False)["input_ids"]
    caches = {"sdpa": Emulated(model.config, dtype), "octavo": QuantizedKVCache(model.config, 25, dtype)}
    found = []
    for attention, cache in caches.items():
        model.set_attn_implementation(attention)
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
            found.append(model(ids[:, 4:], past_key_values=cache).logits)
    assert torch.allclose(*found, atol=2e-4)


def test_beams():
    model, inputs = model_of("qwen2"), prompts(True)
    required, _ = greedy(model, inputs, Emulated(model.config, "bf16"), num_beams=3)
    tokens, _ = greedy(model, inputs, QuantizedKVCache.for_model(model, 25, "bf16"), num_beams=3)
    assert torch.equal(tokens, required)


def test_a_cache_serves_again_after_reset_with_the_same_scales():
    model, inputs = model_of("llama"), prompts(False)
    cache = QuantizedKVCache.for_model(model, 25, "fp8")
    greedy(model, prompts(True), cache)
    scale, found = cache.stores[0].k_scale.clone(), []
    for _ in range(2):
        cache.reset()
        found.append(greedy(model, inputs, cache)[1])
    assert torch.equal(*found)
    assert torch.equal(cache.stores[0].k_scale, scale)


def test_a_warm_up_by_hand():
    model, inputs = model_of("llama"), prompts(False)
    cache = QuantizedKVCache.for_model(model, 25, "int8", warm_up="manual")
    with pytest.raises(RuntimeError, match="run a prompt"):
        cache.freeze()
    greedy(model, inputs, cache)
    assert all(store.warming for store in cache.stores)
    assert not cache.clipped.any()
    cache.freeze()
    assert not any(store.warming for store in cache.stores)


def test_compiled_steps_are_one_graph_and_the_same():
    model, ids = model_of("llama"), prompts(False)["input_ids"]
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        cache = QuantizedKVCache.for_model(model, 25, "fp8")
        graphs = CompileCounterWithBackend("aot_eager")
        run = torch.compile(model, fullgraph=True, backend=graphs) if compiled else model
        with torch.no_grad():
            logits = [model(ids, past_key_values=cache).logits[:, -1:]]
            for _ in range(4):
                logits.append(run(input_ids=logits[-1].argmax(-1), past_key_values=cache).logits)
        found.append(torch.cat(logits, 1))
        assert graphs.frame_count == compiled
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("cached", [False, True])
def test_the_attention_without_our_cache_is_that_of_transformers(cached):
    model, inputs = model_of("qwen3"), prompts(True)
    found = []
    for attention in ("sdpa", "octavo"):
        QuantizedKVCache(model.config, 9)  # which registers it
        model.set_attn_implementation(attention)
        if cached:
            found.append(greedy(model, inputs, DynamicCache(config=model.config))[1])
        else:
            with torch.no_grad():
                found.append(model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()])
    assert torch.allclose(*found, atol=2e-4)


# ---- sizes, settings, refusals


def test_bytes_of_the_cache():
    model = model_of("llama")
    sizes = {}
    for dtype in DTYPES:
        cache = QuantizedKVCache.for_model(model, 64, dtype)
        greedy(model, prompts(False), cache, max_new_tokens=1)
        sizes[dtype] = cache.nbytes
    assert sizes["bf16"] == 2 * 2 * 3 * 2 * 64 * 16 * 2
    assert sizes["fp8"] == sizes["int8"] == sizes["bf16"] // 2 + 2 * 2 * 2 * 4


def test_it_holds_no_more_than_it_has_room_for():
    model = model_of("llama")
    cache = QuantizedKVCache.for_model(model, 12)
    with pytest.raises(RuntimeError, match="a cache of 12 tokens is full: it holds 12 and got 1 more"):
        greedy(model, prompts(False), cache)


def test_another_attention_is_refused():
    model = model_of("llama")
    cache = QuantizedKVCache(model.config, 20)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="the attention 'sdpa' cannot read"):
        model(prompts(False)["input_ids"], past_key_values=cache)


@pytest.mark.parametrize("row", [[1] * 8 + [0], [1, 0] + [1] * 7, [0] * 9])
def test_padding_that_is_not_on_the_left_is_refused(row):
    model, inputs = model_of("llama"), prompts(False)
    inputs["attention_mask"][1] = torch.tensor(row)
    cache = QuantizedKVCache.for_model(model, 20)
    with pytest.raises(ValueError, match="padding on the left only"):
        model(**inputs, past_key_values=cache)


def test_a_mask_of_queries_by_keys_is_refused():
    model, inputs = model_of("llama"), prompts(False)
    cache = QuantizedKVCache.for_model(model, 20)
    mask = torch.ones(3, 1, 9, 9).tril().bool()
    with pytest.raises(ValueError, match="two-dimensional attention_mask"), torch.no_grad():
        model(inputs["input_ids"], attention_mask=mask, past_key_values=cache)


def test_a_sliding_window_must_hold_the_cache():
    model = model_of("mistral", sliding_window=20)
    with pytest.raises(ValueError, match="a sliding window of 20 tokens, this cache to all of its 21"):
        QuantizedKVCache.for_model(model, 21)
    inputs = prompts(True)
    required, _ = greedy(model, inputs, Emulated(model.config, "bf16"), max_new_tokens=8)
    tokens, _ = greedy(model, inputs, QuantizedKVCache.for_model(model, 20, "bf16"), max_new_tokens=8)
    assert torch.equal(tokens, required)
    with pytest.raises(ValueError, match="without sliding windows"):
        model(torch.ones(1, 30, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "at least one token"),
        ({"max_tokens": 9, "dtype": "e4m3"}, "unknown dtype 'e4m3'"),
        ({"max_tokens": 9, "warm_up": "never"}, "'prompt' or 'manual', got 'never'"),
        ({"max_tokens": 9, "scales": [(torch.ones(1), torch.ones(1))]}, "2 layers, and scales were given for 1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        QuantizedKVCache(model_of("llama").config, **settings)


def test_layers_that_keep_something_else_are_refused():
    config = model_of("qwen2").config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        QuantizedKVCache(config, 9)


# ---- scales of a calibration


def calibration() -> Calibration:
    observed = {}
    for layer in range(11):
        for kind, name in (("key", "k"), ("value", "v"), ("query", "q")):
            site = f"model.layers.{layer}.self_attn.{name}"
            x = torch.randn(5, 32) * (layer + 1)
            observed[site] = Observed(kind, Statistics(site).update(x))
    return Calibration(observed, "", {}, {}, 5, 5)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_scales_of_a_calibration(dtype, heads):
    found, seen = calibrated_scales(calibration_ := calibration(), dtype, heads=heads), calibration_.sites
    assert list(found) == [f"model.layers.{layer}.self_attn" for layer in range(11)]
    for name, scales in found.items():
        for scale, kind in zip(scales, "kv", strict=True):
            amax = seen[f"{name}.{kind}"].channel_amax.view(heads or 1, -1).amax(1)
            assert torch.allclose(scale, amax / LARGEST[dtype])
    if dtype == "fp8" and heads is None:
        name = "model.layers.3.self_attn"
        assert torch.equal(found[name][0].view(()), calibration_.scale(f"{name}.k"))


def test_scales_by_name_go_to_their_layers():
    scales = {f"model.layers.{i}.self_attn": (torch.tensor([i + 1.0]), torch.tensor([1.0])) for i in (10, 2, 0, 1)}
    scales |= {f"model.layers.{i}.self_attn": (torch.tensor([i + 1.0]), torch.tensor([1.0])) for i in range(3, 10)}
    cache = QuantizedKVCache(model_of("llama", num_hidden_layers=11).config, 9, scales=scales)
    assert [float(layer.settings["scales"][0]) for layer in cache.layers] == [i + 1.0 for i in range(11)]


def test_a_calibration_without_keys_is_refused():
    with pytest.raises(ValueError, match="no keys and values"):
        calibrated_scales(Calibration({}, "", {}, {}, 0, 0))
    with pytest.raises(ValueError, match="'fp8' and 'int8', got 'bf16'"):
        calibrated_scales(calibration(), "bf16")


def test_storage_is_of_the_layer():
    model = model_of("llama")
    cache = QuantizedKVCache.for_model(model, 25, "fp8")
    greedy(model, prompts(False), cache)
    store = cache.stores[0]
    assert isinstance(store, LayerKVCache)
    assert (store.keys.dtype, tuple(store.keys.shape)) == (torch.float8_e4m3fn, (3, 2, 25, 16))
