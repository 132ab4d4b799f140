"""The models that bench.gpu.fsdp and bench.gpu.network train: a Llama under FSDP2, in BF16 and in FP8."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octavo
from bench.gpu.llama import Fused, LanguageModel, Plain
from bench.gpu.modes import BASE
from bench.gpu.peers import update_torchao, use_torchao
from bench.gpu.ranks import Network, say
from octavo.distributed import fp8_all_gather, send_bf16_gradients
from octavo.models.llama import LlamaConfig

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
# The relative error of a weight gradient: below the first in BF16 that is compiled otherwise, between them in FP8.
GRADIENT_ERRORS = 0.03, 0.5
QUERIES_AND_KEYS = "q", "k", "q_proj", "k_proj"  # names of the layers


@dataclass(frozen=True)
class Mode:
    """A way to make and convert a model, and to send its weights and gradients."""

    stack: Callable[[LlamaConfig], nn.Module] = Plain
    convert: Callable[[nn.Module], Any] | None = None  # before sharding
    communicate: Callable[[nn.Module], Any] | None = None  # after sharding
    stepped: Callable[[nn.Module], Any] | None = None  # after each optimizer step
    compiled: bool = True


def _octavo(model: nn.Module) -> None:
    octavo.convert(model, "rowwise")


def _torchao(recipe: str, *, fp8_gather: bool = False) -> Callable[[nn.Module], Any]:
    return lambda model: use_torchao(model, recipe, fp8_gather=fp8_gather)


def _fp8_gather(model: nn.Module) -> None:
    say(fp8_all_gather(model))
    send_bf16_gradients(model)


WIDE, OURS = "octavo: rowwise, gathered in BF16", "octavo: rowwise, gathered in FP8"
TORCHAO = "torchao: tensorwise, gathered in FP8"
MODES = {
    BASE: Mode(),
    "bf16, eager": Mode(compiled=False),
    OURS: Mode(Fused, _octavo, _fp8_gather),
    WIDE: Mode(Fused, _octavo, send_bf16_gradients),
    # The last, because converting patches Inductor.
    TORCHAO: Mode(Plain, _torchao("tensorwise", fp8_gather=True), stepped=update_torchao),
    "torchao: rowwise, gathered in BF16": Mode(Plain, _torchao("rowwise")),
}


class Runner:
    """The model of a mode, sharded over all processes, and its whole training step."""

    def __init__(
        self, name: str, config: LlamaConfig, tokens: int, device: torch.device, network: Network | None = None
    ) -> None:
        mode = MODES[name]
        self.mode = mode
        with torch.device(device):
            self.model = LanguageModel(config, mode.stack)
            torch.manual_seed(0)  # the matrices of all models come in the same order
            for p in self.model.parameters():
                if p.ndim > 1:
                    nn.init.normal_(p, std=0.02)
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
        self.network = network or Network()
        self.network.carry(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator(device).manual_seed(1 + distributed.get_rank())  # each rank has its own batch
        shape = 2, 1, tokens
        self.batch = torch.randint(config.vocabulary, shape, device=device, generator=generator).unbind()

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


def gradient_error(expected: list[Tensor], actual: list[Tensor]) -> float:
    """The largest relative error of a gradient, over all matrices and ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [[float((a - e).square().sum()), float(e.square().sum())] for e, a in zip(expected, actual, strict=True)]
    sums = torch.tensor(parts, dtype=torch.float64, device=device)
    distributed.all_reduce(sums)  # the shards of a matrix are on all ranks
    return float((sums[:, 0] / sums[:, 1]).sqrt().max())


def gradient_problem(name: str, error: float) -> str:
    """A sentence if the gradients of a mode are wrong, or not those of FP8; else ""."""
    least, most = GRADIENT_ERRORS if MODES[name].convert else (0.0, GRADIENT_ERRORS[0])
    if math.isfinite(error) and least <= error <= most:
        return ""
    return f"{name}: the gradients must be off by {least} to {most}, and are by {error}"
