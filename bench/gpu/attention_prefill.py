"""The prefill of transformers' Llama: in BF16, packed, and packed with the attention of the prompt in FP8."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from bench.gpu import llama
from bench.gpu import serve_models as models
from bench.gpu.llama import TOKENS
from bench.gpu.modes import BASE, SERVE, SERVE_FP8_ATTENTION
from bench.gpu.timing import decibels, interleaved, summary
from octavo.kv_cache.fp8_prompts import fp8_prompt_attention
from octavo.runtime.fused import fuse

ATTENTION = "bench_fp8"


def prefill(layers: int, rounds: int) -> dict[str, Any]:
    """Milliseconds to the logits of the last of `TOKENS` tokens, and their SQNR against BF16's."""
    torch._dynamo.config.recompile_limit = 64
    AttentionInterface.register(ATTENTION, _attention)
    wide = models.build_bf16(replace(llama.CONFIG, layers=layers), "cuda")
    compared = {BASE: wide, SERVE: models.build_fp8(wide, "cuda"), SERVE_FP8_ATTENTION: models.build_fp8(wide, "cuda")}
    compared[SERVE_FP8_ATTENTION].set_attn_implementation(ATTENTION)
    for mode in (SERVE, SERVE_FP8_ATTENTION):
        fuse(compared[mode])
    ids = torch.randint(0, wide.config.vocab_size, (1, TOKENS), device="cuda")
    for model in compared.values():
        models.compile_layers(model)
    steps = {mode: partial(models.forward, model, ids) for mode, model in compared.items()}
    exact = steps[BASE]()
    db = {mode: decibels(exact, step()) for mode, step in steps.items() if mode != BASE}
    times = interleaved(steps, rounds=rounds, repeat=2, warmup=2)
    return {
        "layers": layers,
        "tokens": TOKENS,
        "db": db,
        "ms": {mode: summary(found)["median"] for mode, found in times.items()},
        "rounds": times,
    }


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    return fp8_prompt_attention(q, k, v, scale=scaling).transpose(1, 2), None
