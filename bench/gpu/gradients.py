"""The gradients of a Llama after its first steps, by kind of parameter: BF16 and FP8 against FP32, on one GPU.

A model is trained in BF16 for some steps. Then every mode computes the gradient of the same batch at these weights.
For a gradient g and that in FP32, e, the error is |g - e| / |e|, and the projection is (g · e) / (e · e). It is 1 if g
is e with noise beside it, and less if a part of e is lost. Then each mode trains two steps in `cast_once`. The loss
with the cached weights must be that without them.

    python -m bench.gpu.gradients [--model 300m] [--steps 40] [--modes bf16,rowwise,torchao_tensorwise] [--out FOLDER]
"""

import argparse
import gc
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.gpu.gpt_parity import settings
from bench.gpu.gpt_trainer import Data, make_trainer, restart, trainer_of
from bench.gpu.pretrain import CONFIGS, shared_data
from octavo.nn import cast_once
from octavo.train.config import Config
from octavo.train.loop import Trainer

Gradients = dict[str, Tensor]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="300m")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps in BF16 before the gradients")
    parser.add_argument("--modes", default="bf16,rowwise,tensorwise,torchao_tensorwise")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"), help="folder of tokens.npz")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    config = CONFIGS[options.model]
    options.out.mkdir(parents=True, exist_ok=True)
    data = shared_data(config, options.out / "tokens.npz", rank=0)
    rows = measure(options.modes.split(","), config, data, options.steps)
    result = {"model": options.model, "settings": settings(config), "after_steps": options.steps, "modes": rows}
    print(record.write("gpu_gradients", result))


def measure(modes: Iterable[str], config: Config, data: Data, steps: int) -> list[Row]:
    weights, expected = start(config, data, steps)
    rows = []
    for mode in modes:
        trainer, converted = make_trainer(mode, config, data)
        restart(trainer, data, 0)
        actual = gradients(trainer, weights, steps)
        row: Row = {"mode": mode, "converted": converted, "kinds": compared(actual, expected), **cached_losses(trainer)}
        rows.append(row)
        print(mode, *(f"{kind} {found}" for kind, found in row["kinds"].items()), sep="\n    ", flush=True)
        print(f"    loss with cached weights {row['cached']}, without {row['fresh']}", flush=True)
        del trainer, actual
        torch._dynamo.reset()
        gc.collect()
    return rows


def start(config: Config, data: Data, steps: int) -> tuple[dict[str, Tensor], Gradients]:
    """The weights after `steps` steps in BF16, and the gradient there in FP32."""
    trainer, _ = make_trainer("bf16", config, data)
    restart(trainer, data, 0)
    for _ in range(steps):
        trainer.step()
    weights = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    del trainer
    torch._dynamo.reset()
    exact, _ = trainer_of("bf16", config.change(precision="fp32"), data)
    restart(exact, data, 0)
    return weights, gradients(exact, weights, steps)


def gradients(trainer: Trainer, weights: dict[str, Tensor], step: int) -> Gradients:
    """The gradient of the micro-batches of `step`, on the CPU."""
    trainer.model.load_state_dict(weights)
    with cast_once(trainer.model):
        trainer.passes(step)
    found = {name: p.grad.float().cpu() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.state.optimizer.zero_grad()
    return found


def compared(actual: Gradients, expected: Gradients) -> dict[str, dict[str, float]]:
    """The median and the largest error, and the median projection, by the last part of a layer's name."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for name, e in expected.items():
        g, e = actual[name].double(), e.double()
        error, projection = float((g - e).norm() / e.norm()), float((g * e).sum() / e.square().sum())
        kinds.setdefault(name.removesuffix(".weight").split(".")[-1], []).append((error, projection))
    return {
        kind: {
            "error": round(statistics.median(error for error, _ in found), 4),
            "largest": round(max(error for error, _ in found), 4),
            "projection": round(statistics.median(projection for _, projection in found), 4),
        }
        for kind, found in kinds.items()
    }


def cached_losses(trainer: Trainer) -> dict[str, float]:
    """The loss of a batch after two more steps, with the weights that `cast_once` has cached and without."""
    with cast_once(trainer.model):
        for _ in range(2):
            trainer.step()
        cached = float(trainer.passes(0))
    fresh = float(trainer.passes(0))
    return {"cached": cached, "fresh": fresh}


if __name__ == "__main__":
    main()
