"""What the mode of the same bits costs, at Qwen3-0.6B's shape with random weights: decoding, and steps of training.

python -m bench.gpu.rl_same_bits
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import octavo
from bench.gpu.harness import DEVICE, parser_of, show, sized
from octavo.models.tokenizer import ByteTokenizer
from octavo.ops import index_of_largest
from octavo.packing import pack
from octavo.rl import same_bits

SIZES = {
    "vocab_size": sized(151_936, 256), "hidden_size": sized(1024, 64), "intermediate_size": sized(3072, 128),
    "num_hidden_layers": sized(28, 2), "num_attention_heads": sized(16, 4), "num_key_value_heads": sized(8, 2),
    "head_dim": sized(128, 16), "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
BATCHES, PROMPT, NEW, TOKENS = sized((1, 16, 64), (1,)), sized(256, 8), sized(128, 4), sized((4, 2048), (2, 16))


def measure() -> dict[str, list[float]]:
    """Milliseconds of a decoding step, a forward pass and a step of training: outside, in the mode, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        trained, served = open_models(Path(folder))
    ids = torch.randint(SIZES["vocab_size"], TOKENS, device=DEVICE)
    calls: dict[str, Callable[[], float]] = {f"decode {b}": partial(decode, served, b) for b in BATCHES}
    calls["forward"] = lambda: timed(lambda: trained(ids, use_cache=False))
    calls["step"] = lambda: timed(lambda: trained(ids, use_cache=False).logits.mean().backward())
    outside = {name: median(call) for name, call in calls.items()}
    with same_bits(trained, served):
        texts = generate(served, 2, NEW)
        with torch.no_grad():
            logits = trained(texts).logits[:, PROMPT - 1 : -1].float()
        assert torch.equal(index_of_largest(logits.flatten(0, 1)), texts[:, PROMPT:].flatten())
        return {name: [outside[name], ms := median(call), outside[name] / ms] for name, call in calls.items()}


def open_models(folder: Path) -> tuple[Any, Any]:
    """A trained model, and the served one of its weights."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).bfloat16().save_pretrained(folder / "model")
    ByteTokenizer().save(folder / "model")
    pack(folder / "model", folder / "packed", scheme="channel")
    trained = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).to(DEVICE).train()
    octavo.convert(trained, "rowwise_forward")
    return trained, octavo.load(folder / "packed", DEVICE)


def generate(served: Any, batch: int, new: int) -> Tensor:
    ids = torch.ones(batch, PROMPT, dtype=torch.int64, device=DEVICE)
    made: Tensor = served.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
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


def median(call: Callable[[], float]) -> float:
    """Of five calls, after two that compile, capture and warm up."""
    return statistics.median([call() for _ in range(7)][2:])


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    show(measure())
