"""Blocks of Llama-3-70B's shape under tensor parallelism, 8,192 tokens, BF16 weights: forward and backward.

BF16 and torchao are split by PyTorch's styles, with the plan of torchtitan: norms and residual sums on a part of the
sequence, attention and the MLP on a part of their heads and features. The input of q, k, v (of gate and up) is gathered
once.

First the outputs and the gradients of the input of each mode are compared with those of BF16. Then the mode takes turns
with BF16 (`bench.gpu.ranks.Bench`).

    torchrun --nproc-per-node 2 -m bench.gpu.tensor_parallel [--layers 2] [--only octavo] [--rounds 8]
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel

import octavo
from bench.gpu import harness, llama
from bench.gpu.harness import DEVICE, Options, Results, Row, benchmark, sized
from bench.gpu.llama import Fused, Plain
from bench.gpu.ranks import Bench, bandwidth, chosen, setting_of, slowest, start
from bench.gpu.variants import use_torchao
from octavo.distributed import tensor_parallel
from octavo.models.llama import Llama, LlamaConfig

LLAMA_70B = replace(llama.LLAMA, vocabulary=128, width=8192, heads=64, kv_heads=8, mlp_width=28672)
CONFIG = sized(LLAMA_70B, replace(llama.SMALL, heads=4, kv_heads=2))
BASE, ASYNC = "bf16", ", async"


def split(model: nn.Module, mesh: DeviceMesh, *, torchao: bool = False) -> None:
    """Apply PyTorch's styles to every block; or torchao's, which gather tensorwise activations in FP8."""
    styles: tuple[Any, ...] = parallel.ColwiseParallel, parallel.RowwiseParallel, parallel.PrepareModuleInput
    if torchao:
        ao: Any = importlib.import_module("torchao.float8.float8_tensor_parallel")
        styles = ao.Float8ColwiseParallel, ao.Float8RowwiseParallel, ao.PrepareFloat8ModuleInput
    column, row, gather = styles
    part, whole = Shard(1), Replicate()
    plan = {
        "norm1": parallel.SequenceParallel(),
        "attention": gather(input_layouts=(part, None, None), desired_input_layouts=(whole, None, None)),
        **{f"attention.{name}": column() for name in "qkv"},
        "attention.o": row(output_layouts=part),
        "norm2": parallel.SequenceParallel(),
        "mlp": gather(input_layouts=(part,), desired_input_layouts=(whole,)),
        "mlp.gate": column(),
        "mlp.up": column(),
        "mlp.down": row(output_layouts=part),
    }
    for block in model.modules():
        if isinstance(block, llama.PlainBlock):
            parallel.parallelize_module(block, mesh, plan)


class OctavoStack(Fused):
    """The blocks of a whole Llama, which `octavo.distributed.tensor_parallel` takes."""

    def __init__(self, config: LlamaConfig) -> None:
        nn.Module.__init__(self)
        self.llama = Llama(config)
        self.layers = self.llama.model.layers


def _octavo(model: Any, mesh: DeviceMesh) -> None:
    octavo.convert(model.llama, "rowwise")
    tensor_parallel(model.llama, mesh)


def _torchao(model: nn.Module, mesh: DeviceMesh, *, recipe: str) -> None:
    use_torchao(model, recipe)
    split(model, mesh, torchao=recipe == "tensorwise")  # its styles gather tensorwise activations only


@dataclass(frozen=True)
class Mode:
    stack: Callable[[LlamaConfig], nn.Module]
    split: Callable[[nn.Module, DeviceMesh], None]
    overlap: bool = False  # Inductor's asynchronous tensor parallelism


_rowwise = partial(_torchao, recipe="rowwise")
MODES = {
    BASE: Mode(Plain, split),
    BASE + ASYNC: Mode(Plain, split, overlap=True),
    "octavo: rowwise": Mode(OctavoStack, _octavo),
    "torchao: rowwise": Mode(Plain, _rowwise),
    "torchao: rowwise" + ASYNC: Mode(Plain, _rowwise, overlap=True),
    "torchao: tensorwise, gathered in FP8": Mode(Plain, partial(_torchao, recipe="tensorwise")),
}


@cache
def code_of(mode: Mode, kind: Any) -> Any:
    """The code of a mode's blocks: the runner that is checked and the one that is timed are compiled once."""
    return harness.own_code(kind)


class Runner(harness.Passes):
    """The model of a mode, and its step on this rank's part of the sequence."""

    def __init__(self, mode: Mode, config: LlamaConfig, mesh: DeviceMesh, *, compiled: bool = True) -> None:
        with torch.device(DEVICE):
            model = mode.stack(config).to(torch.bfloat16)
        self.layers: nn.ModuleList = model.layers  # type: ignore[assignment]
        harness.draw_matrices(self.layers)
        mode.split(model, mesh)
        options = {"_micro_pipeline_tp": True} if mode.overlap else None
        for block in self.layers if compiled else ():
            kind: Any = type(block)
            block.__class__ = code_of(mode, kind)
            block.compile(fullgraph=True, dynamic=False, options=options)
        (x, *tables), dy = harness.llama_inputs(config, config.context)
        x, dy = (t.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous() for t in (x, dy))
        super().__init__(model, (x, *tables), dy)


def measure(names: list[str], config: LlamaConfig, mesh: DeviceMesh, rounds: int, *, compiled: bool = True) -> Results:
    """Measure the modes; the result after each."""
    expected: list[Tensor] = []

    def make(name: str) -> Runner:
        return Runner(MODES[name], config, mesh, compiled=compiled)

    def check(name: str) -> Row:
        """The SQNR of a mode's output, and of the gradient of its input; a wrong one is a RuntimeError."""
        actual = make(name).step()
        expected[:] = expected or actual
        found = [harness.decibels(e, a) for e, a in zip(expected, actual, strict=True)]
        found = [-db for db in slowest([-db for db in found])]  # the least over the ranks, which decide alike
        if not all(db > 6 for db in found):
            raise RuntimeError(f"output and gradient are off: {found} dB")
        return {"sqnr": found}

    result = {"setting": setting_of(config), "bytes_per_second": bandwidth()}
    for rows in Bench(BASE, check, make, lambda _: {}, config.context, rounds, repeat=4).run(names):
        yield f"gpu_tensor_parallel_{mesh.size()}_gpus", {**result, "modes": rows}


@benchmark(layers=2, rounds=8, only="")
def main(options: Options) -> Results:
    start()
    mesh = init_device_mesh(DEVICE, (distributed.get_world_size(),))
    config = replace(CONFIG, layers=options.layers)
    yield from measure(chosen(MODES, BASE, options.only), config, mesh, options.rounds)
    distributed.destroy_process_group()
