"""Generating text as users do, at Llama-3-8B's shape with random weights: `model.generate` of `octavo.load`, and of
transformers in BF16, eager and with a static cache.

The model is written to a folder once, and packed by `octavo pack`. Then the models are opened, and their ways take
turns in one process (`bench.gpu.programs`): the first token of prompts, and 64 new tokens of prompts of 1,024. The same
decoding is also timed as CUDA graphs that are captured by hand, of models in memory: the share of their speed that
`generate` reaches is the cost of its loop. Each section is printed and written when it is done.

    python -m bench.gpu.generate [--layers 32] [--batches 1,16,64] [--rounds 3] [--only "decode 1,prompt"]
                                [--folder FOLDER]

--only keeps the other sections of the result. --folder is where the models lie; they are made if they are not there.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from bench import record
from bench.gpu import llama
from bench.gpu import serve_models as models
from bench.gpu.modes import FP8_CACHE, HOOKED
from bench.gpu.programs import (
    EAGER,
    OCTAVO,
    Meter,
    Opened,
    Program,
    Prompts,
    Way,
    check_tokens,
    drop_caches,
    generation,
    measure_cell,
    octavo_program,
    open_program,
    transformers_program,
)
from bench.gpu.serve import decode as decode_graphs
from octavo.hf.meta_model import quiet_transformers
from octavo.inference.packed_linear import fuse
from octavo.loading import load
from octavo.models import LlamaConfig as LlamaShape
from octavo.models.tokenizer import ByteTokenizer
from octavo.speed import Grid

NAME = "gpu_generate"
PROMPTS, PROMPT, TOKENS = (128, 2048), 1024, 64
END = 128_001  # Llama's end token: `generate` looks for it in every step
STARTED = time.perf_counter()


def main() -> None:
    options = parse()
    shape = replace(llama.CONFIG, layers=options.layers)
    batches = [int(batch) for batch in options.batches.split(",")]
    named: dict[str, Callable[[Bench], Any]] = {"prompt": prompt}
    named |= {f"decode {batch}": partial(decode, batch=batch, rounds=options.rounds) for batch in batches}
    named |= {f"graphs {batch}": partial(graphs, batch=batch) for batch in batches}
    chosen = options.only.split(",") if options.only else list(named)
    if unknown := [name for name in chosen if name not in named]:
        raise SystemExit(f"--only takes {', '.join(named)}, got {unknown[0]!r}")
    bench = Bench(shape, options.folder or Path(tempfile.gettempdir()) / f"octavo-generate-{options.layers}", "cuda")
    result = earlier(options.layers) if options.only else {}
    with quiet_transformers():
        for name in chosen:
            say(name)
            result |= {"layers": options.layers, "tokens": TOKENS, name: named[name](bench)} | bench.facts
            say(f"{name}: written to {record.write(NAME, result)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=llama.CONFIG.layers)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path)
    return parser.parse_args()


def earlier(layers: int) -> dict[str, Any]:
    """The sections that were measured before, of a model of as many layers."""
    path = record.RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found.pop("machine", None)
    return found if found.get("layers") == layers else {}


def say(words: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {words}", flush=True)


# --- The models ------------------------------------------------------------------------------------------------


class Bench:
    """The folders of the model, and their open models, each made when it is first needed.

    Attributes:
        facts: what was found while the models were opened: their starts, and the check of the tokens.
    """

    def __init__(self, shape: LlamaShape, folder: Path, device: str) -> None:
        self.shape, self.folder, self.device = shape, folder, torch.device(device)
        self.facts: dict[str, Any] = {}
        self._ways: dict[str, Way] = {}
        self._in_memory: tuple[Any, Any] | None = None

    def ways(self, *names: str) -> list[Way]:
        """The ways of these names, or all of them; the models are loaded together, Octavo's first."""
        if not self._ways:
            self._in_memory = None
            gc.collect()
            torch.cuda.empty_cache()
            self._open()
        return [way for name, way in self._ways.items() if name in names or not names]

    def in_memory(self) -> tuple[Any, Any]:
        """The model in BF16 and packed, made in memory, for graphs that are captured by hand."""
        if self._in_memory is None:
            self._ways = {}
            gc.collect()
            torch.cuda.empty_cache()
            wide = models.build_bf16(self.shape, str(self.device))
            packed = models.build_fp8(wide, str(self.device))
            fuse(packed)
            self._in_memory = wide, packed
        return self._in_memory

    def prompts(self, batch: int, lengths: Sequence[int], tokens: int, rounds: int) -> Prompts:
        return Prompts(Grid([batch], lengths, tokens, rounds), self.shape.vocabulary, self.device)

    def _open(self) -> None:
        wide, packed = make_folders(self.shape, self.folder, str(self.device))
        starts, checked = [], self.prompts(1, [min(PROMPTS)], TOKENS, 1)
        for program in programs(wide, packed, self.device):
            say(f"loading: {program.name}")
            opened, start = open_program(program, checked)
            starts.append(start._asdict())
            say(f"{program.name}: {start.load_seconds:.1f} s, and {start.first_token_seconds:.1f} s to the first token")
            if (check := check_tokens(opened, checked)) is not None:
                say(f"{check.way}: {check.equal} of {check.tokens} leading greedy tokens as {check.reference}")
                self.facts[f"check of {check.way}"] = check._asdict()
            for name, generate in opened.ways.items():
                meter = Meter(self.device, start.weight_bytes or 0)
                self._ways[name] = Way(name, generate, program.baseline, meter, opened.forget)
        self.facts["starts"] = starts


