"""The models and the modes of training runs: BF16, recipes of Octavo, and recipes of torchao.

A mode may end with ` without k_proj`, which leaves these layers in BF16, with `_if_faster`, for `only_if_faster`, and
with ` + FP8 attention` or ` + FP8 head`, for attention or the products of the head in FP8. A mode such as `x of k_proj`
is BF16 with one operand of some layers rounded to FP8, and one such as `xw of all by error feedback` rounds w so.

The model of the study is Octavo's Llama, with a norm on the queries and keys of each head (QK-norm: Dehghani et al.,
arXiv:2302.05442), which keeps a small model stable at a high learning rate. Two others, with GELU and with experts,
have half of the rate and no such norm.
"""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.variants import VARIANTS, promoted, recipe_of, use_torchao
from octavo.models.decoder import KVCache
from octavo.models.llama import Attention, Block, Llama, LlamaConfig, RMSNorm
from octavo.nn import convert, select_linears, use_fp8_attention
from octavo.numerics import ROW, Cast
from octavo.ops import quantize
from octavo.packing.scale_search import cast_by, search_scale
from octavo.packing.transforms import smoothing_factors
from octavo.recipe import GEMMS, rowwise
from octavo.train.config import Config
from octavo.train.model import make_model as build
from octavo.train.model import prepare_blocks

CONFIGS: dict[str, Config] = {}  # the settings of each table of studies.toml
for _name, _table in tomllib.loads((Path(__file__).parents[1] / "studies.toml").read_text()).items():
    CONFIGS[_name] = CONFIGS.get(_table.pop("like", ""), Config()).change(**_table)
TORCHAO = {"torchao": "rowwise", "torchao_rowwise": "rowwise", "torchao_tensorwise": "tensorwise"}
IF_FASTER, FP8_ATTENTION, FP8_HEAD = "_if_faster", " + FP8 attention", " + FP8 head"
OF, BY, WITHOUT = " of ", " by ", " without "
CAST = Cast("e4m3", ROW)
METHODS = ("", "least squares", "error feedback", "smoothing")  # the last rounds x/s and w*s, a factor s for each input
IN_BF16 = ("bf16", "twin")  # a twin is BF16 whose weights were disturbed once, as it branched

ONLY = {f"rowwise_{gemm}_only": rowwise().in_bf16(*(set(GEMMS) - {gemm})) for gemm in GEMMS}  # one GEMM in FP8
EXACT = {"rowwise_exact": promoted(rowwise(), "y", "dx")}  # dw has no fast accumulation
OWN = {name: replace(recipe, name=name, emulate=True) for name, recipe in (ONLY | EXACT).items()}
IN_PARTS = tuple(f"rowwise{part}" for part in (FP8_ATTENTION, FP8_HEAD))
MODES = (*IN_BF16, *TORCHAO, *OWN, *IN_PARTS, *(name for name in VARIANTS if name not in IN_BF16))


def rounded(x: Tensor, method: str = "") -> Tensor:
    """x [..., K] in E4M3 with a scale for each row, rounded by one of METHODS, on a CPU if it has a name; float32."""
    matrix = x.detach().bfloat16().flatten(0, -2)
    q = quantize(matrix, CAST)
    if method == "least squares":
        q = cast_by(matrix, search_scale(matrix, q.scale, CAST).scale, CAST)
    if method == "error feedback":
        columns, error = list[Tensor](), torch.zeros_like(q.scale)
        for column in torch.split(matrix.float(), 1, dim=1):
            columns.append(cast_by(column + error, q.scale, CAST).dequantize())
            error = column + error - columns[-1]
        return torch.cat(columns, dim=1)
    return q.dequantize().view(x.shape)


class RoundedLinear(nn.Linear):
    """A linear layer with some of x and w rounded to E4M3, with a scale for each row. The gradients ignore it."""

    operands: str  # letters of "xw"
    method: str  # of METHODS, by which w is rounded: with a name in frozen models alone
    version = -1  # of the weight that was prepared

    def forward(self, input: Tensor) -> Tensor:
        x, w = self.prepare(input) if self.method else (input, self.weight)
        if "x" in self.operands:
            x = rounded(x) + (x - x.detach())
        if "w" in self.operands and not self.method:
            w = rounded(w) + (w - w.detach())
        return F.linear(x, w, self.bias)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x/s, and w*s rounded: s and this are computed once for each version of the weight, from the first x."""
        assert not self.training, f"rounding by {self.method} is for frozen models"  # fused AdamW counts no versions
        if self.version != self.weight._version:
            w, amax, self.version = self.weight.detach(), x.abs().flatten(0, -2).amax(0), self.weight._version
            smooth = self.method == "smoothing"
            self.s = smoothing_factors(amax, w.abs().amax(0), alpha=0.5) if smooth else torch.ones_like(amax)
            self.w = rounded((w * self.s).cpu(), self.method).to(w.device) if "w" in self.operands else w * self.s
        return x / self.s, self.w


def round_operands(model: nn.Module, operands: str, chosen: str, skip: list[str]) -> int:
    """Round operands of the layers of a kind, such as k_proj, or "all" that a recipe converts; returns their number."""
    kind, _, method = chosen.partition(BY)
    assert method in METHODS, f"operands are rounded by {', '.join(METHODS[1:])}; got {method!r}"
    converted = [each for each in select_linears(model, skip) if not each.reason]
    layers: list[Any] = [each.module for each in converted if kind in ("all", each.name.rpartition(".")[2])]
    for layer in layers:
        layer.__class__, layer.operands, layer.method = RoundedLinear, operands, method
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
    if normed and config.model == "llama":
        sizes = {name: getattr(config, name) for name in ("layers", "width", "heads", "mlp_width", "context", "tied")}
        model: nn.Module = NormedLlama(LlamaConfig(vocabulary=padded(config), kv_heads=config.heads, **sizes))
    else:
        model = build(config, padded(config), Path())
    model.to(device)
    layers = mode.removesuffix(FP8_ATTENTION).removesuffix(FP8_HEAD)
    name, converted = layers.removesuffix(IF_FASTER), 0
    base, _, left = name.partition(WITHOUT)
    skip = [f"*.{left}"] if left else []
    operands, _, chosen = base.partition(OF)
    if chosen:
        converted = round_operands(model, operands, chosen, skip)
    elif name in TORCHAO:
        converted = use_torchao(model, TORCHAO[name])
    elif name not in IN_BF16:
        recipe, faster = OWN.get(base) or recipe_of(base), name != layers
        tokens = config.batch * config.context
        report = convert(model, recipe, skip=skip, device=device, emulate=True, only_if_faster=faster, tokens=tokens)
        converted = len(report.converted)
    if mode.endswith(FP8_ATTENTION):
        use_fp8_attention(model, shortest=1, device=device)
    if mode.endswith(FP8_HEAD):
        model.lm_head = nn.Identity()
    prepare_blocks(model, config)
    return model, converted


def padded(config: Config) -> int:
    """The rows of the embedding: a multiple of 128, as fast GEMMs want it."""
    return -(-config.vocabulary // 128) * 128
