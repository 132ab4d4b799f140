"""Serving Llama-3-8B's shape on one GPU: BF16 compiled, torchao's dynamic row-wise FP8, and packed models.

The weights are random, made and packed on the GPU. Layers are compiled, all modes take turns in one process, and their
logits are compared with BF16's first. A decoding step is one token of each text, the last that the cache has room for,
as a CUDA graph that is captured by hand.

    serve       the logits of fused layers; the bytes of the weights; decode at a context of 1,024, for 1 and 64 texts,
                with BF16 and FP8 caches; prefill of 8,192 tokens to the logits of the last; the GEMM of small M alone
    kv-cache    decoding with keys and values in BF16, E4M3 and INT8: the attention alone, over contexts and batches,
                beside a copy of as many bytes as the cache has, and beside PyTorch's attention over BF16, which reads
                the cache unchanged (gqa) or expanded to the heads of the queries; then whole steps of a packed model
                with batch 8 and a context of 32,768 tokens

Each part is printed and written when it is done.

    python -m bench.gpu.serve [--only kv-cache] [--layers 32]
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

from bench.gpu import harness, llama, modes
from bench.gpu import serve_models as models
from bench.gpu.harness import DEVICE, Options, Result, Results, Step, benchmark, sized
from bench.gpu.kernels import copy_ms
from bench.gpu.llama import GEMMS, SHAPES, TOKENS
from octavo.checkpoint.scheme import CHANNEL, WEIGHT
from octavo.inference.engine import Engine
from octavo.inference.kv_cache import DTYPES, LayerKVCache, fp8_prompt_attention
from octavo.inference.packed_linear import fuse
from octavo.inference.session import pad_prompts
from octavo.models import LlamaConfig
from octavo.numerics import ROW, Cast, QTensor
from octavo.ops import find_backend, quantize
from octavo.ops.attention import widened_attention
from octavo.ops.launching import Cache, Operands
from octavo.ops.library_gemms import scaled_mm_cublaslt

CONTEXT, BATCHES = sized(1024, 16), sized((1, 64), (1, 4))
ROWS = sized((1, 8, 16, 32, 64, 128), (1, 16))
HEADS, KV_HEADS, DIM = llama.CONFIG.heads, llama.CONFIG.kv_heads, llama.CONFIG.head_dim
CACHE_CONTEXTS, CACHE_BATCHES = sized((2048, 4096, 8192, 16384, 32768), (256,)), (1, 8)
LONG_CONTEXT, LONG_BATCH = sized(32768, 256), 8  # of the whole steps over caches
ATTENTION = "bench_fp8"
SCALE = 0.03  # of keys and values: they are below 13
Sections = Iterator[tuple[str, Any]]


def serve(layers: int) -> Sections:
    wide = models.build_bf16(replace(llama.CONFIG, layers=layers), DEVICE)
    packed = models.build_fp8(wide, DEVICE, fused=False)
    check(wide, packed)
    yield "memory", memory(wide, packed)
    for batch in BATCHES:
        yield f"decode {batch}", decode(wide, packed, batch, CONTEXT)
    yield "prefill", prefill(wide, packed)
    yield "kernels", [gemm(m, n, k) for n, k in SHAPES for m in ROWS]


def kv_cache(layers: int) -> Sections:
    yield "attention", [row for batch in CACHE_BATCHES for n in CACHE_CONTEXTS for row in attention(batch, n)]
    yield "decode", decode_caches(layers)


SECTIONS: dict[str, Callable[[int], Sections]] = {"serve": serve, "kv-cache": kv_cache}


def tokens(model: Any, batch: int, length: int = 1) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, length), device=model.device)


# --- The parts of serve ----------------------------------------------------------------------------------------


def check(wide: Any, packed: Any) -> None:
    """Fuse the packed model. Its logits, before and after, must be near BF16's, and those near transformers' own."""
    ids = tokens(wide, 4, 64)
    exact, apart = models.forward(wide, ids), models.forward(packed, ids)
    with torch.no_grad():
        theirs = wide(ids, use_cache=False, logits_to_keep=1).logits[:, 0]
    harness.each_decibels([theirs], [exact], 40)
    fuse(packed)
    harness.each_decibels([exact, apart], [models.forward(packed, ids)] * 2, 10)


def memory(wide: Any, packed: Any) -> dict[str, dict[str, int]]:
    """Bytes of the linear layers, the head aside, and of the whole model."""
    return {
        name: {"linears": models.held(model, linears=True), "model": models.held(model, linears=False)}
        for name, model in (("bf16", wide), ("ours", packed))
    }


def decode(wide: Any, packed: Any, batch: int, context: int) -> Result:
    """Decoding steps of BF16, and of the packed model with caches in BF16 and in FP8."""
    ids = tokens(wide, batch)
    stores = models.random_stores(wide.config, batch, context, DEVICE, "bf16", "fp8")
    plain = list(map(models.PlainCache, stores["bf16"]))
    torch._dynamo.reset()
    steps: dict[str, Step] = {}
    for name, model in ((modes.BASE, wide), (modes.SERVE, packed)):
        models.compile_layers(model)
        steps[name] = captured(model, ids, plain)
    attention = packed.config._attn_implementation
    steps[modes.SERVE_FP8_CACHE] = captured(packed, ids, models.octavo_caches(packed, stores["fp8"]))
    packed.set_attn_implementation(attention)  # for the measurements after this one
    backend = " and ".join(sorted({runs(batch, n) for n, _ in GEMMS.values()}))
    found = harness.turns(modes.BASE, steps, rounds=8, repeat=8, warmup=2)
    return {"batch": batch, "context": context, "gemm": backend, **found}


def captured(model: Any, ids: Tensor, caches: Any) -> Step:
    """A decoding step of the model as a CUDA graph."""
    return harness.captured(partial(models.forward, model, ids, caches))


def runs(m: int, n: int) -> str:
    """The backend that octavo chooses for a GEMM of m rows and n columns."""
    return find_backend(torch.device(DEVICE), ROW, ROW, ("e4m3", "e4m3"), (m, n)).name


def weight_only_step(layers: int) -> Result:
    """A decoding step of one text: BF16, W8A8 and weight-only; and weight-only in eager code."""
    wide = models.build_bf16(replace(llama.CONFIG, layers=layers), DEVICE)
    ids = tokens(wide, 1)
    caches = list(map(models.PlainCache, models.random_stores(wide.config, 1, CONTEXT, DEVICE, "bf16")["bf16"]))
    schemes = {modes.W8A8: CHANNEL, modes.WEIGHT_ONLY: WEIGHT}
    packed = {name: models.build_fp8(wide, DEVICE, scheme) for name, scheme in schemes.items()}
    steps: dict[str, Step] = {modes.WEIGHT_ONLY_EAGER: captured(packed[modes.WEIGHT_ONLY], ids, caches)}
    for name, model in {modes.BASE: wide, **packed}.items():
        models.compile_layers(model)
        steps[name] = captured(model, ids, caches)
    return {"context": CONTEXT, **harness.turns(modes.BASE, steps, rounds=8, repeat=8, warmup=2)}


# --- Prompts ---------------------------------------------------------------------------------------------------


def prefill(wide: Any, packed: Any) -> Result:
    ids = tokens(wide, 1, TOKENS)
    torch._dynamo.reset()
    compared = {modes.BASE: wide, modes.SERVE: packed}
    if harness.installed("torchao"):
        compared[modes.SERVE_TORCHAO] = models.build_torchao(wide, DEVICE)
    for model in compared.values():
        models.compile_layers(model)
    steps: dict[str, Step] = {name: partial(models.forward, model, ids) for name, model in compared.items()}
    steps[modes.SERVE_GRAPH] = harness.captured(steps[modes.SERVE])
    return {"tokens": TOKENS, **harness.turns(modes.BASE, steps, rounds=6, repeat=2, warmup=2)}


def prefill_fp8_attention(shape: LlamaConfig) -> Result:
    """The prefill of a Llama in BF16, packed, and packed with the attention of the prompt in FP8.

    The layers are compiled, without a cache. The engine of `octavo.load` runs the same prompt eagerly, into an FP8
    cache whose scales are known, which is read by the attention in FP8.
    """
    AttentionInterface.register(ATTENTION, _attention)
    wide = models.build_bf16(shape, DEVICE)
    packed = {mode: models.build_fp8(wide, DEVICE) for mode in (modes.SERVE, modes.SERVE_FP8_ATTENTION, modes.ENGINE)}
    packed[modes.SERVE_FP8_ATTENTION].set_attn_implementation(ATTENTION)
    ids = tokens(wide, 1, shape.context)
    compared = {modes.BASE: wide, **{mode: packed[mode] for mode in (modes.SERVE, modes.SERVE_FP8_ATTENTION)}}
    for model in compared.values():
        models.compile_layers(model)
    steps: dict[str, Step] = {mode: partial(models.forward, model, ids) for mode, model in compared.items()}
    model = packed[modes.ENGINE]
    scales = [(torch.tensor([SCALE]), torch.tensor([SCALE]))] * len(model.model.layers)
    prompts = pad_prompts(ids.tolist(), ids.device)
    for mode, attention in ((modes.ENGINE, "bf16"), (modes.ENGINE_FP8_ATTENTION, "fp8")):
        engine = Engine(model, context=ids.shape[1], kv_cache="fp8", kv_scales=scales, attention=attention)
        steps[mode] = partial(torch.no_grad()(engine._new_session(1, ids.shape[1]).prefill), prompts)
    found = harness.turns(modes.BASE, steps, rounds=8, repeat=2, warmup=2)
    ms = harness.medians(found["rounds"])
    return {"layers": shape.layers, "tokens": shape.context, "db": found["sqnr"], "ms": ms, "rounds": found["rounds"]}


def _attention(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **__: Any) -> tuple[Tensor, None]:
    return fp8_prompt_attention(q, k, v, scale=scaling).transpose(1, 2), None


# --- The GEMM alone --------------------------------------------------------------------------------------------


def gemm(m: int, n: int, k: int) -> Result:
    """Microseconds of our kernel, of cuBLASLt, of BF16, and of a copy of the FP8 bytes, at one shape."""
    from octavo.ops.kernels.gemm import scaled_mm as scaled_mm_triton  # Triton is not everywhere that this file is read

    x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
    count = harness.beyond_cache(n, k)
    wide = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
    a, bs = quantize(x, Cast()), [quantize(w, Cast()) for w in wide]

    def ours(b: QTensor) -> Tensor:
        return scaled_mm_triton(Operands.of(a, b), None, torch.bfloat16, True)

    def native(b: QTensor) -> Tensor:
        return scaled_mm_cublaslt(Operands.of(a, b), None, torch.bfloat16, True)

    y, exact = ours(bs[0]), (a.data.double() * a.scale) @ (bs[0].data.double() * bs[0].scale).t()
    harness.each_decibels([exact], [y], 40)
    moved = count * (n * k + 4 * n + m * (k + 4 + 2 * n))
    times = {
        "us": harness.in_turn(ours, bs),
        "cublaslt_us": harness.in_turn(native, bs),
        "bf16_us": harness.in_turn(lambda w: x @ w.t(), wide),
    }
    copy = 1e3 * copy_ms(moved) / count
    return {"m": m, "n": n, "k": k, **times, "copy_us": copy, "share": copy / times["us"], "runs": runs(m, n)}


# --- Caches ----------------------------------------------------------------------------------------------------


def attention(batch: int, context: int) -> Iterator[Result]:
    """Times of each dtype and of PyTorch at one size."""
    q = torch.randn(batch, HEADS, 1, DIM, device=DEVICE, dtype=torch.bfloat16) * 2
    k, v = (torch.randn(batch, KV_HEADS, context, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    moved = {dtype: 2 * k.numel() * DTYPES[dtype].itemsize for dtype in DTYPES}
    for dtype in DTYPES:
        cache = models.filled(dtype, k, v)
        check_cache(q, cache)
        yield row(f"ours, {dtype}", batch, context, partial(cache.attend, q), moved[dtype])
        del cache
    yield row("torch, bf16, gqa", batch, context, partial(sdpa, q, k, v), moved["bf16"])
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    yield row("torch, bf16, expanded", batch, context, partial(sdpa, q, k, v), moved["bf16"])


def row(name: str, batch: int, context: int, run: Step, moved: int) -> Result:
    """Microseconds of one way, beside a copy that moves the bytes of an unexpanded cache of its dtype."""
    ms, copy = harness.replayed(run), copy_ms(moved)
    return {"way": name, "batch": batch, "context": context, "us": 1e3 * ms, "copy_us": 1e3 * copy, "share": copy / ms}


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def check_cache(q: Tensor, cache: LayerKVCache) -> None:
    """The kernel against PyTorch in float32 over the same bytes; a wrong one ends the benchmark."""
    found = cache.attend(q, None, DIM**-0.5)[:1]
    held = Cache(cache.keys[:1], cache.values[:1], cache.k_scale, cache.v_scale, cache.length)
    exact = widened_attention(q[:1].float(), held, None, DIM**-0.5)
    harness.each_decibels([exact], [found], 40)


def decode_caches(layers: int) -> Result:
    """Whole steps over a long context, by cache."""
    wide = models.build_bf16(replace(llama.CONFIG, layers=layers), DEVICE)
    model = models.build_fp8(wide, DEVICE)
    del wide
    torch.cuda.empty_cache()  # the caches below take 52 GB
    models.compile_layers(model)
    ids = tokens(model, LONG_BATCH)
    stores = models.random_stores(model.config, LONG_BATCH, LONG_CONTEXT, DEVICE, "bf16", "fp8")
    steps: dict[str, Step] = {modes.CACHE_TORCH: captured(model, ids, list(map(models.PlainCache, stores["bf16"])))}
    for name, dtype in ((modes.CACHE_BF16, "bf16"), (modes.CACHE_FP8, "fp8")):
        steps[name] = captured(model, ids, models.octavo_caches(model, stores[dtype]))
    found = harness.turns(modes.CACHE_BF16, steps, rounds=8, repeat=4, warmup=2)
    by_mode = harness.rows_of(found["rounds"], modes.CACHE_BF16).items()
    rows = [{"mode": name, **ms, "tokens_per_second": 1e3 * LONG_BATCH / ms["median"]} for name, ms in by_mode]
    sizes = {dtype: sum(store.nbytes for store in each) for dtype, each in stores.items()}
    facts = {"batch": LONG_BATCH, "context": LONG_CONTEXT, "layers": layers}
    return {**facts, "modes": rows, "sqnr": found["sqnr"], "bytes": sizes}


@benchmark(layers=llama.CONFIG.layers, only="")
def main(options: Options) -> Results:
    torch.manual_seed(0)
    for part, name, facts in (("serve", "gpu_serve", {"layers": options.layers}), ("kv-cache", "gpu_kv_cache", {})):
        result: Result = dict(facts)
        for section, found in SECTIONS[part](options.layers) if options.only in ("", part) else ():
            result[section] = found
            yield name, result
            harness.allocated()  # frees what the section held
