"""A decoding step of a Llama as a CUDA graph that is captured by hand: the layers compiled, no loop around it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu import serve_models as models
from bench.gpu.llama import GEMMS
from bench.gpu.modes import BASE, SERVE, SERVE_FP8_CACHE
from bench.gpu.timing import Captured, against, interleaved, summary
from octavo.numerics import ROW
from octavo.ops import find_backend

Step = Callable[[], Tensor]


def decode(wide: Any, packed: Any, batch: int, context: int) -> dict[str, Any]:
    """One token of each of `batch` texts, which is the last that the cache has room for, as CUDA graphs."""
    ids = torch.randint(0, wide.config.vocab_size, (batch, 1), device="cuda")
    stores = models.random_stores(wide.config, batch, context, "cuda", "bf16", "fp8")
    plain = [models.PlainCache(store) for store in stores["bf16"]]
    torch._dynamo.reset()
    steps: dict[str, Step] = {}
    for name, model in ((BASE, wide), (SERVE, packed)):
        models.compile_layers(model)
        steps[name] = Captured(partial(models.forward, model, ids, context - 1, plain))
    attention = packed.config._attn_implementation
    steps[SERVE_FP8_CACHE] = Captured(
        partial(models.forward_again, packed, ids, context - 1, models.octavo_caches(packed, stores["fp8"]))
    )
    packed.set_attn_implementation(attention)  # for the measurements after this one
    quality = against(BASE, steps)
    times = interleaved(dict(steps), rounds=8, repeat=8, warmup=2)
    backend = " and ".join(sorted({runs(batch, n) for n, _ in GEMMS.values()}))
    ms = {name: summary(t) for name, t in times.items()}
    return {"batch": batch, "context": context, "gemm": backend, "sqnr": quality, "ms": ms}


def runs(m: int, n: int) -> str:
    """The backend that octavo chooses for a GEMM of m rows and n columns."""
    return find_backend(torch.device("cuda"), ROW, ROW, ("e4m3", "e4m3"), (m, n)).name
