"""Generating text as users do, at Llama-3-8B's shape with random weights: `model.generate` of `octavo.load`, and of
transformers in BF16, eager and with a static cache.

The model is written to a folder once, and packed by `octavo pack`. Then the models are opened, and their ways take
turns in one process, in an order that is drawn for each round: the first token of prompts, and 64 new tokens of prompts
of 1,024. `octavo.speed` times each call. The same decoding is also timed as CUDA graphs that are captured by hand, of
models in memory: the share of their speed that `generate` reaches is the cost of its loop. Each section is printed and
written when it is done.

The section `rows` needs no folder, and takes two minutes: the first token of one prompt, and of many. The section
`start`, a result of its own, has the wall clock's seconds from the folder to a model and to its first token. Each round
starts a process for each of

    octavo                the kernels are compiled already, by an earlier process
    octavo, new machine   no kernel is compiled yet: Triton's cache on disk is an empty folder
    BF16, eager           transformers

in turn. The files are read once before, so that the operating system holds them in memory. PyTorch and transformers are
imported, and the GPU is initialized, before the clock starts.

    python -m bench.gpu.generate [--layers 32] [--batches 1,16,64] [--rounds 3] [--only "decode 1,prompt"]
                                [--folder FOLDER]

--only keeps the other sections of the result. --folder is where the models lie; they are made if they are not there.
"""

import random
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers import LlamaConfig as HFConfig

from bench.gpu import harness, llama
from bench.gpu import serve_models as models
from bench.gpu.harness import DEVICE, Options, Result, Results, allocated, benchmark, in_new_process, sized
from bench.gpu.modes import EAGER, FP8_CACHE, HOOKED, OCTAVO, STATIC
from bench.gpu.serve import decode as decode_graphs
from octavo import load
from octavo.hf.meta_model import quiet_transformers
from octavo.inference.transformers_cache import CACHE
from octavo.inference.transformers_generate import accelerate_generate
from octavo.models import LlamaConfig
from octavo.models.tokenizer import ByteTokenizer
from octavo.speed import Cell, Generate, Grid, Row, release, timed
from octavo.util import open_config, open_local

NAME = "gpu_generate"
PROMPTS, PROMPT, TOKENS = sized((128, 2048), (8, 16)), sized(1024, 16), sized(64, 4)
END = 128_001  # Llama's end token: `generate` looks for it in every step
CHECKED = 2  # prompts whose tokens are compared before anything is timed


# --- The models ------------------------------------------------------------------------------------------------


def make_folders(shape: LlamaConfig, folder: Path) -> tuple[Path, Path]:
    """The model in BF16 as a Hugging Face folder, and packed by the command."""
    wide, packed = folder / "bf16", folder / "packed"
    if not (wide / "octavo-bench.done").exists():
        torch.manual_seed(0)
        model = models.build_bf16(shape, DEVICE)
        model.config = HFConfig.from_dict(shape.to_hf() | {"eos_token_id": END % shape.vocabulary})
        model.generation_config.eos_token_id = model.config.eos_token_id
        model.save_pretrained(wide, max_shard_size="4GB")
        ByteTokenizer().save(wide)
        (wide / "octavo-bench.done").touch()
        del model
        release(torch.device(DEVICE))
    if not packed.exists():
        subprocess.run([sys.executable, "-m", "octavo", "pack", str(wide), str(packed)], check=True)
    return wide, packed


def open_bf16(folder: Path) -> Any:
    """transformers with the model in BF16."""
    model = open_local(AutoModelForCausalLM, folder, config=open_config(folder), dtype=torch.bfloat16)
    return model.eval().to(DEVICE)


def open_hooked(folder: Path) -> Any:
    """`octavo.load`, with a hook, which must be called, so that no step is captured."""
    model = load(folder, DEVICE)
    model.model.norm.register_forward_hook(lambda *_: None)
    return model


def generation(model: Any, **settings: Any) -> Generate:
    """`model.generate`, greedy. It looks for the end token in every step, and must not meet it in all texts."""

    def generate(ids: Tensor, tokens: int) -> Tensor:
        greedy = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens}
        made = model.generate(ids, **greedy, **settings)[:, ids.shape[1] :]
        assert made.shape[1] == tokens, f"all texts ended after {made.shape[1]} of {tokens} tokens"
        return made

    return generate


# --- Ways to generate, in turn ---------------------------------------------------------------------------------


