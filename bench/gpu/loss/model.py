"""The models and the modes of training runs: BF16, recipes of Octavo, and recipes of torchao.

A mode may end with `_if_faster`, for `only_if_faster`, and with ` + FP8 attention` or ` + FP8 head`, for attention or
the products of the head in FP8. A mode such as `x of k_proj` is BF16 with one operand of some layers rounded to FP8.

The model of the study is Octavo's Llama, with a norm on the queries and keys of each head (QK-norm: Dehghani et al.,
arXiv:2302.05442), which keeps a small model stable at a high learning rate. Two others, with GELU and with experts,
have half of the rate and no such norm.
"""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.peers import use_torchao
from bench.gpu.variants import VARIANTS, recipe_of
from octavo.models.decoder import KVCache
from octavo.models.llama import Attention, Block, Llama, LlamaConfig, RMSNorm
from octavo.nn import convert, select_linears, use_fp8_attention
from octavo.recipe import GEMMS, Recipe, rowwise
from octavo.tensor import quantize
from octavo.train.config import Config
from octavo.train.model import make_model as build
from octavo.train.model import prepare_blocks

STUDIES = Path(__file__).parents[1] / "studies.toml"


def read_configs() -> dict[str, Config]:
    """The settings of each table of studies.toml."""
    found: dict[str, Config] = {}
    for name, table in tomllib.loads(STUDIES.read_text()).items():
        found[name] = found.get(table.pop("like", ""), Config()).change(**table)
    return found


CONFIGS = read_configs()
TORCHAO = {"torchao": "rowwise", "torchao_rowwise": "rowwise", "torchao_tensorwise": "tensorwise"}
IF_FASTER, FP8_ATTENTION, FP8_HEAD = "_if_faster", " + FP8 attention", " + FP8 head"
OF = " of "
IN_BF16 = ("bf16", "twin")  # a twin is BF16 whose weights were disturbed once, as it branched


def only(gemm: str) -> Recipe:
    """`rowwise` with one of y, dx and dw in FP8."""
    others = [each for each in GEMMS if each != gemm]
    return replace(rowwise().in_bf16(*others), name=f"rowwise_{gemm}_only", emulate=True)


def exact() -> Recipe:
    """`rowwise` without fast accumulation."""
    y, dx = (replace(gemm, fast_accumulation=False) for gemm in (rowwise().y, rowwise().dx) if gemm is not None)
    return replace(rowwise(), name="rowwise_exact", y=y, dx=dx, emulate=True)


OWN: dict[str, Callable[[], Recipe]] = {
    **{f"rowwise_{gemm}_only": partial(only, gemm) for gemm in GEMMS},
    "rowwise_exact": exact,
}
IN_PARTS = tuple(f"rowwise{part}" for part in (FP8_ATTENTION, FP8_HEAD))
MODES = (*IN_BF16, *TORCHAO, *OWN, *IN_PARTS, *(name for name in VARIANTS if name not in IN_BF16))


class RoundedLinear(nn.Linear):
    """A linear layer with some of x and w rounded to E4M3, with a scale for each row."""

    operands: str  # letters of "xw"

    def forward(self, input: Tensor) -> Tensor:
        tensors = {"x": input, "w": self.weight}
        x, w = (quantize(t.bfloat16()).dequantize() if name in self.operands else t for name, t in tensors.items())
        return F.linear(x, w, self.bias)


def round_operands(model: nn.Module, operands: str, kind: str) -> int:
    """Round operands of the layers of a kind, such as k_proj, or "all" that a recipe converts; returns their number."""
    converted = [each for each in select_linears(model) if not each.reason]
    layers: list[Any] = [each.module for each in converted if kind in ("all", each.name.rpartition(".")[2])]
    for layer in layers:
        layer.__class__, layer.operands = RoundedLinear, operands
    return len(layers)


class NormedAttention(Attention):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        heads = *q.shape[:2], -1, self.head_dim
        q, k = (norm(x.view(heads)).flatten(-2) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return super().forward(q, k, v, cos, sin, cache)


class NormedBlock(Block):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.self_attn = NormedAttention(config, layer)


class NormedLlama(Llama):
    block = NormedBlock


def make_model(mode: str, config: Config, device: torch.device, *, normed: bool = True) -> tuple[nn.Module, int]:
    """The model of a mode on `device`, its blocks compiled if `config` says so, and the number of layers in FP8.

    The weights are drawn from torch's seed. A Llama is `normed` or Octavo's own. The model of a mode with ` + FP8 head`
    returns the inputs of its head, whose weight is that of the embedding: `linear_cross_entropy` computes the loss.
    """
    model = normed_llama(config) if normed and config.model == "llama" else build(config, padded(config), Path())
    model.to(device)
    layers = mode.removesuffix(FP8_ATTENTION).removesuffix(FP8_HEAD)
    name, converted = layers.removesuffix(IF_FASTER), 0
    operands, _, kind = name.partition(OF)
    if kind:
        converted = round_operands(model, operands, kind)
    elif name in TORCHAO:
        converted = use_torchao(model, TORCHAO[name])
    elif name not in IN_BF16:
        recipe, faster = OWN[name]() if name in OWN else recipe_of(name), name != layers
        tokens = config.batch * config.context
        report = convert(model, recipe, device=device, emulate=True, only_if_faster=faster, tokens=tokens)
        converted = len(report.converted)
    if mode.endswith(FP8_ATTENTION):
        use_fp8_attention(model, shortest=1, device=device)
    if mode.endswith(FP8_HEAD):
        model.lm_head = nn.Identity()
    prepare_blocks(model, config)
    return model, converted


def normed_llama(config: Config) -> nn.Module:
    sizes = {name: getattr(config, name) for name in ("layers", "width", "heads", "mlp_width", "context", "tied")}
    return NormedLlama(LlamaConfig(vocabulary=padded(config), kv_heads=config.heads, **sizes))


def padded(config: Config) -> int:
    """The rows of the embedding: a multiple of 128, as fast GEMMs want it."""
    return -(-config.vocabulary // 128) * 128