def programs(wide: Path, packed: Path, device: torch.device) -> list[Program]:
    """`octavo.load` with the cache of the folder and with one in FP8, and transformers."""

    def eager() -> Opened:
        model = load(packed, device)
        model.model.norm.register_forward_hook(lambda *_: None)  # a hook must be called, so no step is captured
        return Opened({HOOKED: generation(model)}, forget=partial(drop_caches, model))

    def with_fp8_cache() -> Opened:
        model = load(packed, device, kv_cache="fp8")
        return Opened({FP8_CACHE: generation(model)}, forget=partial(drop_caches, model))

    return [
        octavo_program(packed, device),
        Program(HOOKED, eager),
        Program(FP8_CACHE, with_fp8_cache),
        transformers_program(wide, device),
    ]


def make_folders(shape: LlamaShape, folder: Path, device: str) -> tuple[Path, Path]:
    """The model in BF16 as a Hugging Face folder, and packed by the command."""
    wide, packed = folder / "bf16", folder / "packed"
    if not (wide / "octavo-bench.done").exists():
        say(f"making the model in {wide}")
        torch.manual_seed(0)
        model = models.build_bf16(shape, device)
        model.config = LlamaConfig.from_dict(shape.to_hf() | {"eos_token_id": END % shape.vocabulary})
        model.generation_config.eos_token_id = model.config.eos_token_id
        model.save_pretrained(wide, max_shard_size="4GB")
        ByteTokenizer().save(wide)
        (wide / "octavo-bench.done").touch()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    if not packed.exists():
        say(f"packing to {packed}")
        command = [sys.executable, "-m", "octavo", "pack", str(wide), str(packed), "--device", device]
        subprocess.run(command, check=True)
    return wide, packed


# --- The sections ----------------------------------------------------------------------------------------------


def prompt(bench: Bench) -> list[dict[str, Any]]:
    """The time to the first token of one prompt. A static cache changes nothing there."""
    return measured(bench.ways(OCTAVO, FP8_CACHE, EAGER), bench.prompts(1, PROMPTS, 1, 10))


def decode(bench: Bench, batch: int, rounds: int) -> list[dict[str, Any]]:
    return measured(bench.ways(), bench.prompts(batch, [PROMPT], TOKENS, rounds))


def measured(ways: Sequence[Way], prompts: Prompts) -> list[dict[str, Any]]:
    """The rows of all sizes."""
    rows = [row for cell in prompts.grid.cells for row in measure_cell(ways, cell, prompts, say)]
    for row in rows:
        ms, rate = 1e3 * (row["first_token_seconds"] or 0), row["tokens_per_second"] or 0
        figures = f"first token {ms:.1f} ms, {rate:.0f} tokens/s, {row['tokens_per_second_speedup'] or 0:.2f}x"
        say(f"{row['way']:20} batch {row['batch']} prompt {row['prompt']}: {row['problem'] or figures}")
    return rows


def graphs(bench: Bench, batch: int) -> dict[str, Any]:
    """Tokens a second of CUDA graphs that are captured by hand, at the middle of the context that `decode` covers."""
    torch._dynamo.config.recompile_limit = 64  # each layer has a cache of its own
    wide, packed = bench.in_memory()
    found = decode_graphs(wide, packed, batch, PROMPT + TOKENS // 2)
    rates = {mode: 1e3 * batch / ms["median"] for mode, ms in found["ms"].items()}
    say(", ".join(f"{mode}: {rate:.0f} tokens/s" for mode, rate in rates.items()))
    return found | {"tokens_per_second": rates}


if __name__ == "__main__":
    main()
