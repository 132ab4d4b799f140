"""Training steps as `octavo plan` predicts them and as `octavo train` runs them: memory and time of six configurations.

BF16 and FP8, with and without activation checkpointing, on one and on two GPUs, of a model: six blocks of Llama-3-8B's
shape, a Llama of a billion parameters, or one of Llama-3.2-3B's shape. Each configuration is trained by processes of
its own. A step is whole, with clipping and AdamW, and its time is the mean of five steps in a row, of which the median
of three is taken. Five steps more show the time of the host: each begins with an idle GPU, and is not waited for. Two
are profiled: their kernels by kind, and the time without any.

`--largest` looks for the largest batch on one GPU of 80 GB, by recipe, of the model of a billion parameters with the
vocabulary of Llama 3. It takes the same steps on random tokens.

`--hosted` takes whole steps of a Llama of Llama-3.2-3B's blocks whose masters and AdamW are on the host, in BF16 and in
FP8. Each mode is a run in a process of its own, one after the other, so the host has the state of one: 16 bytes a
parameter, 45 GB, of which the masters and the gradients, 23 GB, are pinned. A step has 16,384 tokens. It is timed with
clipping, without, where a weight is updated during the backward pass, and with four micro-batches, until the last
weight is updated. `update_seconds` is what the host still needs when the GPU has computed a step: with clipping all of
AdamW. The losses of the first steps of all modes must agree.

    python -m bench.gpu.plan [--model 3b] [--only 1]                  about five minutes on two GPUs
    python -m bench.gpu.plan --largest                                about a minute on one
    python -m bench.gpu.plan --hosted                                 two or three on one, with 16 cores and 64 GB
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Results, Row, benchmark, host_once, once, sized
from bench.gpu.ranks import profiled
from octavo.nn.parallel_weights import local_part
from octavo.plan.cases import TrainingPlan, built_in_architecture
from octavo.plan.setup import make_setup
from octavo.rates.measured import known_gpus
from octavo.scales import cast_once
from octavo.train.config import Config
from octavo.train.loss import next_token_loss
from octavo.train.model import make_trained_model
from octavo.train.optimizer import clip_gradients, make_optimizer
from octavo.train.processes import Degrees, collect_between_steps, peak_memory, rank, run_in_group, training_console
from octavo.train.trainer import Trainer, start_run

WARM, STRETCHES, STEPS = sized((6, 3, 5), (1, 1, 1))  # steps before the clock starts; then stretches of so many steps
LLAMA = Config(model="llama", heads=32, kv_heads=8).change(**{"compile.blocks": True, "steps": 1000})
MODELS = {
    "8b": LLAMA.change(layers=6, width=4096, mlp_width=14336, tied=False, context=4096, batch=2),
    "1b": LLAMA.change(layers=16, width=2048, mlp_width=8192, tied=True, context=2048, batch=4),
    "3b": LLAMA.change(layers=28, width=3072, heads=24, mlp_width=8192, tied=True, context=4096, batch=2),
}
VOCABULARY = sized(128_256, 512)  # of the largest batch
LARGEST = {"loss.chunk": 1024}  # its settings: few logits at a time
Configuration = tuple[int, str, str]  # GPUs, recipe, and activation checkpointing
CONFIGURATIONS: list[Configuration] = [
    (1, "bf16", "none"),
    (1, "rowwise", "none"),
    (1, "bf16", "full"),
    (1, "rowwise", "selective"),
    (2, "bf16", "none"),
    (2, "rowwise", "full"),
]
AIMS = {"memory": 0.05, "time": 0.10}  # the largest relative errors that the plan should have


def configured(model: str, gpus: int, recipe: str, checkpointing: str) -> Config:
    small = {"layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "mlp_width": 384, "context": 64, "device": DEVICE}
    base = MODELS[model].change(**sized({}, small))
    return base.change(recipe=recipe, batch=base.batch * gpus, **{"activation_checkpointing.mode": checkpointing})


def measure(config: Config, gpus: int) -> Row:
    """What the processes of a configuration measure, or the error that ended them."""
    with tempfile.TemporaryDirectory() as folder:
        settings, result = Path(folder) / "settings.json", Path(folder) / "result.json"
        settings.write_text(json.dumps(config.change(out=f"{folder}/run").to_dict()))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m"]
        words = [*launch, "bench.gpu.plan", "--worker", str(settings), *sized([], ["--quick"])]
        code = subprocess.run(words).returncode
        return json.loads(result.read_text()) if code == 0 else {"error": f"exit code {code}"}


def work(settings: Path) -> None:
    """Train as `octavo train` does, without saving, and write the peak memory, and the times of steps and kernels."""
    trainer = start_run(Config.from_dict(json.loads(settings.read_text())), training_console())
    with trainer.lock, collect_between_steps(), cast_once(trainer.model):
        once(trainer.step, WARM)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(once(trainer.step, STEPS) / 1e3 for _ in range(STRETCHES))
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        host = [host_once(trainer.step) / 1e3 for _ in range(STEPS)]
        found: Row = {"peak_bytes": peak, "seconds": seconds, "host_seconds": statistics.median(host)}
        found["kernels_ms"] = profiled(trainer.step)
    if rank() == 0:
        settings.with_name("result.json").write_text(json.dumps(found))


def largest_of(config: Config) -> dict[str, Any]:
    """The peaks of two batches and the largest batch, with the model of `config` alone on the GPU."""
    torch._dynamo.reset()
    before, device = harness.allocated(), torch.device(DEVICE)
    model, loss_of, *_ = make_trained_model(config, VOCABULARY, Path("no folder"), device, Degrees())
    optimizer = make_optimizer(model, config)

    def step(batch: int) -> None:
        pair = torch.randint(VOCABULARY, (2, batch, config.context), device=device)
        loss = next_token_loss(model, (pair[0], pair[1]), device, config.precision, loss_of)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()

    with cast_once(model):
        return harness.largest_batch(step, (4, 8), before, optimizer)


def with_plan(row: Row) -> Row:
    """A row of results with the figures of the plan as it is now, which may not be those of the day of the run."""
    wanted: Configuration = row["gpus"], row["recipe"], row["checkpointing"]
    if wanted not in CONFIGURATIONS:
        raise ValueError(f"no configuration of bench.gpu.plan has the recipe, checkpointing and GPUs of {row}")
    config, gpu = configured(row["model"], *wanted), known_gpus()[row["gpu"]]
    plan = TrainingPlan(make_setup(built_in_architecture(config), config, gpu, row["gpus"]))
    memory, time = plan.memory, plan.time
    figures = {"peak_bytes": memory.peak, "seconds": time.total, "memory": memory.parts, "time": time.parts}
    errors = {} if "error" in row else {"time": time.total / row["seconds"] - 1}
    if row.get("peak_bytes"):
        errors["memory"] = memory.peak / row["peak_bytes"] - 1
    return row | {"planned": figures | {"host_seconds": time.host}, "errors": errors}


# --- Masters on the host ---------------------------------------------------------------------------------------

TINY = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "mlp_width": 128, "context": 32, "compile.blocks": False}
HOSTED = MODELS["3b"].change(batch=4, device=DEVICE, **{"watch.interval": 0}, **sized({}, TINY))
HOST_MODES: dict[str, dict[str, Any]] = {
    "BF16, masters on the host": {"optimizer.masters": "host", "recipe": "bf16"},
    "rowwise, masters on the host": {"optimizer.masters": "host", "recipe": "rowwise"},
}
KINDS: dict[str, tuple[dict[str, Any], int]] = {  # settings, and steps that are timed
    "clipped": ({}, sized(3, 1)),
    "unclipped": ({"clip": 0.0}, sized(2, 1)),
    "accumulated": ({"accumulate": 4}, 1),
}
HOST_WARM = 2  # steps: the first compiles, and touches all memory
pool = cache(lambda: 0.02 * torch.randn(sized(1 << 24, 1 << 12), generator=torch.Generator().manual_seed(0)))


@torch.no_grad()
def fill(t: Any, *args: Any, **kwargs: Any) -> None:
    """Numbers of a pool in place of drawn ones, which take one core 20 seconds for each billion."""
    for part in () if t.is_meta else torch.split(local_part(t).view(-1), pool().numel()):
        part.copy_(pool()[: part.numel()])


def measure_hosted(mode: str) -> Row:
    """The row of a mode."""
    torch._dynamo.config.recompile_limit = 64
    drawn = [mock.patch(f"torch.nn.init.{name}", fill) for name in ("normal_", "kaiming_uniform_")]
    with tempfile.TemporaryDirectory() as out, collect_between_steps():
        with drawn[0], drawn[1]:
            trainer = start_run(HOSTED.change(out=f"{out}/run", **HOST_MODES[mode]), training_console())
        with trainer.lock:
            losses = [float(trainer.step()[0]) for _ in range(HOST_WARM)]
            kinds = {kind: time_steps(trainer, *chosen) for kind, chosen in KINDS.items()}
            parameters = sum(p.numel() for p in trainer.model.parameters())
    host = peak_memory(torch.device("cpu"))
    return {"mode": mode, "parameters": parameters, "losses": losses, "host_bytes": host, **kinds}


def time_steps(trainer: Trainer, settings: dict[str, Any], steps: int) -> Row:
    """The median seconds of steps, and the most memory that the GPU takes in one."""
    config = trainer.config.change(accumulate=1, clip=1.0).change(**settings)
    trainer.config = config
    if trainer.state.hosted is not None:
        trainer.state.hosted.config = config
    times: list[tuple[float, float]] = []
    peak = harness.peak_of(lambda: times.extend(time_step(trainer) for _ in range(steps)), 0, warmup=0)
    seconds, waited = (statistics.median(each) for each in zip(*times, strict=True))
    rate = config.accumulate * HOSTED.batch * HOSTED.context / seconds
    return {"seconds": seconds, "update_seconds": waited, "tokens_per_second": rate, "peak_bytes": peak}


def time_step(trainer: Trainer) -> tuple[float, float]:
    """The seconds of a step, and of them those after the GPU's work."""
    began = time.perf_counter()
    trainer.step()
    computed = time.perf_counter()
    if trainer.state.hosted is not None:
        trainer.state.hosted.wait()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    return ended - began, ended - computed


