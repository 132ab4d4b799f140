"""Training steps of Llama-3-8B's shape under FSDP2: BF16, Octavo and torchao in one run, one process a GPU.

A step is whole: forward, backward, gradient reduction in FP32 and fused AdamW on FP32 weights, 8,192 tokens a GPU. The
gradients of each mode are compared with those of compiled BF16 first. Then the mode takes turns with compiled BF16
(`bench.gpu.ranks.Bench`).

With `--only`, the other modes' rows of an earlier result stay in the file, each with the machine and commit of its own.

    torchrun --nproc-per-node 2 -m bench.gpu.fsdp [--layers 16] [--only torchao,FP8] [--rounds 6]

With `--channels` it measures the gain of gathering in FP8 as the network gets slower. The links are those between the
GPUs of one host. A group of NCCL that may use few channels is slower; over sockets it is slower still. Each bandwidth
is measured by an all-gather of 256 MB. All modes stay in memory and take turns; the collectives of FSDP2 move to the
group of the moment.

    torchrun --nproc-per-node 2 -m bench.gpu.fsdp --layers 8 --rounds 4 --channels 1,2,4,8,16
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo \
        torchrun --nproc-per-node 2 -m bench.gpu.fsdp --layers 8 --rounds 4 --channels 1,2,4
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octavo
from bench.gpu import harness, llama, ranks
from bench.gpu.llama import Fused, LanguageModel, Plain
from bench.gpu.modes import BASE, OURS, TORCHAO, WIDE
from bench.gpu.variants import update_torchao, use_torchao
from octavo.distributed import fp8_all_gather, send_bf16_gradients
from octavo.models.llama import LlamaConfig

REPEAT = 3  # steps between two readings of the clock
CHECKED_LAYERS = 2  # of the model whose gradients are compared
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
# The relative error of a weight gradient: below the first in BF16 that is compiled otherwise, between them in FP8.
GRADIENT_ERRORS = 0.03, 0.5
TRANSPORT = "socket" if os.environ.get("NCCL_NET") == "Socket" else "direct"
QUERIES_AND_KEYS = "q", "k", "q_proj", "k_proj"  # names of the layers

# --- The modes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """A way to make and convert a model, and to send its weights and gradients."""

    stack: Callable[[LlamaConfig], nn.Module] = Plain
    convert: Callable[[nn.Module], Any] | None = None  # before sharding
    communicate: Callable[[nn.Module], Any] | None = None  # after sharding
    stepped: Callable[[nn.Module], Any] | None = None  # after each optimizer step
    compiled: bool = True


def _fp8_gather(model: nn.Module) -> None:
    fp8_all_gather(model)
    send_bf16_gradients(model)


_octavo = partial(octavo.convert, recipe="rowwise")
MODES = {
    BASE: Mode(),
    "bf16, eager": Mode(compiled=False),
    OURS: Mode(Fused, _octavo, _fp8_gather),
    WIDE: Mode(Fused, _octavo, send_bf16_gradients),
    # The last, because converting patches Inductor.
    TORCHAO: Mode(Plain, partial(use_torchao, recipe="tensorwise", fp8_gather=True), stepped=update_torchao),
    "torchao: rowwise, gathered in BF16": Mode(Plain, partial(use_torchao, recipe="rowwise")),
}


class Runner:
    """The model of a mode, sharded over all processes, and its whole training step."""

    def __init__(self, name: str, config: LlamaConfig, network: ranks.Network | None = None) -> None:
        self.mode = mode = MODES[name]
        with torch.device(harness.DEVICE):
            self.model = LanguageModel(config, mode.stack)
            harness.draw_matrices(self.model)  # the matrices of all models come in the same order
        if mode.convert is not None:
            mode.convert(self.model)
        if mode.compiled:
            for block in self.model.blocks:
                block.compile(fullgraph=True)
            self.model.loss = torch.compile(self.model.loss)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mp_policy=POLICY)
        if mode.communicate is not None:
            mode.communicate(self.model)
        self.network = network or ranks.Network()
        self.network.carry(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator(harness.DEVICE).manual_seed(1 + distributed.get_rank())  # each has its own batch
        shape = 2, 1, config.context
        self.batch = torch.randint(config.vocabulary, shape, device=harness.DEVICE, generator=generator).unbind()

    def step(self) -> None:
        self.model(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.mode.stepped is not None:
            self.mode.stepped(self.model)

    def gradients(self) -> list[Tensor]:
        """This rank's shards of the gradients of the matrices in the last block, but those of queries and keys.

        With random weights, these and the gradients of early blocks are so small that they are noise in every FP8.
        """
        self.model(*self.batch).backward()
        named = self.model.blocks[-1].named_parameters()
        grads = [p.grad for name, p in named if p.ndim == 2 and name.split(".")[-2] not in QUERIES_AND_KEYS]
        found = [grad.to_local().cpu() for grad in grads]  # type: ignore[union-attr]
        self.optimizer.zero_grad()
        return found

    def optimizer_ms(self) -> float:
        """Milliseconds of the optimizer's step alone."""
        self.model(*self.batch).backward()
        self.optimizer.step()
        found = min(ranks.slowest([harness.once(self.optimizer.step, REPEAT) for _ in range(2)]))
        self.optimizer.zero_grad()
        return found


