"""Reinforcement learning with a model in training and a live one: pushes, the mode of the same bits, and parity.

push        seconds and memory of `octavo.rl.push`, at shapes of Qwen3 with random weights in BF16, recipe rowwise,
            scheme channel. Seconds are the wall clock's and include the checksum, which waits for the device; the
            checksum is timed alone too. `beyond` is the memory that a push takes beside both models. First a small
            live model, whose decoding steps are captured, must give the tokens of a folder that is packed and
            loaded afresh, and so after 1,000 pushes, which may not add a byte
same-bits   what this mode costs at Qwen3-0.6B's shape: decoding, and steps of training. Rollouts are timed too:
            texts sampled by the served model, and by transformers' `generate` of the model in BF16, which TRL calls
            by default. Kernels are compiled in several threads first. It takes less than a minute on an H200, and
            the file is written after each part
parity      `octavo.rl.parity` of Llamas of eight layers, whose random weights have the deviation 0.06, in the
            default mode and in that of the same bits; the mean over `SEEDS`. It runs on a CPU too, in two minutes

python -m bench.gpu.rl [--only push]
"""

import copy
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

import octavo
from bench.gpu.harness import DEVICE, Options, Results, allocated, benchmark, once, peak_of, sized
from octavo.checkpoint.scheme import CHANNEL
from octavo.hf.meta_model import quiet_transformers
from octavo.inference.packed_linear import fuse, swap_linears
from octavo.inference.session import PIECE
from octavo.inference.transformers_generate import accelerate_generate
from octavo.ops import index_of_largest
from octavo.ops.launching import compile_only
from octavo.packing import pack
from octavo.rl import checksum, parity, push, same_bits

HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": sized(151936, 256), "eos_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
CHECKED = {**HEADS, **SHAPES["0.6b"], "num_hidden_layers": 2, "vocab_size": 4096, "tie_word_embeddings": True}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
SIZES: dict[str, Any] = {**HEADS, **sized(SHAPES["0.6b"], SMALL), "tie_word_embeddings": True}
BATCHES, PROMPT, NEW, TOKENS = sized((1, 64), (1,)), sized(256, 8), sized(128, 4), sized((4, 2048), (2, 16))
DEEP = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}  # fmt: skip
TEXTS, SEEDS = sized((4, 24), (2, 12)), range(sized(5, 2))


def trained(config: PretrainedConfig, seed: int = 0) -> Any:
    """A converted model with random weights in BF16."""
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    octavo.convert(model, "rowwise")
    return model


def live(config: PretrainedConfig) -> Any:
    """A live model without a folder, as `octavo.load` makes it; its weights are whatever lies in the memory."""
    model: Any = octavo.restore(made := trained(config)) and made
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    swap_linears(model.requires_grad_(False), dict.fromkeys(names, CHANNEL))
    fuse(model)
    accelerate_generate(model, 4096)
    return model


def generate(model: Any, ids: Tensor, new: int) -> Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)


def tokens(model: Any) -> Tensor:
    return generate(model, torch.arange(32, device=DEVICE).view(2, 16), sized(64, 4))


# --- Pushes ----------------------------------------------------------------------------------------------------


def check(count: int) -> dict[str, Any]:
    """Bytes that `count` pushes add; an error if what is generated then is not what a new folder gives."""
    config = Qwen3Config(**CHECKED)
    with tempfile.TemporaryDirectory() as root, quiet_transformers():
        first, model = trained(config, 1), trained(config, 2)
        for name, each in (("first", first), ("second", model)):
            each.save_pretrained(Path(root) / name)
            pack(Path(root) / name, Path(root) / f"{name} packed")
        served, afresh = (octavo.load(Path(root) / f"{name} packed", DEVICE) for name in ("first", "second"))
    before = [tokens(served) for _ in range(3)][-1]  # the steps are captured now
    push(model, served)
    expected = tokens(afresh)
    assert torch.equal(tokens(served), expected)
    assert not torch.equal(before, expected)
    held = allocated()
    for i in range(count):
        pushed = push(first if i % 2 == 0 and i < count - 1 else model, served)
    grown = allocated() - held
    assert pushed.checksum == checksum(served) == checksum(afresh)
    assert torch.equal(tokens(served), expected)
    assert grown == 0
    return {"pushes": count}