def hosted() -> Results:
    """What there is after each mode."""
    rows: list[Row] = []
    for mode in HOST_MODES:
        rows.append(row := harness.in_new_process(partial(measure_hosted, mode)))
        assert all(abs(a / b - 1) < 0.02 for a, b in zip(row["losses"], rows[0]["losses"], strict=True)), rows
        yield "gpu_offload", {"tokens": HOSTED.batch * HOSTED.context, "cores": torch.get_num_threads(), "rows": rows}


@benchmark(model="8b", only=int, largest=False, hosted=False, worker=Path)
def main(options: Options) -> Results:
    """--only: the configurations on so many GPUs. --worker: train by the settings in this file."""
    if options.worker:
        run_in_group(lambda: work(options.worker))
        return
    if options.hosted:
        yield from hosted()
        return
    if options.largest:
        found = {}
        for recipe in ("bf16", "rowwise"):
            config = configured("1b", 1, recipe, "none").change(**LARGEST)
            found[recipe] = largest_of(config)
            yield "gpu_largest_batch", {"context": config.context, "vocabulary": VOCABULARY, "recipes": found}
        return
    there, name = max(torch.cuda.device_count(), 1), f"gpu_plan_{options.model}"
    rows: list[Row] = []
    device = "h200" if DEVICE == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "")
    gpu = next(key for key in known_gpus() if key in device)
    chosen = [each for each in CONFIGURATIONS if each[0] <= there and options.only in (None, each[0])]
    for each in chosen[sized(0, -1) :]:
        names = dict(zip(("gpus", "recipe", "checkpointing"), each, strict=True))
        found = measure(configured(options.model, *each), each[0])
        rows.append(with_plan({"model": options.model, **names, "gpu": gpu, **found}))
        yield name, {"steps": STRETCHES * STEPS, "aims": AIMS, "rows": rows}
