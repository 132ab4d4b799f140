"""Training steps of Llama-3-8B's shape under FSDP2: BF16, Octavo and torchao in one run, one process a GPU.

A step is whole: forward, backward, gradient reduction in FP32 and fused AdamW on FP32 weights, 8,192 tokens a GPU. The
gradients of each mode are compared with those of compiled BF16 first. Then the mode takes turns with compiled BF16, and
its ratio is the median over these turns. Where the memory does not hold both, BF16 runs first and last, and a ratio is
to the mean of these two. The time of a step is that of the slowest rank.

With `--only`, the other modes' rows of an earlier result stay in the file, each with the machine and commit of its own.

    torchrun --nproc-per-node 2 -m bench.gpu.fsdp [--layers 16] [--only torchao,FP8] [--rounds 6] [--seconds 560]
"""

import gc
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from bench import record
from bench.gpu import llama
from bench.gpu.communication import profiled
from bench.gpu.harness import interleaved, once, summary
from bench.gpu.modes import BASE
from bench.gpu.ranks import Deadline, Network, agreed, bandwidth, chosen, read_options, say, slowest, start
from bench.gpu.sharded import MODES, Runner, gradient_error, gradient_problem
from octavo.models.llama import LlamaConfig

REPEAT = 3  # steps between two readings of the clock
CHECKED_LAYERS = 2  # of the model whose gradients are compared
ROOM = 0.85  # of the GPU's memory, that two models at once may fill

Row = dict[str, Any]


class Bench:
    """The rows of the modes so far, and the model of BF16 that they are compared with."""

    def __init__(self, config: LlamaConfig, tokens: int, rounds: int, device: torch.device) -> None:
        self.config, self.tokens, self.rounds, self.device = config, tokens, rounds, device
        self.base: Runner | None = None
        self.expected: list[Tensor] = []
        self.rows: list[Row] = []
        self.earlier: list[Row] = []  # of modes that this run does not measure

    def measure(self, name: str) -> None:
        """Add the row of a mode. One that fails adds its error; the others go on."""
        began = time.monotonic()
        row: Row = {"mode": name, "gradient_error": self.gradient_error(name)}
        before = allocated()
        runner = Runner(name, self.config, self.tokens, self.device)
        for _ in range(2):
            runner.step()
        row["seconds_to_build"] = time.monotonic() - began
        row |= memory_and_bytes(runner, before)
        row |= self.times(name, runner)
        row["kernels"] = profiled(runner.step)
        row["optimizer_ms"] = optimizer_time(runner)
        problem = gradient_problem(name, row["gradient_error"])
        self.rows.append({"mode": name, "error": problem, "measured": row} if problem else row)
        if name == BASE and self.base is None and self.room_for_two():
            self.base = runner
        say(line(row))

    def gradient_error(self, name: str) -> float:
        """How far the gradients of a mode are from those of BF16, in a model of a few layers.

        With random weights, the rounding errors of FP8 grow from layer to layer until they are as large as the numbers.
        """
        config = replace(self.config, layers=min(self.config.layers, CHECKED_LAYERS))
        grads = Runner(name, config, self.tokens, self.device).gradients()
        self.expected = self.expected or grads
        return gradient_error(self.expected, grads)

    def times(self, name: str, runner: Runner) -> Row:
        """The milliseconds of a step, and its speed as a multiple of that of BF16."""
        beside = {} if self.base is None else {BASE: self.base.step}
        found = interleaved({**beside, name: runner.step}, rounds=self.rounds, repeat=REPEAT, warmup=1)
        times = {mode: slowest(each) for mode, each in found.items()}
        speed = self.tokens * 1e3 / statistics.median(times[name])
        row = {**summary(times[name]), "tokens_per_second": speed, "rounds": times}
        if name != BASE and beside:
            row["ratio"] = statistics.median(b / a for a, b in zip(times[name], times[BASE], strict=True))
        return row

    def room_for_two(self) -> bool:
        if self.device.type == "cpu":
            return True
        whole = torch.cuda.get_device_properties(self.device).total_memory
        return bool(agreed(2 * self.rows[0]["peak_bytes"] < ROOM * whole))

    def finish(self) -> None:
        """The ratios of modes that had no BF16 beside them, to the mean of its first and its last time."""
        base = [row["median"] for row in self.rows if row["mode"] == BASE]
        for row in self.rows:
            if "median" in row:
                row.setdefault("ratio", statistics.mean(base) / row["median"])

    def result(self) -> dict[str, Any]:
        config = self.config
        setting = {name: getattr(config, name) for name in ("layers", "width", "heads", "kv_heads", "mlp_width")}
        setting |= {"vocabulary": config.vocabulary, "tokens": self.tokens, "world": distributed.get_world_size()}
        return {"setting": setting, "modes": [*self.rows, *self.earlier]}


