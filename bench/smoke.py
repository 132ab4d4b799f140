"""Runs every benchmark of bench/gpu at its smallest, and says which fail and why: `make bench-smoke`.

Nothing is written to bench/results. On one GPU it takes about five minutes. Without a GPU the benchmarks run that need
no kernel, uncompiled.

    python -m bench.smoke [WORD ...]        the commands that have one of these words in them
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch

GPU = torch.cuda.is_available()
AT_ONCE = 6 if GPU else 1  # commands that run at the same time
LONGEST = 280  # seconds
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 1 -m"
# Those that a CPU runs too, then those whose kernels only a GPU has.
COMMANDS = [
    "-m bench.gpu.ceilings",
    "-m bench.gpu.kernels",
    "-m bench.gpu.stack",
    "-m bench.gpu.layer",
    "-m bench.gpu.moe",
    "-m bench.gpu.generate --folder {out}/models" + ("" if GPU else " --only prompt,rows"),
    "-m bench.gpu.generate --folder {out}/models --only start",
    *(f"-m bench.gpu.vision --only {part}" for part in ("blocks", "whole", "compile")),
    "-m bench.gpu.lora",
    "-m bench.gpu.whole_step",
    "-m bench.gpu.watch",
    "-m bench.gpu.trained",
    "-m bench.gpu.plan",
    "-m bench.gpu.plan --largest",
    "-m bench.gpu.plan --hosted",
    "-m bench.gpu.rl",
    "-m bench.gpu.runs gpt --runs bf16:0,rowwise:0 --time bf16,rowwise --out {out} --merge {out}",
    "-m bench.gpu.runs moe --runs bf16:0,rowwise:0 --out {out} --merge {out}",
    "-m bench.gpu.runs attention --runs bf16:0 --out {out}",
    "-m bench.gpu.recipes --recipes bf16,rowwise,delayed_e5m2_margin_1 --out {out}" + ("" if GPU else " --cpu"),
    f"{TORCHRUN} bench.gpu.fsdp",
    f"{TORCHRUN} bench.gpu.fsdp --channels 1,2",
    f"{TORCHRUN} bench.gpu.tensor_parallel --only octavo",
]
COMMANDS_OF_A_GPU = [
    "-m bench.gpu.serve --only serve",
    "-m bench.gpu.serve --only kv-cache",
    "-m bench.gpu.linears",
    "-m bench.gpu.attention",
    "-m bench.gpu.runs attention --runs 'bf16:0,bf16 + FP8 attention:0' --out {out} --merge {out}",
]


def main() -> None:
    words = sys.argv[1:]
    commands = [*COMMANDS, *(COMMANDS_OF_A_GPU if GPU else [])]
    chosen = [command for command in commands if not words or any(word in command for word in words)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = sum(not good for good in pool.map(run, chosen))
    print(f"{len(chosen) - failed} of {len(chosen)} ran")
    sys.exit(failed > 0)


def run(command: str) -> bool:
    """Run a command; print its time, and the end of what it said if it failed."""
    began = time.monotonic()
    paths = ["src", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "2"} if GPU else {"TORCHDYNAMO_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as out:
        words = ["timeout", str(LONGEST), sys.executable, *shlex.split(command.replace("{out}", out)), "--quick"]
        ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    good, said = ended.returncode == 0, ended.stdout.splitlines()
    print(f"{'ran' if good else 'FAILED'} {time.monotonic() - began:6.1f} s  {command}", flush=True)
    if not good:
        print("    " + "\n    ".join(said[-15:]), flush=True)
    return good


if __name__ == "__main__":
    main()
