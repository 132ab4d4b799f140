"""Seconds from a folder to a model and to its first token: `octavo.load`, and transformers in BF16, in new processes.

Each round starts a process for each of

    octavo                the kernels are compiled already, by an earlier process
    octavo, new machine   no kernel is compiled yet: Triton's cache on disk is an empty folder
    BF16, eager           transformers

in turn. The files are read once before, so that the operating system holds them in memory. PyTorch and transformers are
imported, and the GPU is initialized, before the clock starts. Both times are the wall clock's: opening the model, and
one token after a prompt. Then 16 tokens are generated, which captures the decoding step.

    python -m bench.gpu.start [PACKED --against BF16] [--rounds 3] [--prompt 256] [--profile]

The folders are by default those that bench.gpu.generate makes. --profile only prints where the time of one process of
octavo goes, by cProfile, and writes nothing.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import record
from bench.gpu.programs import EAGER, OCTAVO, octavo_program, transformers_program
from octavo.hf.meta_model import quiet_transformers
from octavo.speed import timed

NAME = "gpu_start"
NEW_MACHINE = "octavo, new machine"
WAYS = (OCTAVO, NEW_MACHINE, EAGER)
FIGURES = ("load", "first_token", "sixteen_tokens")
FOLDERS = Path(tempfile.gettempdir()) / "octavo-generate-32"


def main() -> None:
    options = parse()
    if options.way is not None:
        print(json.dumps(start(options)), flush=True)
        return
    with tempfile.TemporaryDirectory() as compiled:
        run(OCTAVO, options, Path(compiled))
        if options.profile:
            run(OCTAVO, options, Path(compiled), "--profile")
            return
        run(EAGER, options, Path(compiled))
        rounds = [{way: run(way, options, Path(compiled)) for way in WAYS} for _ in range(options.rounds)]
    medians = {way: {key: statistics.median(r[way][key] for r in rounds) for key in FIGURES} for way in WAYS}
    to_token = {way: found["load"] + found["first_token"] for way, found in medians.items()}
    times = {way: to_token[way] / to_token[EAGER] for way in WAYS}
    for way in WAYS:
        print(f"{way:20} {to_token[way]:6.2f} s to the first token, {times[way]:.2f} times BF16's")
    result = {"prompt": options.prompt, "rounds": rounds, "seconds": medians, "times_bf16": times}
    print(record.write(NAME, result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDERS / "packed")
    parser.add_argument("--against", type=Path, default=FOLDERS / "bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--way", choices=WAYS, help="only this way, in this process")
    return parser.parse_args()


def run(way: str, options: argparse.Namespace, compiled: Path, *words: str) -> dict[str, float]:
    """The seconds of a new process. Kernels of earlier processes are in the folder `compiled`."""
    command = [
        sys.executable, "-m", "bench.gpu.start", str(options.folder), "--against", str(options.against),
        "--prompt", str(options.prompt), "--device", options.device, "--way", way, *words,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | {"TRITON_CACHE_DIR": empty if way == NEW_MACHINE else str(compiled)}
        output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    *others, last = output.splitlines()
    print("\n".join([*others, f"{way:20} {last}"]), flush=True)
    found: dict[str, float] = json.loads(last)
    return found


def start(options: argparse.Namespace) -> dict[str, float]:
    """The seconds of one way, in this process."""
    import transformers  # noqa: F401

    device = torch.device(options.device)
    torch.zeros(1, device=device)
    make = transformers_program if options.way == EAGER else octavo_program
    program = make(options.against if options.way == EAGER else options.folder, device)
    ids = torch.randint(250, (1, options.prompt), generator=torch.Generator().manual_seed(0)).to(device)
    profile = cProfile.Profile()
    with quiet_transformers():
        if options.profile:
            profile.enable()
        load, opened = timed(program.open, device)
        generate: Any = next(iter(opened.ways.values()))
        first, _ = timed(partial(generate, ids, 1), device)
        sixteen, _ = timed(partial(generate, ids, 16), device)
        profile.disable()
    if options.profile:
        for order in ("cumulative", "tottime"):
            pstats.Stats(profile).sort_stats(order).print_stats(60)
    return dict(zip(FIGURES, (load, first, sixteen), strict=True)) | {"process": time.process_time()}


if __name__ == "__main__":
    main()