def pushes(config: Qwen3Config, count: int) -> dict[str, Any]:
    """Seconds of pushes and of checksums, and memory beside both models."""
    model, served = trained(config), live(config)
    pushed = push(model, served)  # compiles the kernels
    held, seconds, sums = allocated(), [], []
    for _ in range(count):
        seconds.append(push(model, served).seconds)
        sums.append(once(partial(checksum, served), 1) / 1e3)
    beyond = peak_of(partial(push, model, served), held, warmup=0)
    figures = {"seconds": statistics.median(seconds), "checksum_seconds": statistics.median(sums), "each": seconds}
    return {"layers": config.num_hidden_layers, "bytes": pushed.bytes, **figures, "beyond": beyond}


# --- The mode of the same bits ----------------------------------------------------------------------------------


def rollouts(model: Any, served: Any) -> dict[str, Any]:
    """Milliseconds of sampling texts by transformers and by the served model."""
    found = {}
    for name, each in {"transformers": model, "served": served}.items():
        sample(each, BATCHES[-1], 4)
        found[name] = once(partial(sample, each, BATCHES[-1], NEW), 1)
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
    calls["forward"] = partial(once, lambda: model(ids, use_cache=False), 1)
    calls["step"] = partial(once, lambda: model(ids, use_cache=False).logits.mean().backward(), 1)
    found = {}
    for name, call in calls.items():
        call()  # compiles what is left, captures and warms up
        found[name] = statistics.median(call() for _ in range(3))
    return found


def sample(model: Any, batch: int, new: int) -> Tensor:
    return generate(model, torch.ones(batch, PROMPT, dtype=torch.int64, device=DEVICE), new)


def decode(served: Any, batch: int) -> float:
    """Milliseconds of a step: of a text of `NEW` tokens less that of one, divided."""
    return (once(lambda: sample(served, batch, NEW), 1) - once(lambda: sample(served, batch, 1), 1)) / (NEW - 1)


def costs() -> Results:
    """Rollouts, then decoding and steps of training outside of the mode and inside."""
    model, served = trained(config := Qwen3Config(**SIZES)), live(config)
    push(model, served)
    octavo.restore(model)
    result: dict[str, Any] = {"rows": [], "rollouts": rollouts(model, served)}
    yield "gpu_rl_same_bits", result
    octavo.convert(model.train(), "rowwise_forward")
    outside = measured(model, served)
    with same_bits(model, served):
        inside = measured(model, served)
        texts = sample(served, 2, NEW)
        with torch.no_grad():
            logits = model(texts).logits[:, PROMPT - 1 : -1].float()
        assert torch.equal(index_of_largest(logits.flatten(0, 1)), texts[:, PROMPT:].flatten())
    result["rows"] = [{"work": name, "outside": ms, "inside": inside[name], "speed": ms / inside[name]}
                      for name, ms in outside.items()]  # fmt: skip
    yield "gpu_rl_same_bits", result


# --- Parity ----------------------------------------------------------------------------------------------------


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


@benchmark(only=("push", "same-bits", "parity"))
def main(options: Options) -> Results:
    if options.only in (None, "push"):
        result: dict[str, Any] = {"check": check(sized(1000, 3)), "shapes": []}
        for name in sized(("0.6b", "8b"), ("0.6b",)):
            shape = HEADS | SHAPES[name] | sized({}, {"num_hidden_layers": 1}) | {"tie_word_embeddings": name == "0.6b"}
            result["shapes"].append({"shape": name, **pushes(Qwen3Config(**shape), sized(10, 2))})
        yield "gpu_rl", result
    if options.only in (None, "same-bits"):
        yield from costs()
    if options.only in (None, "parity"):
        yield f"{'gpu' if DEVICE == 'cuda' else 'cpu'}_rl_parity", distances()
