"""The prefill of transformers' Llama: in BF16, packed, and packed with the attention of the prompt in FP8.

The layers are compiled, without a cache. The engine of `octavo.load` runs the same prompt eagerly, into an FP8 cache
whose scales are known, which is read by the attention in FP8.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from bench.gpu import llama
from bench.gpu import serve_models as models
from bench.gpu.modes import BASE, ENGINE, ENGINE_FP8_ATTENTION, SERVE, SERVE_FP8_ATTENTION
from bench.gpu.timing import decibels, interleaved, summary
from octavo.generation import Engine
from octavo.generation.prompts import pad_prompts
from octavo.kv_cache.fp8_prompts import fp8_prompt_attention
from octavo.models import LlamaConfig
from octavo.runtime.fused import fuse

ATTENTION = "bench_fp8"
SCALE = 0.03  # of keys and values: they are below 13


def prefill(shape: LlamaConfig, layers: int, rounds: int, device: str) -> dict[str, Any]:
    """Milliseconds to the logits of the last token of the context, and their SQNR against BF16's."""
    torch._dynamo.config.recompile_limit = 64
    AttentionInterface.register(ATTENTION, _attention)
    wide = models.build_bf16(replace(shape, layers=layers), device)
    packed = {mode: models.build_fp8(wide, device) for mode in (SERVE, SERVE_FP8_ATTENTION, ENGINE)}
    packed[SERVE_FP8_ATTENTION].set_attn_implementation(ATTENTION)
    for model in packed.values():
        fuse(model)
    ids = torch.randint(0, wide.config.vocab_size, (1, shape.context), device=device)
    compared = {BASE: wide, **{mode: packed[mode] for mode in (SERVE, SERVE_FP8_ATTENTION)}}
    for model in compared.values():
        models.compile_layers(model)
    steps: dict[str, Callable[[], Tensor]] = {
        mode: partial(models.forward, model, ids) for mode, model in compared.items()
    }
    for mode, attention in ((ENGINE, "bf16"), (ENGINE_FP8_ATTENTION, "fp8")):
        steps[mode] = engine_step(packed[ENGINE], ids, attention)
    exact = steps[BASE]()
    db = {mode: decibels(exact, step()) for mode, step in steps.items() if mode != BASE}
    times = interleaved(steps, rounds=rounds, repeat=2, warmup=2)
    return {
        "layers": layers,
        "tokens": shape.context,
        "db": db,
        "ms": {mode: summary(found)["median"] for mode, found in times.items()},
        "rounds": times,
    }


def prefill_llama(layers: int, rounds: int) -> dict[str, Any]:
    """`prefill` of Llama-3-8B's shape, 8,192 tokens."""
    return prefill(llama.CONFIG, layers, rounds, "cuda")


def engine_step(model: Any, ids: Tensor, attention: str) -> Callable[[], Tensor]:
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number  # `serve_models` gives all layers the same
    scales = [(torch.tensor([SCALE]), torch.tensor([SCALE]))] * len(model.model.layers)
    tokens = ids.shape[1]
    engine = Engine(model, context=tokens, kv_cache="fp8", kv_scales=scales, attention=attention)
    session, prompts = engine._new_session(1, tokens), pad_prompts(ids.tolist(), ids.device)
    return partial(torch.no_grad()(session.prefill), prompts)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    return fp8_prompt_attention(q, k, v, scale=scaling).transpose(1, 2), None