@dataclass
class Way:
    """A way to generate from an open model, and the most bytes that its calls hold, beside other ways' models."""

    name: str
    generate: Generate
    weights: int = 0  # bytes of its model
    baseline: bool = False  # in BF16, with which the others are compared
    forget: Callable[[], None] = lambda: None  # drops the caches of calls: a size does not count those of another
    held: int = 0  # the weights, and what the calls of this size left allocated
    peak: int | None = None  # the most of this size: what is held, and what a call takes while it runs; None on a CPU

    def begin(self) -> None:
        """Begin another size."""
        self.forget()
        self.held, self.peak = self.weights, None

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Count the memory of a call."""
        if DEVICE == "cpu":
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        self.peak = max(self.peak or 0, self.held + torch.cuda.max_memory_allocated() - before)
        self.held += torch.cuda.memory_allocated() - before


def measure_cell(ways: Sequence[Way], cell: Cell, grid: Grid, vocabulary: int) -> list[Result]:
    """The rows of ways at one size. They take turns, in an order that is drawn for each round."""
    device = torch.device(DEVICE)
    ids = grid.draw(cell, vocabulary, device)
    rows = {way.name: Row(way.name, *cell, grid.tokens) for way in ways}
    for way in ways:
        way.begin()
        with way.metered():
            rows[way.name].first_call(way.generate, ids)
        if rows[way.name].problem:
            way.forget()
            release(device)
    running, drawn = [way for way in ways if not rows[way.name].problem], random.Random(0)
    for _ in range(grid.rounds):
        drawn.shuffle(running)
        for way in running:
            with way.metered():
                rows[way.name].time(way.generate, ids)
            rows[way.name].peak_bytes = way.peak
    # Otherwise torch.compile makes code for any batch once it has seen two, which is slower than code for one.
    torch.compiler.reset()
    return with_speeds([rows[way.name].to_dict() | {"baseline": way.baseline} for way in ways])


def with_speeds(rows: list[Result]) -> list[Result]:
    """The rows with their speeds over the best BF16 way: to the first token, and in tokens a second."""
    wide = [row for row in rows if row["baseline"]]
    first = min((row["first_token_seconds"] for row in wide if row["first_token_seconds"]), default=None)
    rate = max((row["tokens_per_second"] for row in wide if row["tokens_per_second"]), default=None)
    for row in rows:
        own, made = row["first_token_seconds"], row["tokens_per_second"]
        row["first_token_speedup"] = first / own if first and own else None
        row["tokens_per_second_speedup"] = made / rate if rate and made else None
    return rows


def leading_tokens(model: Any, ids: Tensor, tokens: int) -> list[int]:
    """The greedy tokens that equal those of transformers' loop with the same model, before the first that differs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "generate runs on transformers' own loop")  # as a cache of the caller asks
        theirs = generation(model, **{CACHE: DynamicCache(config=model.config)})(ids, tokens)
    same = (theirs.cpu() == generation(model)(ids, tokens).cpu()).long()
    return same.cummin(1).values.sum(1).tolist()  # cummin is 0 from the first that differs


class Bench:
    """The model's folders, its open models, each made when it is first needed, and the check of Octavo's tokens."""

    def __init__(self, shape: LlamaConfig, folder: Path) -> None:
        self.shape, self.folder = shape, folder
        self.checked: Result = {}
        self.close()

    def close(self) -> None:
        """Drop all models."""
        self._ways: list[Way] = []
        self._in_memory: tuple[Any, Any] | None = None
        release(torch.device(DEVICE))

    def ways(self) -> list[Way]:
        """All ways; the models are loaded together, Octavo's first."""
        if not self._ways:
            self._in_memory = None
            wide, packed = make_folders(self.shape, self.folder)
            for open_model, named in (
                (partial(load, packed, DEVICE), {OCTAVO: {}}),
                (partial(open_hooked, packed), {HOOKED: {}}),
                (partial(load, packed, DEVICE, kv_cache="fp8"), {FP8_CACHE: {}}),
                (partial(open_bf16, wide), {EAGER: {}, STATIC: {"cache_implementation": "static"}}),
            ):  # type: Callable[[], Any], dict[str, dict[str, str]]
                before = allocated()
                model = open_model()
                weights, baseline = allocated() - before, EAGER in named
                forget = (lambda: None) if baseline else model.octavo_engine.sessions.clear  # with their CUDA graphs
                if OCTAVO in named:
                    cell, device = Cell(CHECKED, min(PROMPTS)), torch.device(DEVICE)
                    ids = Grid([CHECKED], PROMPTS).draw(cell, self.shape.vocabulary, device)
                    equal = leading_tokens(model, ids, TOKENS)
                    self.checked = {f"check of {OCTAVO}": {"tokens": TOKENS, "equal": equal}}
                self._ways += [
                    Way(name, generation(model, **settings), weights, baseline, forget)
                    for name, settings in named.items()
                ]
        return self._ways

    def prompt(self) -> list[Result]:
        """The time to the first token of one prompt. A static cache changes nothing there."""
        ways = [way for way in self.ways() if way.name in (OCTAVO, FP8_CACHE, EAGER)]
        return self.measure(ways, Grid([1], PROMPTS, 1, sized(10, 1)))

    def decode(self, batch: int, rounds: int) -> list[Result]:
        return self.measure(self.ways(), Grid([batch], [PROMPT], TOKENS, sized(rounds, 1)))

    def measure(self, ways: Sequence[Way], grid: Grid) -> list[Result]:
        return [row for cell in grid.cells for row in measure_cell(ways, cell, grid, self.shape.vocabulary)]

    def graphs(self, batch: int) -> Result:
        """Tokens a second of CUDA graphs that are captured by hand, at the middle of the context of `decode`."""
        if self._in_memory is None:
            self.close()
            wide = models.build_bf16(self.shape, DEVICE)
            self._in_memory = wide, models.build_fp8(wide, DEVICE)
        found = decode_graphs(*self._in_memory, batch, PROMPT + TOKENS // 2)
        rates = {mode: 1e3 * batch / ms["median"] for mode, ms in found["ms"].items()}
        return found | {"tokens_per_second": rates}


# --- The rows of a short run, of models in memory ---------------------------------------------------------------

FEW, MANY = sized(8, 1), sized(64, 2)  # layers, so that the head counts as in a small model; prompts at a time


def rows(shape: LlamaConfig) -> Result:
    """The first token of one prompt by all layers, and that of many prompts by a few."""
    wide = models.build_bf16(shape, DEVICE)
    packed = models.build_fp8(wide, DEVICE)
    accelerate_generate(packed, shape.context)
    ways = [Way(OCTAVO, generation(packed)), Way(EAGER, generation(wide), baseline=True)]
    result: Result = {"machine": harness.facts(), "first token": []}

    def first_token(batch: int, prompt: int) -> None:
        found = measure_cell(ways, Cell(batch, prompt), Grid([batch], [prompt], 1, sized(5, 1)), shape.vocabulary)
        result["first token"] += [row | {"layers": wide.config.num_hidden_layers} for row in found]

    for prompt in PROMPTS:
        first_token(1, prompt)
    for model in (wide, packed):
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:FEW], FEW
    packed.octavo_engine.sessions.clear()
    first_token(MANY, PROMPT)
    return result


