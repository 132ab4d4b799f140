"""The cost of attention in FP8: the demo's BF16 run, packed by channel, with the attention of whole prompts in E4M3.

The reference is the same packed model with attention in BF16, on the same held-out prompts. A CPU computes the
arithmetic of `octavo.ops.fp8_attention` in float32.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import octavo
from bench import record
from bench.cpu.kv_cache_quality import CONTEXT, pack_demo
from examples import demo
from octavo.evaluation.metrics import LogitSums, Outputs, compare_many
from octavo.nn import use_fp8_attention


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        _, batches = pack_demo(folder)
        plain, ours = (octavo.load(folder / "packed") for _ in range(2))
        use_fp8_attention(ours, shortest=1)
        quality = compare_many(logits_of(plain), {"fp8": logits_of(ours)}, batches, LogitSums)
    row = quality["fp8"].to_dict()
    print(row)
    print(record.write("attention_quality", {"settings": demo.SETTINGS, "context": CONTEXT, "fp8": row}))


def logits_of(model: Any) -> Outputs:
    """A function from ids [B, T] to the logits [B, T, V]."""

    @torch.no_grad()
    def run(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, use_cache=False).logits
        return logits

    return run


if __name__ == "__main__":
    main()