def gradient_error(name: str, expected: list[Tensor], actual: list[Tensor]) -> float:
    """The largest relative error of a gradient, over all matrices and ranks; a wrong one, or one that is not of FP8,
    is a RuntimeError."""
    parts = [[float((a - e).square().sum()), float(e.square().sum())] for e, a in zip(expected, actual, strict=True)]
    sums = torch.tensor(parts, dtype=torch.float64, device=harness.DEVICE)
    distributed.all_reduce(sums)  # the shards of a matrix are on all ranks
    error = float((sums[:, 0] / sums[:, 1]).sqrt().max())
    least, most = GRADIENT_ERRORS if MODES[name].convert else (0.0, GRADIENT_ERRORS[0])
    if not (math.isfinite(error) and least <= error <= most):
        raise RuntimeError(f"{name}: the gradients must be off by {least} to {most}, and are by {error}")
    return error


# --- The rows --------------------------------------------------------------------------------------------------


def measure(names: list[str], config: LlamaConfig, rounds: int) -> harness.Results:
    """Measure the modes; the result after each."""
    file = f"gpu_fsdp_{config.layers}_layers_{distributed.get_world_size()}_gpus"
    links = {"bytes_per_second": ranks.bandwidth()} if distributed.get_world_size() > 1 else {}
    earlier = [row for row in harness.rows_before(file, "modes") if row["mode"] not in names]
    setting, few = ranks.setting_of(config), replace(config, layers=min(config.layers, CHECKED_LAYERS))
    expected: list[Tensor] = []

    def check(name: str) -> harness.Row:
        """How far the gradients of a mode are from those of BF16, in a model of a few layers.

        With random weights, the rounding errors of FP8 grow from layer to layer until they are as large as the numbers.
        """
        grads = Runner(name, few).gradients()
        expected[:] = expected or grads
        return {"gradient_error": gradient_error(name, expected, grads)}

    def others(runner: Runner) -> harness.Row:
        network = runner.network
        network.gathered = network.reduced = 0
        runner.step()
        found = {"gathered_bytes": network.gathered, "reduced_bytes": network.reduced}
        return found | {"optimizer_ms": runner.optimizer_ms()}

    bench = ranks.Bench(BASE, check, lambda name: Runner(name, config), others, config.context, rounds)
    for rows in bench.run(names):
        yield file, {"setting": setting, "modes": [*rows, *earlier], **links}


# --- Links of several bandwidths -------------------------------------------------------------------------------


def over_links(modes: list[str], config: LlamaConfig, channels: list[int], rounds: int) -> harness.Results:
    """Time `modes` over a link of each number of channels, the fastest first; the result after each."""
    network = ranks.Network()
    runners = {name: Runner(name, config, network) for name in modes}
    for runner in runners.values():
        runner.step()  # compiles
    setting: dict[str, Any] = {**ranks.setting_of(config), "transport": TRANSPORT}
    setting["bf16_gradients"] = [name for name in modes if MODES[name].communicate is not None]
    setting |= {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    links: list[dict[str, Any]] = []
    for count in sorted(channels, reverse=True):
        links.append(link(count, runners, network, rounds))
        yield f"gpu_network_{TRANSPORT}", {"setting": setting, "links": links}


def link(channels: int, runners: dict[str, Runner], network: ranks.Network, rounds: int) -> dict[str, Any]:
    """The bandwidth of a group with so many channels, and the times of the modes on it."""
    network.group = group(channels)
    rate = ranks.bandwidth(network.group)
    steps = {name: runner.step for name, runner in runners.items()}
    found = harness.interleaved(steps, rounds=rounds, repeat=2, warmup=1)
    times = {name: ranks.slowest(each) for name, each in found.items()}
    return {"channels": channels, "bytes_per_second": rate, "rounds": times}


def group(channels: int) -> distributed.ProcessGroup:
    """A group of all ranks whose NCCL uses at most so many channels."""
    if harness.DEVICE == "cpu":
        return distributed.new_group()
    options = distributed.ProcessGroupNCCL.Options()
    options.config.max_ctas = channels
    return distributed.new_group(pg_options=options)


@harness.benchmark(layers=llama.CONFIG.layers // 2, rounds=6, channels="", only="")
def main(options: harness.Options) -> harness.Results:
    ranks.start()
    config, chosen = replace(llama.CONFIG, layers=options.layers), ranks.chosen(MODES, BASE, options.only)
    if options.channels:
        modes = [name for name in (BASE, WIDE, OURS, TORCHAO) if name in chosen]
        channels = [int(each) for each in options.channels.split(",")]
        yield from over_links(modes, config, channels, options.rounds)
    else:
        yield from measure(chosen, config, options.rounds)
    distributed.destroy_process_group()