# --- The start of a new process --------------------------------------------------------------------------------

NEW_MACHINE = "octavo, new machine"
STARTS, FIGURES = (OCTAVO, NEW_MACHINE, EAGER), ("load", "first_token")
START_PROMPT = sized(256, 8)


def starts(shape: LlamaConfig, folder: Path, rounds: int) -> Result:
    """The median seconds of each way to start, and its time over that of BF16."""
    make_folders(shape, folder)
    with tempfile.TemporaryDirectory() as compiled:
        for way in (OCTAVO, EAGER):
            seconds_of(folder, compiled, way)
        each = [{way: seconds_of(folder, compiled, way) for way in STARTS} for _ in range(sized(rounds, 1))]
    medians = {way: {key: statistics.median(r[way][key] for r in each) for key in FIGURES} for way in STARTS}
    times = {way: sum(found.values()) / sum(medians[EAGER].values()) for way, found in medians.items()}
    return {"prompt": START_PROMPT, "rounds": each, "seconds": medians, "times_bf16": times}


def seconds_of(folder: Path, compiled: str, way: str) -> dict[str, float]:
    """The seconds of a new process. Kernels of earlier processes are in the folder `compiled`."""
    with tempfile.TemporaryDirectory() as empty:
        cache = empty if way == NEW_MACHINE else compiled
        return in_new_process(partial(start, folder, way), TRITON_CACHE_DIR=cache)


def start(folder: Path, way: str) -> dict[str, float]:
    """The seconds of one way, in this process."""
    device = torch.device(DEVICE)
    torch.zeros(1, device=device)
    open_model = partial(open_bf16, folder / "bf16") if way == EAGER else partial(load, folder / "packed", device)
    ids = torch.randint(250, (1, START_PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    with quiet_transformers():
        seconds, model = timed(open_model, device)
        first, _ = timed(partial(generation(model), ids, 1), device)
    return dict(zip(FIGURES, (seconds, first), strict=True))


@benchmark(layers=llama.CONFIG.layers, batches=sized("1,16,64", "1,2"), rounds=3, only="", folder=Path)
def main(options: Options) -> Results:
    folder = options.folder or Path(tempfile.gettempdir()) / f"octavo-generate-{sized('', 'quick-')}{options.layers}"
    bench = Bench(replace(llama.CONFIG, layers=options.layers), folder)
    batches = [int(batch) for batch in options.batches.split(",")]
    named: dict[str, Callable[[], Any]] = {"prompt": bench.prompt}
    named |= {f"decode {batch}": partial(bench.decode, batch, options.rounds) for batch in batches}
    named |= {f"graphs {batch}": partial(bench.graphs, batch) for batch in batches}
    alone = {"rows": partial(rows, bench.shape), "start": partial(starts, bench.shape, folder, options.rounds)}
    named |= alone
    chosen = options.only.split(",") if options.only else list(named)
    if unknown := [name for name in chosen if name not in named]:
        raise SystemExit(f"--only takes {', '.join(named)}, got {unknown[0]!r}")
    result = {key: value for key, value in harness.result_before(NAME).items() if options.only and key != "machine"}
    if result.get("layers") != options.layers:
        result = {}
    with quiet_transformers():
        for name in chosen:
            if name in alone:
                bench.close()
            if name == "start":  # the last, because it changes where this process finds compiled kernels
                yield "gpu_start", named[name]()
                continue
            result |= {"layers": options.layers, "tokens": TOKENS, name: named[name]()} | bench.checked
            yield NAME, result
