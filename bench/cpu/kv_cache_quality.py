"""The cost of keys and values in eight bits: the demo's BF16 run, packed by channel, with a cache of each dtype.

Held-out prompts pass through the model in chunks, so that the tokens after the first chunk attend to the cache. The
reference is the same packed model with a BF16 cache, on the same prompts and chunks. The scales come from a
calibration, or from the first chunk of each prompt.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import octavo
from bench import record
from bench.cpu.packing_quality import prepare
from examples import demo
from octavo.calibration import Calibration
from octavo.evaluation.metrics import LogitSums, Outputs, compare_many
from octavo.evaluation.prompts import PromptOptions, open_tokenizer, read_prompts
from octavo.kv_cache.transformers_cache import QuantizedKVCache, scales_from_calibration
from octavo.packing import pack

CHUNK, SAMPLES, CONTEXT, BATCH = 16, 64, 256, 8
Cache = Callable[[Any, int], QuantizedKVCache]


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        found, batches = pack_demo(folder)
        packed = octavo.load(folder / "packed")
        caches = {f"{dtype}, {how}": cache(dtype, found if how == "calibrated" else None) for dtype, how in WAYS}
        ways = {name: in_chunks(packed, make) for name, make in caches.items()}
        quality = compare_many(in_chunks(packed, cache("bf16", None)), ways, batches, LogitSums)
    rows = {name: found.to_dict() for name, found in quality.items()}
    for name, row in rows.items():
        print(name, row)
    print(record.write("kv_cache_quality", {"settings": demo.SETTINGS, "chunk": CHUNK, "caches": rows}))


WAYS = [(dtype, how) for dtype in ("fp8", "int8") for how in ("calibrated", "first chunk")]


def pack_demo(folder: Path) -> tuple[Calibration, list[Tensor]]:
    """Pack the demo's BF16 run to `folder`/packed: its calibration, and held-out prompts, ids [B, CONTEXT]."""
    found, model = prepare(folder), folder / "model"
    pack(model, folder / "packed", scheme="channel")
    held_out = [str(folder / "heldout.txt")]
    prompts = read_prompts(held_out, open_tokenizer(model), PromptOptions(SAMPLES, CONTEXT))
    whole = [ids for ids in prompts.ids if len(ids) == CONTEXT]
    return found, [torch.tensor(whole[i : i + BATCH]) for i in range(0, len(whole), BATCH)]


def cache(dtype: str, calibration: Calibration | None) -> Cache:
    """A function that makes a cache for a model and a number of tokens."""
    scales = {} if calibration is None else {"scales": scales_from_calibration(calibration, dtype)}
    return lambda model, tokens: QuantizedKVCache.for_model(model, tokens, dtype, **scales)


def in_chunks(model: Any, make: Cache) -> Outputs:
    """A function from ids [B, T] to the logits [B, T, V] of a model that decodes in chunks."""

    @torch.no_grad()
    def run(ids: Tensor) -> Tensor:
        kept = make(model, ids.shape[1])
        chunks = [model(part, past_key_values=kept, use_cache=True).logits for part in torch.split(ids, CHUNK, 1)]
        return torch.cat(chunks, 1)

    return run


if __name__ == "__main__":
    main()
