"""Blocks of Llama-3-70B's shape, split over the GPUs of a host by PyTorch's tensor-parallel styles.

The plan is that of torchtitan: norms and residual sums on a part of the sequence, attention and the MLP on a part of
their heads and features. The input of q, k, v (of gate and up) is gathered once.
"""

import importlib
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from bench.gpu import llama
from octavo.models.llama import LlamaConfig

CONFIG = replace(llama.CONFIG, vocabulary=128, width=8192, heads=64, kv_heads=8, mlp_width=28672)


class SplitAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        kv_width = config.kv_heads * config.head_dim
        widths = config.width, kv_width, kv_width
        self.q, self.k, self.v = (nn.Linear(config.width, n, bias=False) for n in widths)
        self.o = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.o(llama.attend((self.q(x), self.k(x), self.v(x)), cos, sin))  # type: ignore[no-any-return]


class SplitMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.width, config.mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class SplitBlock(nn.Module):
    """One block of the stream [B, T / world, width]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(config.width, eps=config.norm_eps) for _ in range(2))
        self.attention, self.mlp = SplitAttention(config), SplitMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class SplitStack(llama.Plain):
    block = SplitBlock


def split(model: nn.Module, mesh: DeviceMesh, *, torchao: bool = False) -> None:
    """Apply PyTorch's styles to every `SplitBlock`; or torchao's, which gather tensorwise activations in FP8."""
    column: Any = ColwiseParallel
    row: Any = RowwiseParallel
    gather: Any = PrepareModuleInput
    if torchao:
        styles: Any = importlib.import_module("torchao.float8.float8_tensor_parallel")
        column, row, gather = (
            styles.Float8ColwiseParallel,
            styles.Float8RowwiseParallel,
            styles.PrepareFloat8ModuleInput,
        )
    part, whole = Shard(1), Replicate()
    plan = {
        "norm1": SequenceParallel(),
        "attention": gather(input_layouts=(part, None, None), desired_input_layouts=(whole, None, None)),
        **{f"attention.{name}": column() for name in "qkv"},
        "attention.o": row(output_layouts=part),
        "norm2": SequenceParallel(),
        "mlp": gather(input_layouts=(part,), desired_input_layouts=(whole,)),
        "mlp.gate": column(),
        "mlp.up": column(),
        "mlp.down": row(output_layouts=part),
    }
    for block in model.modules():
        if isinstance(block, SplitBlock):
            parallelize_module(block, mesh, plan)
