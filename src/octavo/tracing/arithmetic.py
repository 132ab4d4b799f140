"""The arithmetic of an operation: its kind, its FLOPs, the dtype that it computes in, and the dtype of its sums."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from octavo.ops.grouped_gemm import ALIGNMENT

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NAMES = {
    torch.float64: "FP64",
    torch.float32: "FP32",
    torch.bfloat16: "BF16",
    torch.float16: "FP16",
    **dict.fromkeys(FP8, "FP8"),
    torch.float8_e8m0fnu: "E8M0",
}
WIDTHS = ("FP64", "FP32", "BF16", "FP16", "FP8")  # the widest first

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "scaled_mm", "_scaled_mm", "_grouped_mm"}
_PRODUCTS |= {"_scaled_grouped_mm", "_addmm_activation", "addbmm", "addr", "vdot", "grouped_mm", "grouped_mm_dw"}
_SUMS = {
    "sum", "mean", "var", "var_mean", "std", "std_mean", "prod", "logsumexp", "norm", "linalg_vector_norm",
    "native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_batch_norm", "cumsum", "cumprod", "softmax",
    "_softmax", "_log_softmax", "nll_loss_forward", "nll_loss2d_forward", "norm_quantize", "norm_backward",
    "activation_backward", "embedding_dense_backward", "_safe_softmax",
}  # fmt: skip
_COPIES = {"clone", "copy_", "cat", "stack", "embedding", "index", "index_select", "gather", "slice_backward"}
_COPIES |= {"select_backward", "transpose", "constant_pad_nd", "index_put", "scatter", "roll", "repeat", "fill_"}
_CASTS = {"_to_copy", "convert_element_type"}


def kind_of(name: str, namespace: str) -> str:
    """The kind of the operation `name`: product, convolution, attention, sum, cast, copy or elementwise."""
    if name in _PRODUCTS:
        return "product"
    if "convolution" in name or name.startswith("conv"):
        return "convolution"
    if "attention" in name or name in ("_transformer_encoder_layer_fwd", "append_kv"):
        return "attention"
    if name in _CASTS or (namespace == "octavo" and "quantize" in name and "norm" not in name) or "_scales" in name:
        return "cast"
    if name.removesuffix("_backward_data").removesuffix("_backward") in _SUMS or name in _SUMS:
        return "sum"
    return "copy" if name in _COPIES else "elementwise"


def floating(values: Any) -> list[Tensor]:
    """The floating tensors among the arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dtype in NAMES]


def names_of(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """The dtypes of tensors, each once, the widest first; formats of scales (E8M0) are left out."""
    found = {NAMES[t.dtype] for t in tensors}
    return tuple(name for name in WIDTHS if name in found)


def compute_dtype(kind: str, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """The dtype that an operation computes in: the operands' of a product, else the widest of inputs and outputs."""
    if kind in ("product", "convolution", "attention") and inputs:
        return inputs[-1]  # not that of the scales, or of the sums of attention's softmax
    return next((name for name in WIDTHS if name in (*inputs, *outputs)), "")


def sum_dtype(kind: str, computed: str) -> str:
    """The dtype of the partial sums of an operation that adds up, "" for others.

    Matrix products and reductions of PyTorch add up in FP32 on a GPU. cuBLAS may round partial sums of a product that
    it splits along K to the dtype of the result (torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction).
    The tensor cores of Hopper keep about 14 bits in an FP8 sum, which is added to an FP32 sum from time to time.
    """
    if kind in ("copy", "cast", "elementwise") or not computed:
        return ""
    return "FP64" if computed == "FP64" else "FP32"


def flops_of(func: Any, kind: str, args: Any, keywords: Any, out: Any) -> int:
    """The FLOPs of a matrix product, convolution or attention; 0 of other operations.

    By the formulas of torch.utils.flop_counter where it has one. A multiplication and an addition count 2.
    """
    from torch.utils.flop_counter import flop_registry  # here: it imports much

    if kind not in ("product", "convolution", "attention"):
        return 0
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **keywords, out_val=out))
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if kind == "product":
        if "octavo.grouped_mm_dw" in str(func):  # [N, T] x [K, T], T cut into groups, with 16 columns more for each
            (n, columns), k = tensors[0].shape, tensors[1].shape[0]
            return 2 * n * k * (columns - ALIGNMENT * int(out.shape[0]))
        if [t.ndim for t in tensors[:2]] == [2, 2] and "grouped" in str(func):  # [K, T] x [T, N], T cut into groups
            return 2 * tensors[0].numel() * tensors[1].shape[-1]
        results = floating(out)
        return 2 * results[0].numel() * tensors[0].shape[-1] if results and tensors else 0
    if any(name in str(func) for name in ("_for_cpu", "_fused_attention", "octavo.fp8_attention")):
        return _attention_flops(tensors, backward="backward" in str(func))
    return 0


def _attention_flops(tensors: Sequence[Tensor], *, backward: bool) -> int:
    """FLOPs of attention over whole rows of scores: two products, and five in the backward pass, which computes the
    scores again."""
    q, k, v = (t.shape for t in (tensors[1:4] if backward else tensors[:3]))  # [B, H, T, Q], [B, H, S, Q], [B, H, S, V]
    scores = math.prod(q[:-1]) * k[-2]
    return 2 * scores * ((3 * q[-1] + 2 * v[-1]) if backward else (q[-1] + v[-1]))