def memory_and_bytes(runner: Runner, before: int) -> Row:
    """The peak memory of a step, and the bytes of this rank's shards in its collectives."""
    network: Network = runner.network
    network.gathered = network.reduced = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    runner.step()
    peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0
    return {"peak_bytes": peak, "gathered_bytes": network.gathered, "reduced_bytes": network.reduced}


def optimizer_time(runner: Runner) -> float:
    """Milliseconds of the optimizer's step alone."""
    runner.model(*runner.batch).backward()
    runner.optimizer.step()
    found = min(slowest([once(runner.optimizer.step, REPEAT) for _ in range(2)]))
    runner.optimizer.zero_grad()
    return found


def allocated() -> int:
    gc.collect()  # the models of earlier modes
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def line(row: Row) -> str:
    parts = [f"{row['mode']:36} {row['median']:8.1f} ms, {row['tokens_per_second']:8.0f} tokens/s a GPU"]
    parts.append(f"{row['ratio']:.3f} of {BASE}" if "ratio" in row else "")
    parts.append(f"{row['peak_bytes'] / 2**30:.1f} GiB, gathered {row['gathered_bytes'] / 1e9:.3f} GB")
    parts.append(f"off by {row['gradient_error']:.3f}, built in {row['seconds_to_build']:.0f} s")
    parts.append(str({kind: round(ms, 1) for kind, ms in row["kernels"].items()}))
    return ", ".join(part for part in parts if part)


def main() -> None:
    options = read_options(__doc__, layers=16, rounds=6)
    deadline = Deadline(options.seconds)
    torch._dynamo.config.recompile_limit = 64
    device = start()
    config = replace(llama.CONFIG, layers=options.layers)
    run(chosen(MODES, BASE, options.only), Bench(config, llama.TOKENS, options.rounds, device), deadline)
    distributed.destroy_process_group()


def run(names: list[str], bench: Bench, deadline: Deadline) -> None:
    """Measure the modes, and write the result after each."""
    world = distributed.get_world_size()
    links = {"bytes_per_second": bandwidth()} if world > 1 else {}
    say(links)
    bench.earlier = [row for row in record.rows_before(file_name(bench), "modes") if row["mode"] not in names]
    for name in names:
        attempt(bench, name, deadline)
        write(bench, links)
    if bench.base is None and len(names) > 1:
        attempt(bench, BASE, deadline)
    bench.finish()
    write(bench, links)


def attempt(bench: Bench, name: str, deadline: Deadline) -> None:
    if not deadline.allows(name):
        return
    try:
        bench.measure(name)
    except Exception as error:  # a mode that does not run here must not end the others; it fails on every rank alike
        text = f"{type(error).__name__}: {str(error)[:500]}"
        bench.rows.append({"mode": name, "error": text})
        print(f"{name}: {text}", flush=True)


def write(bench: Bench, links: dict[str, float]) -> None:
    if distributed.get_rank() == 0:
        record.write(file_name(bench), {**bench.result(), **links})


def file_name(bench: Bench) -> str:
    return f"gpu_fsdp_{bench.config.layers}_layers_{distributed.get_world_size()}_gpus"


if __name__ == "__main__":
    main()
