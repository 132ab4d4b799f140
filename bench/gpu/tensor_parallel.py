"""Blocks of Llama-3-70B's shape under tensor parallelism, 8,192 tokens, BF16 weights: forward and backward.

Every mode is in memory, and they take turns. First the outputs and the gradients of the input of each mode are compared
with those of BF16. The time of a step is that of the slowest rank.

    torchrun --nproc-per-node 2 -m bench.gpu.tensor_parallel [--layers 2] [--only octavo] [--rounds 8] [--seconds 300]
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import octavo
from bench import record
from bench.gpu.communication import profiled
from bench.gpu.harness import Passes, decibels, draw_matrices, interleaved, own_code, summary
from bench.gpu.llama import TOKENS
from bench.gpu.parallel_blocks import CONFIG, SplitStack, split
from bench.gpu.peers import use_torchao
from bench.gpu.ranks import Deadline, bandwidth, chosen, read_options, say, slowest, start
from octavo.distributed import tensor_parallel
from octavo.models.llama import Llama, LlamaConfig

BASE, ASYNC = "bf16", ", async"


class OctavoStack(nn.Module):
    """The blocks of a whole Llama, which `octavo.distributed.tensor_parallel` takes."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.llama = Llama(config)
        self.layers = self.llama.model.layers

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        delta = None
        for block in self.layers:
            x, delta = block(x, delta, cos, sin, None)
        return x if delta is None else x + delta


def _octavo(model: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(model, OctavoStack)
    octavo.convert(model.llama, "rowwise")
    tensor_parallel(model.llama, mesh)


def _torchao(recipe: str) -> Callable[[nn.Module, DeviceMesh], None]:
    def make(model: nn.Module, mesh: DeviceMesh) -> None:
        use_torchao(model, recipe)
        split(model, mesh, torchao=recipe == "tensorwise")  # its styles gather tensorwise activations only

    return make


@dataclass(frozen=True)
class Mode:
    stack: Callable[[LlamaConfig], nn.Module]
    split: Callable[[nn.Module, DeviceMesh], None]
    overlap: bool = False  # Inductor's asynchronous tensor parallelism


MODES = {
    BASE: Mode(SplitStack, split),
    BASE + ASYNC: Mode(SplitStack, split, overlap=True),
    "octavo: rowwise": Mode(OctavoStack, _octavo),
    "torchao: rowwise": Mode(SplitStack, _torchao("rowwise")),
    "torchao: rowwise" + ASYNC: Mode(SplitStack, _torchao("rowwise"), overlap=True),
    "torchao: tensorwise, gathered in FP8": Mode(SplitStack, _torchao("tensorwise")),
}


class Runner(Passes):
    """The model of a mode, and its step on this rank's part of the sequence."""

    def __init__(
        self, mode: Mode, config: LlamaConfig, tokens: int, mesh: DeviceMesh, *, compiled: bool = True
    ) -> None:
        device = torch.device(mesh.device_type)
        with torch.device(device):
            model = mode.stack(config).to(torch.bfloat16)
        self.layers: nn.ModuleList = model.layers  # type: ignore[assignment]
        draw_matrices(self.layers)
        mode.split(model, mesh)
        options = {"_micro_pipeline_tp": True} if mode.overlap else None
        for block in self.layers if compiled else ():
            block.__class__ = own_code(type(block))
            block.compile(fullgraph=True, dynamic=False, options=options)
        super().__init__(model, config, tokens, device, (mesh.get_local_rank(), mesh.size()))


def main() -> None:
    options = read_options(__doc__, layers=2, rounds=8)
    deadline = Deadline(options.seconds)
    torch._dynamo.config.recompile_limit = 64
    device = start()
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    config = replace(CONFIG, layers=options.layers)
    Bench(config, TOKENS, mesh, options.rounds, deadline).run(chosen(MODES, BASE, options.only))
    distributed.destroy_process_group()


@dataclass
class Bench:
    """The setting of all modes, the models that run, and the rows so far."""

    config: LlamaConfig
    tokens: int
    mesh: DeviceMesh
    rounds: int
    deadline: Deadline
    compiled: bool = True
    runners: dict[str, Runner] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, names: list[str]) -> None:
        """Measure the modes and write the result; then those that overlap, which take turns with BF16 too."""
        rate = bandwidth()
        for overlap in (False, True):
            part = [name for name in names if MODES[name].overlap == overlap]
            for name in part:
                if self.deadline.allows(name):
                    self.build(name)
            there = [name for name in part if name in self.runners]
            if there:
                self.rows += [row for row in self.measure({BASE, *there}) if row["mode"] in there]
            self.write(rate)

    def build(self, name: str) -> None:
        """Add the model of a mode that agrees with BF16, or the row of one that does not run."""
        try:
            runner = Runner(MODES[name], self.config, self.tokens, self.mesh, compiled=self.compiled)
            actual = runner.step()
            expected = self.runners[BASE].step() if self.runners else actual
            found = [decibels(e, a) for e, a in zip(expected, actual, strict=True)]
            found = [-db for db in slowest([-db for db in found])]  # the least over the ranks, which decide alike
            say(f"{name:40} output {found[0]:.1f} dB, gradient of the input {found[1]:.1f} dB")
            if not all(db > 6 for db in found):
                raise RuntimeError(f"output and gradient are off: {found} dB")
            self.runners[name] = runner
        except Exception as error:  # a mode that does not run here must not end the others
            text = f"{type(error).__name__}: {str(error)[:500]}"
            self.rows.append({"mode": name, "error": text})
            print(f"{name}: {text}", flush=True)

    def measure(self, names: set[str]) -> list[dict[str, Any]]:
        """A row a mode: milliseconds, and the speed as a multiple of that of BF16 in the same round."""
        steps = {name: runner.step for name, runner in self.runners.items() if name in names}
        times = {name: slowest(each) for name, each in interleaved(steps, rounds=self.rounds, repeat=4).items()}
        rows = []
        for name, found in times.items():
            ratio = statistics.median(b / a for a, b in zip(found, times[BASE], strict=True))
            row = {"mode": name, **summary(found), "ratio": ratio, "rounds": found, "kernels": profiled(steps[name])}
            say(f"{name:40} {row['median']:8.2f} ms  {ratio:.3f} of {BASE}  {row['kernels']}")
            rows.append(row)
        return rows

    def write(self, rate: float) -> None:
        if distributed.get_rank() != 0:
            return
        sizes = ("layers", "width", "heads", "kv_heads", "mlp_width")
        setting = {name: getattr(self.config, name) for name in sizes} | {"tokens": self.tokens}
        world = self.mesh.size()
        result = {"setting": setting | {"world": world}, "bytes_per_second": rate, "modes": self.rows}
        record.write(f"gpu_tensor_parallel_{world}_gpus", result)


if __name__ == "__main__":
    main()
