"""What does FP8 cost in loss? Branches of one trunk, in BF16, in FP8, and a disturbed BF16 twin. On one GPU.

    python -m bench.gpu.loss all FOLDER                   everything, in several processes on the GPU
    python -m bench.gpu.loss merge FOLDER                 FOLDER to bench/results/gpu_loss_SIZE.json, or cpu_

`all` starts the other commands: `prepare`, `trunk`, `rates`, `branch MODE:ORDERS`, `frozen MODES:ORDERS` and
`gradients MODES`. Each writes a file when a run ends and skips runs whose file is there, so `all` goes on where it was
ended. The settings of the first command stay with FOLDER.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.gpu.harness import in_processes, write_result
from bench.gpu.loss import result, training
from bench.gpu.loss.model import CONFIGS
from bench.gpu.loss.training import SHARE, Study
from octavo.checkpoint.files import replace_file

SIZES = [name for name, config in CONFIGS.items() if config.schedule == "wsd"]
MAIN = ("bf16", "twin", "rowwise", "rowwise_y_only", "torchao_rowwise", "torchao_tensorwise")
OTHERS = (
    "tensorwise", "delayed_e5m2_margin_1", "rowwise_dw_bf16", "blockwise", "tensorwise_e4m3", "rowwise_exact",
    "mxfp8", "groupwise", "tensorwise_rotated",
)  # fmt: skip
FROZEN = ",".join(("bf16", "rowwise", "torchao_rowwise", "torchao_tensorwise", *OTHERS))
PLAN = (
    "trunk", "rates", *(f"branch {mode}:7,8,9,10" for mode in MAIN), f"frozen {FROZEN}:7,8,9,10", f"gradients {FROZEN}",
    *(f"branch {mode}:7,8" for mode in OTHERS),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=(*COMMANDS, "all", "merge"))
    parser.add_argument("folder", type=Path, help="the files of the study")
    parser.add_argument("runs", nargs="?", default="", metavar="MODES:ORDERS", help="of branch and frozen")
    parser.add_argument("--size", choices=SIZES, default="30m", help="the model, of a new folder")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run from its start, of a new folder")
    parser.add_argument("--share", type=float, help="of the steps, before the branches; of a new folder")
    parser.add_argument("--rate", type=float, help="of the branches, over the trunk's learning rate; of a new folder")
    parser.add_argument("--processes", type=int, default=6, help="that `all` runs at a time")
    parser.add_argument("--plan", default="; ".join(PLAN), help="the commands of `all`, separated by semicolons")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    study = study_of(folder, size=options.size, steps=options.steps, share=options.share, rate=options.rate)
    if options.command == "all":
        plan = [words.strip() for words in options.plan.split(";")]
        sys.exit(run_all(folder, study, plan, options.processes))
    if options.command == "merge":
        found = result.merge(folder, study)
        where = "gpu" if found["machine"]["gpu"] else "cpu"
        share = "" if study.share == SHARE else f"_at_{100 * study.share:.0f}"
        rate = "" if study.rate == 1 else f"_rate_{study.rate:g}"
        print(write_result(f"{where}_loss_{study.size}{share}{rate}", found))
    else:
        torch._dynamo.config.recompile_limit = 64
        call_of(options.command, options.runs, folder, study)()


def study_of(folder: Path, *, size: str = "30m", **options: float | None) -> Study:
    """The study that `folder` was begun with; of this size and these steps, share and rate if it is new."""
    path = folder / "size.json"
    begun = {"size": size, "steps": CONFIGS[size].steps, "share": SHARE, "rate": 1.0}
    given = {name: value for name, value in options.items() if value is not None}
    if not path.exists():
        replace_file(path, json.dumps(begun | given))
    chosen = begun | json.loads(path.read_text())
    for name, value in given.items():
        if value != chosen[name]:
            raise SystemExit(f"{folder} was begun with {chosen[name]} {name}: leave --{name} out, or give a new folder")
    steps = int(chosen["steps"])
    config = CONFIGS[chosen["size"]].change(steps=steps, decay_steps=steps, warmup=max(steps // 20, 1))
    return Study(chosen["size"], config, float(chosen["share"]), float(chosen["rate"]))


# The commands of a stage need the files of those before it: the tokens, the trunk and the final weights.
COMMANDS: dict[str, tuple[int, Callable[..., None]]] = {
    "prepare": (0, training.prepare),
    "trunk": (1, training.train_trunk),
    "rates": (2, training.check_rates),
    "branch": (2, training.train_branches),
    "gradients": (3, training.compare_gradients),
    "frozen": (3, training.evaluate_frozen),
}


def call_of(command: str, runs: str, folder: Path, study: Study) -> Callable[[], None]:
    """A command, with the modes and the orders of `runs` where it has them."""
    modes, _, orders = runs.partition(":")
    parts = modes.split(","), [int(order) for order in orders.split(",") if order]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return partial(COMMANDS[command][1], folder, study, device, *(part for part in parts if any(part)))


def run_all(folder: Path, study: Study, plan: list[str], processes: int) -> int:
    """Prepare the text and run the commands of `plan`, stage by stage, `processes` at a time; the number that failed.

    One process leaves the GPU idle while its host launches kernels.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"
    commands, failed = [words.partition(" ") for words in ("prepare", *plan)], 0
    for stage in range(4):
        chosen = [call_of(name, runs, folder, study) for name, _, runs in commands if COMMANDS[name][0] == stage]
        failed += in_processes(processes, chosen)
    return failed


if __name__ == "__main__":
    main()
