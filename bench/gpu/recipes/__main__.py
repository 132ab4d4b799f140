"""One table of all recipes: the gap of the loss to BF16's, the SQNR of real operands, speed and peak memory.

For each seed all recipes start from the same weights and see the same batches, so a gap is of a pair of runs. The
interval of the mean gap is Student's, over seeds. Each part writes files to --out, and a run whose file is there is
skipped, so that the table can be made in several calls. Without --only all parts run, and the table is written.

    python -m bench.gpu.recipes                                             all GPUs of the machine
    python -m bench.gpu.recipes --only losses --seconds 480 --out FOLDER    a part
    python -m bench.gpu.recipes --merge FOLDER                              FOLDER to bench/results/recipes.json
    python -m bench.gpu.recipes --cpu                                       a small model, without speed and memory
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench import record
from bench.gpu.gpt_parity import check_alike, gaps
from bench.gpu.recipes import errors, losses, speed
from bench.gpu.recipes.variants import BASE, VARIANTS

PARTS = ("losses", "errors", "speed")


def main(arguments: list[str] | None = None) -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a small model on the CPU; no speed")
    parser.add_argument("--only", choices=PARTS, help="one part of the table")
    parser.add_argument("--recipes", default=",".join(VARIANTS), help="recipes, separated by commas")
    parser.add_argument("--seeds", type=int, default=5, help="runs with each recipe")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after so long")
    parser.add_argument("--processes", type=int, help="processes that train on each GPU (5), or on the CPU (1)")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"), help="folder of the files")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="combine the files in FOLDER")
    options = parser.parse_args(arguments)
    if options.merge:
        print(record.write("recipes", merge(options.merge)))
        return
    names = options.recipes.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise SystemExit(f"unknown recipe {unknown[0]!r}: choose some of {', '.join(VARIANTS)}")
    if options.cpu == torch.cuda.is_available():
        raise SystemExit("a machine without a GPU needs --cpu; one with a GPU takes it with CUDA_VISIBLE_DEVICES= only")
    torch._dynamo.config.recompile_limit = 64
    config = losses.CPU if options.cpu else losses.GPU
    config = config.change(steps=options.steps or config.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [options.only] if options.only else [part for part in PARTS if part != "speed" or not options.cpu]
    if "losses" in parts:
        deadline = began + options.seconds
        processes = options.processes or (1 if options.cpu else 5)
        losses.train_all(names, range(options.seeds), config, options.out, deadline, processes)
    if "errors" in parts:
        write(options.out, "errors", errors.measure(names, config, losses.tokens_of(config, options.out)))
    if "speed" in parts:
        write(options.out, "speed", speed.measure(names, speed.CONFIG, 8192))
    if not options.only:
        print(record.write("recipes", merge(options.out)))


def write(out: Path, name: str, result: dict[str, Any]) -> None:
    (out / f"{name}.json").write_text(json.dumps({"machine": record.facts(), **result}, indent=2) + "\n")


def merge(folder: Path) -> dict[str, Any]:
    """The files below `folder` as one result: the gaps of each recipe, and errors.json and speed.json where they are.

    A run whose loss is not finite is counted in "diverged", and is in no mean. If `folder` has no runs, its errors and
    speeds replace those of bench/results/recipes.json.

    Raises:
        ValueError: a run comes twice, runs have different settings or texts, or none is of BF16; errors or speeds are
            of several machines or commits.
    """
    files = {path: json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))}
    parts = {name: part for name in ("errors", "speed") if (part := part_of(name, files))}
    runs = [content for content in files.values() if "seed" in content]
    if parts and not runs:
        return {**json.loads((record.RESULTS / "recipes.json").read_text()), **parts}
    keys = [(run["mode"], run["seed"]) for run in runs]
    if not any(mode == BASE for mode, _ in keys) or len(set(keys)) < len(keys):
        raise ValueError(f"{folder} must hold each run once, those of {BASE} among them; it holds {sorted(keys)}")
    check_alike(runs)
    final = {(run["mode"], run["seed"]): run["final"] for run in runs if run["final"] is not None}
    bf16 = [loss for (mode, _), loss in final.items() if mode == BASE]
    first = runs[0]
    size = first["settings"]
    return {
        **{key: first[key] for key in ("machine", "settings", "corpus")},
        "tokens": size["steps"] * size["batch"] * size["context"],
        "bf16": {"losses": bf16, "spread": statistics.stdev(bf16) / statistics.mean(bf16) if len(bf16) > 1 else None},
        "recipes": {name: losses_of(name, runs, final) for name in VARIANTS if any(name == mode for mode, _ in keys)},
        **{name: parts.get(name) for name in ("errors", "speed")},
    }


def part_of(name: str, files: dict[Path, dict[str, Any]]) -> dict[str, Any] | None:
    """The rows of all files NAME.json: two GPUs can measure some recipes each, beside a BF16 of their own."""
    found = [content for path, content in files.items() if path.stem == name]
    if any(each | {"recipes": 0} != found[0] | {"recipes": 0} for each in found):
        raise ValueError(f"all files {name}.json must be of one machine, day, commit and size")
    rows = {recipe: row for each in found for recipe, row in each["recipes"].items()}
    return found[0] | {"recipes": rows} if found else None


def losses_of(name: str, runs: list[dict[str, Any]], final: dict[tuple[str, int], float]) -> dict[str, Any]:
    """The final losses of a recipe by seed, and its gap to BF16."""
    own = [run for run in runs if run["mode"] == name]
    ended = [run["seed"] for run in own if (name, run["seed"]) in final]
    paired = name != BASE and any((BASE, seed) in final for seed in ended)
    return {
        "gemms": own[0]["gemms"],
        "losses": {str(seed): final[name, seed] for seed in sorted(ended)},
        "diverged": len(own) - len(ended),
        "gap": gaps(final, name) if paired else None,
    }


if __name__ == "__main__":
    main()
