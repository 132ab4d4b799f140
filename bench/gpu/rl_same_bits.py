"""What the mode of the same bits costs, at Qwen3-0.6B's shape with random weights: decoding, and steps of training.

Rollouts are timed too: texts sampled by the served model, and by transformers' `generate` of the model in BF16, which
TRL calls by default.

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
from bench import record
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
BATCHES, PROMPT, NEW, TOKENS = sized((1, 64), (1,)), sized(256, 8), sized(128, 4), sized((4, 2048), (2, 16))


def measure() -> dict[str, Any]:
    """Milliseconds of a decoding step, a forward pass and a step of training: outside, in the mode, and their ratio;
    and milliseconds of rollouts."""
    with tempfile.TemporaryDirectory() as folder:
        trained, served = open_models(Path(folder))
        wide = Qwen3ForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.bfloat16).to(DEVICE)
    rollouts = {name: min(timed(partial(generate, model, BATCHES[-1], NEW)) for _ in range(3)) for name, model in
                {"transformers": wide, "served": served}.items()}  # fmt: skip
    show("rollouts", rollouts)
    ids = torch.randint(SIZES["vocab_size"], TOKENS, device=DEVICE)
    calls: dict[str, Callable[[], float]] = {f"decode {b}": partial(decode, served, b) for b in BATCHES}
    calls["forward"] = partial(timed, lambda: trained(ids, use_cache=False))
    calls["step"] = partial(timed, lambda: trained(ids, use_cache=False).logits.mean().backward())
    outside = {name: median(call) for name, call in calls.items()}
    show("outside", outside)
    with same_bits(trained, served):
        texts = generate(served, 2, NEW)
        with torch.no_grad():
            logits = trained(texts).logits[:, PROMPT - 1 : -1].float()
        assert torch.equal(index_of_largest(logits.flatten(0, 1)), texts[:, PROMPT:].flatten())
        inside = {name: median(call) for name, call in calls.items()}
    rows = [{"work": name, "outside": ms, "inside": inside[name], "speed": ms / inside[name]}
            for name, ms in outside.items()]  # fmt: skip
    sizes = {"texts": BATCHES[-1], "prompt": PROMPT, "new": NEW}
    return {"rows": rows, "rollouts": {**sizes, **rollouts, "speed": rollouts["transformers"] / rollouts["served"]}}


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
    """Of three calls, after two that compile, capture and warm up."""
    return statistics.median([call() for _ in range(5)][2:])


def main() -> None:
    parser_of(__doc__).parse_args()
    print(record.write("gpu_rl_same_bits", measure()))


if __name__ == "__main__":
    main()
