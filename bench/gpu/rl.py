"""Pushing a model in training into a live one (`octavo.rl.push`): seconds, memory, and what is generated after it.

Shapes of Qwen3, random weights in BF16, recipe rowwise, scheme channel. Seconds are the wall clock's and include the
checksum, which waits for the device. The checksum is timed alone too. `beyond` is the memory that a push takes beside
both models. First a small live model, whose decoding steps are captured, must give the tokens of a folder that is
packed and loaded afresh, and so after 1,000 pushes, which may not add a byte.

    python -m bench.gpu.rl [--shapes 0.6b,8b] [--layers 0] [--pushes 10] [--checked 1000]
        layers: of each shape; 0 takes its own
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

import octavo
from bench.gpu.harness import DEVICE, Options, Results, benchmark, show, sized
from octavo.checkpoint.scheme import CHANNEL
from octavo.hf.meta_model import quiet_transformers
from octavo.inference.packed_linear import fuse, swap_linears
from octavo.inference.transformers_generate import accelerate_generate
from octavo.packing import pack
from octavo.rl import checksum, push

HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": sized(151936, 256), "eos_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
SMALL = {**HEADS, **SHAPES["0.6b"], "num_hidden_layers": 2, "vocab_size": 4096, "tie_word_embeddings": True}


def trained(config: PretrainedConfig, seed: int = 0) -> Any:
    """A converted model with random weights in BF16."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    torch.set_default_dtype(torch.float32)
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


def tokens(model: Any) -> Tensor:
    ids = torch.arange(32, device=DEVICE).view(2, 16)
    how = {"do_sample": False, "max_new_tokens": sized(64, 4)}
    made: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return made


def allocated() -> int:
    """Bytes; the peak begins here."""
    if DEVICE != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def check(count: int) -> dict[str, Any]:
    """Bytes that `count` pushes add; an error if what is generated then is not what a new folder gives."""
    config = Qwen3Config(**SMALL)
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
    return {"pushes": count, "grown_bytes": grown, "same_tokens": True}


def timed(config: Qwen3Config, count: int) -> dict[str, Any]:
    """Seconds of pushes and of checksums, and memory beside both models."""
    model, served = trained(config), live(config)
    pushed = push(model, served)  # compiles the kernels
    held, seconds, sums = allocated(), [], []
    for i in range(count):
        seconds.append(push(model, served).seconds)
        began = time.perf_counter()
        checksum(served)
        sums.append(time.perf_counter() - began)
        show(f"push {i + 1}", {"ms": 1e3 * seconds[-1], "checksum": 1e3 * sums[-1]})
    beyond = torch.cuda.max_memory_allocated() - held if DEVICE == "cuda" else 0
    largest = max(p.nbytes for name, p in model.named_parameters() if ".layers." in name)
    figures = {"seconds": statistics.median(seconds), "checksum_seconds": statistics.median(sums), "each": seconds}
    sizes = {"layers": config.num_hidden_layers, "bytes": pushed.bytes}
    return sizes | figures | {"beyond": beyond, "beyond_in_layers": beyond / largest}


@benchmark(shapes=sized("0.6b,8b", "0.6b"), layers=sized(0, 1), pushes=sized(10, 2), checked=sized(1000, 3))
def main(options: Options) -> Results:
    result: dict[str, Any] = {"check": check(options.checked), "shapes": []}
    show("check", result["check"])
    for name in options.shapes.split(","):
        shape = {**HEADS, **SHAPES[name], "tie_word_embeddings": name == "0.6b"}
        shape["num_hidden_layers"] = options.layers or shape["num_hidden_layers"]
        result["shapes"].append({"shape": name, **timed(Qwen3Config(**shape), options.pushes)})
        show(name, result["shapes"][-1])
    yield "gpu_rl", result
