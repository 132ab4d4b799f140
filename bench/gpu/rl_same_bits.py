"""What the mode of the same bits costs, at Qwen3-0.6B's shape with random weights: decoding, and steps of training.

Rollouts are timed too: texts sampled by the served model, and by transformers' `generate` of the model in BF16, which
TRL calls by default. Kernels are compiled in several threads first. All takes less than a minute on an H200, and the
file is written after each part.

With --parity only this: `octavo.rl.parity` of Llamas of eight layers, whose random weights have the deviation 0.06, in
the default mode and in that of the same bits; the mean over `SEEDS`. It runs on a CPU too, in two minutes.

    python -m bench.gpu.rl_same_bits [--parity]
"""

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

import octavo
from bench.gpu.harness import DEVICE, Options, Results, benchmark, kernels_of, show, sized
from bench.gpu.rl import HEADS, SHAPES, live, trained
from octavo.inference.session import PIECE
from octavo.inference.transformers_generate import accelerate_generate
from octavo.ops import index_of_largest
from octavo.ops.launching import compile_only
from octavo.rl import parity, push, same_bits

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
SIZES: dict[str, Any] = {**HEADS, **sized(SHAPES["0.6b"], SMALL), "tie_word_embeddings": True}
BATCHES, PROMPT, NEW, TOKENS = sized((1, 64), (1,)), sized(256, 8), sized(128, 4), sized((4, 2048), (2, 16))
DEEP = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}  # fmt: skip
TEXTS, SEEDS = sized((4, 24), (2, 12)), range(sized(5, 2))


def rollouts(model: Any, served: Any) -> dict[str, Any]:
    """Milliseconds of sampling texts by transformers and by the served model."""
    found = {}
    for name, each in {"transformers": model, "served": served}.items():
        generate(each, BATCHES[-1], 4)
        found[name] = timed(partial(generate, each, BATCHES[-1], NEW))
        show(f"rollouts by {name}: {found[name]:.0f} ms")
    sizes = {"texts": BATCHES[-1], "prompt": PROMPT, "new": NEW}
    return {**sizes, **found, "speed": found["transformers"] / found["served"]}


def measured(model: Any, served: Any) -> dict[str, float]:
    """Milliseconds of a decoding step by batch, of a forward pass, and of a step of training."""
    ids = torch.randint(SIZES["vocab_size"], TOKENS, device=DEVICE)
    with compile_only(), torch.no_grad():
        pieces = [(served, b, n) for b in BATCHES for n in (1, min(PROMPT, PIECE // b))]
        for each, batch, length in ((model, *TOKENS), *pieces):
            each(torch.zeros(batch, length, dtype=torch.int64, device=DEVICE), use_cache=False)
    calls: dict[str, Callable[[], float]] = {f"decode {b}": partial(decode, served, b) for b in BATCHES}
    calls["forward"] = partial(timed, lambda: model(ids, use_cache=False))
    calls["step"] = partial(timed, lambda: model(ids, use_cache=False).logits.mean().backward())
    found = {}
    for name, call in calls.items():
        call()  # compiles what is left, captures and warms up
        found[name] = statistics.median(call() for _ in range(3))
        show(f"{name}: {found[name]:.4g} ms")
    return found


def distances() -> dict[str, Any]:
    """The KL of the next token, in nats, of forward passes from the engine's decoding: None where the mode refuses."""
    sizes: dict[str, Any] = sized(DEEP, DEEP | SMALL)
    config = LlamaConfig(**sizes, initializer_range=0.06, tie_word_embeddings=True, eos_token_id=None)
    runs, rows = [distances_of(config, seed) for seed in SEEDS], []
    for name in runs[0]:
        kls, same = ([run[name][i] for run in runs] for i in range(2))
        mean, deviation = statistics.mean(kls), statistics.stdev(kls)
        bits = None if None in same else max(same)
        rows.append({"models": name, "default": mean, "deviation": deviation, "same_bits": bits})
    show(*rows)
    return {"texts": TEXTS, "seeds": len(SEEDS), "weights": config.initializer_range, **sizes, "rows": rows}


def distances_of(config: LlamaConfig, seed: int) -> dict[str, Any]:
    """The KL of one model, in the default mode and in that of the same bits, by the names of what is compared."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    ids = torch.randint(config.vocab_size, TEXTS, device=DEVICE, generator=generator)
    wide, (own, packed) = trained(config, seed), (live(config) for _ in range(2))
    for served in (own, packed):
        push(wide, served)
    converted = copy.deepcopy(wide)
    octavo.restore(wide)
    bf16 = copy.deepcopy(wide)
    accelerate_generate(bf16, 4096)
    found: dict[str, Any] = {"BF16, its forward pass and its generate": (parity(wide, bf16, ids).kl, None)}
    models = {"packed, its forward pass and its generate": own, "converted, and its packed folder": converted}
    for name, model in models.items():
        kl = parity(model, packed, ids).kl
        with same_bits(model, packed):
            found[name] = kl, parity(model, packed, ids).kl
    return found | {"BF16, and its packed folder": (parity(wide, packed, ids).kl, None)}


def generate(model: Any, batch: int, new: int) -> Tensor:
    ids = torch.ones(batch, PROMPT, dtype=torch.int64, device=DEVICE)
    made: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return made


def decode(served: Any, batch: int) -> float:
    """Milliseconds of a step: of a text of `NEW` tokens less that of one, divided."""
    return (timed(lambda: generate(served, batch, NEW)) - timed(lambda: generate(served, batch, 1))) / (NEW - 1)


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of a call, whose results have been read."""
    start = time.perf_counter()
    call()
    torch.zeros(1, device=DEVICE).item()
    return (time.perf_counter() - start) * 1e3


@benchmark(parity=False)
def main(options: Options) -> Results:
    if options.parity:
        yield f"{'gpu' if DEVICE == 'cuda' else 'cpu'}_rl_parity", distances()
        return
    model, served = trained(config := Qwen3Config(**SIZES)), live(config)
    push(model, served)
    octavo.restore(model)
    result: dict[str, Any] = {"rows": [], "rollouts": rollouts(model, served)}
    yield "gpu_rl_same_bits", result
    octavo.convert(model.train(), "rowwise_forward")
    outside = measured(model, served)
    with same_bits(model, served):
        inside = measured(model, served)
        texts = generate(served, 2, NEW)
        with torch.no_grad():
            logits = model(texts).logits[:, PROMPT - 1 : -1].float()
        assert torch.equal(index_of_largest(logits.flatten(0, 1)), texts[:, PROMPT:].flatten())
        for batch in BATCHES:
            generate(served, batch, 4)
            show(f"kernels of decoding {batch}", kernels_of(partial(generate, served, batch, 4), 1)[:12])
    result["rows"] = [{"work": name, "outside": ms, "inside": inside[name], "speed": ms / inside[name]}
                      for name, ms in outside.items()]  # fmt: skip
    show(*result["rows"])
    yield "gpu_rl_same_bits", result
