"""What the package refuses: the call, and what its message must say."""

import pytest
import torch
from generation_examples import answers, batch, model_of, pair, prompts
from tiny_models import built
from transformers import DeepseekV3Config, Gemma2Config, MllamaTextConfig, Qwen3NextConfig

import octavo
from octavo.calibration.calibrator import Calibration
from octavo.inference.kv_cache import ModelKVCache, UnservedError
from octavo.inference.sampling import Sampling
from octavo.inference.session import pad_prompts, read_prompts
from octavo.inference.transformers_cache import CACHE, OwnCacheSession, QuantizedKVCache, scales_from_calibration

CPU = torch.device("cpu")
ONE, NONE = torch.ones(1), Calibration({}, "", {}, {}, 0, 0)
FULL, IDS, KV = [1, 1, 1, 1], torch.arange(8).view(2, 4), torch.ones(2, 2, 3, 2, 16)


def layer(dtype: str = "fp8", scales=None, *, requires_grad: bool = False, **settings) -> ModelKVCache:
    """A cache of one layer, which holds nine tokens."""
    cache, k = ModelKVCache(1, 10, dtype, scales=scales and [scales], **settings), torch.ones(2, 3, 9, 16)
    cache.append(0, k.requires_grad_(requires_grad), k)
    return cache


def freeze_nothing() -> None:
    cache = layer(freezes=False)
    cache.reset()
    cache.freeze()


def cache_of(config=None, **settings) -> QuantizedKVCache:
    return QuantizedKVCache(model_of("llama").config if config is None else config, **{"max_tokens": 9} | settings)


def run_with_cache(mask=None, row: list[int] | None = None, attention: str = "octavo", room: int = 20) -> None:
    """A prompt into a cache, with a mask of its own, with a `row` in the mask, or with another attention."""
    model, inputs = model_of("llama"), prompts(False)
    cache = QuantizedKVCache.for_model(model, room)
    model.set_attn_implementation(attention)
    if row is not None:
        inputs["attention_mask"][1] = torch.tensor(row)
    mask = inputs["attention_mask"] if mask is None else mask
    with torch.no_grad():
        model(inputs["input_ids"], attention_mask=mask, **{CACHE: cache})


def masked(row: list[int]) -> None:
    read_prompts(IDS, torch.tensor([FULL, row]), CPU)


def generate(inputs: dict[str, torch.Tensor], **settings) -> None:
    """Nothing of the model runs before the refusal."""
    _, fast = pair("llama")
    fast.model.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    answers(fast, inputs, **settings)


