"""Seconds from a folder to a model and to its first token: `octavo.load`, and transformers in BF16, in new processes.

Each round starts a process for each of

    octavo                the kernels are compiled already, by an earlier process
    octavo, new machine   no kernel is compiled yet: Triton's cache on disk is an empty folder
    BF16, eager           transformers

in turn. The files are read once before, so that the operating system holds them in memory. PyTorch and transformers are
imported, and the GPU is initialized, before the clock starts. Both times are the wall clock's: opening the model, and
one token after a prompt.

    python -m bench.gpu.start [--folder FOLDER] [--rounds 3] [--prompt 256]

FOLDER has the folders `packed` and `bf16`, and is made if it is not there. By default it is that of bench.gpu.generate.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

from bench.gpu import llama
from bench.gpu.generate import folder_of, generation, make_folders, open_bf16
from bench.gpu.harness import DEVICE, Options, Results, benchmark, in_new_process, show, sized
from bench.gpu.modes import EAGER, OCTAVO
from octavo import load
from octavo.hf.meta_model import quiet_transformers
from octavo.speed import timed

NEW_MACHINE = "octavo, new machine"
WAYS = (OCTAVO, NEW_MACHINE, EAGER)
FIGURES = ("load", "first_token")


def seconds_of(folder: Path, prompt: int, compiled: str, way: str) -> dict[str, float]:
    """The seconds of a new process. Kernels of earlier processes are in the folder `compiled`."""
    with tempfile.TemporaryDirectory() as empty:
        cache = empty if way == NEW_MACHINE else compiled
        return in_new_process(partial(start, folder, prompt, way), TRITON_CACHE_DIR=cache)


def start(folder: Path, prompt: int, way: str) -> dict[str, float]:
    """The seconds of one way, in this process."""
    device = torch.device(DEVICE)
    torch.zeros(1, device=device)
    wide = way == EAGER
    open_model = partial(open_bf16, folder / "bf16") if wide else partial(load, folder / "packed", device)
    ids = torch.randint(250, (1, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    with quiet_transformers():
        seconds, model = timed(open_model, device)
        first, _ = timed(partial(generation(model), ids, 1), device)
    return dict(zip(FIGURES, (seconds, first), strict=True))


@benchmark(rounds=sized(3, 1), prompt=sized(256, 8), folder=folder_of(llama.CONFIG.layers))
def main(options: Options) -> Results:
    if not options.folder.exists():
        make_folders(llama.CONFIG, options.folder)
    run = partial(seconds_of, options.folder, options.prompt)
    with tempfile.TemporaryDirectory() as compiled:
        for way in (OCTAVO, EAGER):
            run(compiled, way)
        rounds = [{way: run(compiled, way) for way in WAYS} for _ in range(options.rounds)]
    medians = {way: {key: statistics.median(r[way][key] for r in rounds) for key in FIGURES} for way in WAYS}
    to_token = {way: found["load"] + found["first_token"] for way, found in medians.items()}
    times = {way: to_token[way] / to_token[EAGER] for way in WAYS}
    show(medians, times)
    yield "gpu_start", {"prompt": options.prompt, "rounds": rounds, "seconds": medians, "times_bf16": times}