RIGHT = batch() | {"attention_mask": batch(padding=(0, 2))["attention_mask"].flip(1)}
ROWS = {
    # the cache of a layer
    "full": (lambda: layer().append(0, *KV), RuntimeError, "a cache of 10 tokens is full: it holds 9 and got 2 more"),
    "gradients": (lambda: layer(requires_grad=True), RuntimeError, "no_grad"),
    "nothing to freeze": (lambda: ModelKVCache(1, 10).freeze(), RuntimeError, "the warm-up saw no token"),
    "nothing since reset": (freeze_nothing, RuntimeError, "the warm-up saw no token"),
    "dtype": (lambda: layer("fp4"), ValueError, "unknown dtype 'fp4'"),
    "per": (lambda: layer(per="token"), ValueError, "per tensor or per head, got 'token'"),
    "margin": (lambda: layer(margin=0.5), ValueError, "at least 1, got 0.5"),
    "margin nan": (lambda: layer(margin=float("nan")), ValueError, "at least 1"),
    "scales of 2 heads": (lambda: layer(scales=(torch.ones(2), torch.ones(3))), ValueError, "one element or 3"),
    "scale 0": (lambda: layer(scales=(0 * ONE, ONE)), ValueError, "positive and finite"),
    "scale nan": (lambda: layer(scales=(ONE, torch.nan * ONE)), ValueError, "positive and finite"),
    "scales of bf16": (lambda: layer("bf16", scales=(ONE, ONE)), ValueError, "bf16 have no scales"),
    # the cache of a model of transformers
    "no room": (lambda: run_with_cache(room=8), RuntimeError, "a cache of 8 tokens is full: it holds 0 and got 9 more"),
    "sdpa": (lambda: run_with_cache(attention="sdpa"), RuntimeError, "the attention 'sdpa' cannot read"),
    "right": (lambda: run_with_cache(row=[1] * 8 + [0]), ValueError, "padding on the left only"),
    "hole": (lambda: run_with_cache(row=[1, 0] + [1] * 7), ValueError, "padding on the left only"),
    "nothing": (lambda: run_with_cache(row=[0] * 9), ValueError, "padding on the left only"),
    "queries by keys": (lambda: run_with_cache(torch.ones(3, 1, 9, 9).tril().bool()), ValueError, "two-dimensional"),
    "gemma2": (lambda: cache_of(Gemma2Config(sliding_window=99)), UnservedError, r"without a softcap \(attn_logit"),
    "deepseek": (lambda: cache_of(DeepseekV3Config()), UnservedError, r"of one size, and no latents \(kv_lora"),
    "qwen3next": (lambda: cache_of(Qwen3NextConfig()), UnservedError, r"of the kind \['linear_attention'\]"),
    "rwkv": (lambda: OwnCacheSession(built("rwkv")), UnservedError, "takes no cache: octavo.load"),
    "mllama": (lambda: cache_of(MllamaTextConfig()), UnservedError, r"of the kind \['cross_attention'\]"),
    "xlstm": (lambda: OwnCacheSession(built("xlstm")).prefill(pad_prompts([[1], [2, 3]], CPU)), ValueError, "length"),
    "no tokens": (lambda: cache_of(max_tokens=0), ValueError, "at least one token"),
    "dtype of a cache": (lambda: cache_of(dtype="e4m3"), ValueError, "unknown dtype 'e4m3'"),
    "warm-up": (lambda: cache_of(warm_up="never"), ValueError, "'prompt' or 'manual', got 'never'"),
    "scales of 1 layer": (lambda: cache_of(scales=[(ONE, ONE)]), ValueError, "2 layers, and scales were given for 1"),
    "no keys": (lambda: scales_from_calibration(NONE), ValueError, "no keys and values: calibrate again"),
    "no scales": (lambda: scales_from_calibration(NONE, "bf16"), ValueError, "must be 'fp8' or 'int8', got 'bf16'"),
    # prompts
    "mask right": (lambda: masked([1, 1, 0, 0]), ValueError, "left only.*left'"),
    "mask hole": (lambda: masked([0, 1, 0, 1]), ValueError, "left only.*left'"),
    "mask of nothing": (lambda: masked([0, 0, 0, 0]), ValueError, "left only.*left'"),
    "mask of one row": (lambda: read_prompts(IDS, torch.tensor([FULL]), CPU), ValueError, "left only.*left'"),
    "no prompt": (lambda: pad_prompts([], CPU), ValueError, "got none"),
    "empty prompt": (lambda: pad_prompts([[1], []], CPU), ValueError, "prompt 2 of 2 is empty"),
    "length 0": (lambda: read_prompts(IDS[:, :0], None, CPU), ValueError, "at least one token"),
    "no rows": (lambda: read_prompts(IDS[:0], None, CPU), ValueError, r"required, got input_ids of shape \[0, 4\]"),
    # generation
    "too many tokens": (lambda: generate(batch(length=120)), ValueError, "a prompt of 120 it can generate 9 more"),
    "too long a prompt": (lambda: generate(batch(length=130), max_new_tokens=1), ValueError, "the prompt has 130"),
    "unknown setting": (lambda: generate(batch(), no_such_setting=1), ValueError, "no_such_setting"),
    "wrong setting": (lambda: generate(batch(), temperature=-1.0, do_sample=True), ValueError, "temperature"),
    "padding": (lambda: generate(RIGHT), ValueError, r"row 1 of attention_mask \[3, 11\] .* 'left'"),
    "dtype of generate": (lambda: pair("llama", kv_cache="fp4"), ValueError, "unknown dtype 'fp4' of keys and values"),
    "attention of generate": (lambda: pair("llama", attention="fp4"), ValueError, "one of bf16, fp8, got 'fp4'"),
    "dtype of load": (lambda: octavo.load("no folder", kv_cache="fp4"), ValueError, "unknown dtype 'fp4'"),
    "head of load": (lambda: octavo.load("no folder", head="fp8"), ValueError, "one of bf16, rowwise, got 'fp8'"),
    "attention of load": (lambda: octavo.load("no folder", attention="fp4"), ValueError, "one of bf16, fp8, got 'fp4'"),
    # draws
    "temperature": (lambda: Sampling(temperature=-0.1), ValueError, "temperature must be 0 or more, got -0.1"),
    "temperature nan": (lambda: Sampling(temperature=float("nan")), ValueError, "temperature must be"),
    "temperature inf": (lambda: Sampling(temperature=float("inf")), ValueError, "temperature must be"),
    "top_k": (lambda: Sampling(top_k=-1), ValueError, "top_k must be 0 or more, got -1"),
    "top_p": (lambda: Sampling(top_p=0.0), ValueError, "top_p must be above 0 and at most 1, got 0.0"),
    "top_p above 1": (lambda: Sampling(top_p=1.01), ValueError, "top_p must be"),
    "penalty": (lambda: Sampling(repetition_penalty=0.0), ValueError, "repetition_penalty must be above 0, got 0.0"),
    "seed": (lambda: Sampling(seed=-1), ValueError, "seed must be from 0 to 2"),
}


@pytest.mark.parametrize("row", ROWS)
def test_it_is_refused(row: str) -> None:
    call, error, message = ROWS[row]
    with pytest.raises(error, match=message):
        call()
