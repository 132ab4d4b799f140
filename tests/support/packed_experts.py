"""Packed experts and their mathematics in float64, token by token."""

import torch
import torch.nn.functional as F
from tiny_models import folder_maker, open_theirs
from torch import Tensor

from octavo.checkpoint.scheme import Scheme, get_scheme
from octavo.inference.packed_experts import PackedExperts, PackedGroupedLinear, scales_by_row
from octavo.ops import quantize

E, K, INNER, TOP_K, TOKENS = 4, 256, 128, 2, 24


def packed_matrices(w: Tensor, scheme: Scheme) -> PackedGroupedLinear:
    """The matrices [E, N, K], each packed by itself; scales of static inputs are a little too small for some."""
    layer = PackedGroupedLinear(w, scheme)
    for e, matrix in enumerate(w):
        q = quantize(matrix, scheme.weight)
        stored = scheme.stored_scale(q)
        layer.weight[e] = q.data
        layer.weight_scale[e] = stored.view(1, 1).expand(len(matrix), 1) if stored.ndim == 1 else stored
    if layer.input_scale is not None:
        layer.input_scale.copy_(torch.linspace(0.004, 0.012, len(w)))
    return layer


def packed_experts(names: tuple[str, str], device: str = "cpu") -> tuple[PackedExperts, Tensor, Tensor]:
    """Experts packed by two schemes, and the matrices that they were packed from."""
    torch.manual_seed(0)
    w_in = torch.randn(E, 2 * INNER, K) * K**-0.5
    w_out = torch.randn(E, K, INNER) * INNER**-0.5
    w_in, w_out = w_in.bfloat16(), w_out.bfloat16()
    layers = (packed_matrices(w, get_scheme(name)) for w, name in zip((w_in, w_out), names, strict=True))
    return PackedExperts(*layers).to(device), w_in, w_out


def packed_mixtral(root, scheme: str = "channel") -> tuple:
    make = folder_maker(root, hidden_size=256, num_attention_heads=2, num_key_value_heads=2, head_dim=128)
    layout = "fp8" if scheme == "block" else "compressed-tensors"
    return open_theirs(make("mixtral of 128")), make("mixtral of 128", scheme=scheme, layout=layout, experts=True)


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """x, index and weight; no token goes to expert 1, and the last slot goes to no expert."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, K).bfloat16()
    score = torch.rand(TOKENS, E)
    score[:, 1] = -1
    index = score.topk(TOP_K).indices
    index[-1, -1] = E
    return x, index, torch.rand(TOKENS, TOP_K)


def oracle(experts: PackedExperts, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """The output in float64, with BF16 between the steps, and NaN where an expert's matrix is not finite."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, s in torch.cartesian_prod(torch.arange(len(x)), torch.arange(index.shape[1])).tolist():
        e = int(index[t, s])
        if e < len(experts.down_proj.weight):
            gate, up = _product(experts.gate_up_proj, e, x[t]).bfloat16().float().chunk(2)
            hidden = F.silu(gate) * up
            hidden = hidden if experts.down_proj.by_row else (F.silu(gate.bfloat16()) * up.bfloat16())
            out[t] += float(weight[t, s]) * _product(experts.down_proj, e, hidden).bfloat16().double()
    return out


def _product(layer: PackedGroupedLinear, e: int, x: Tensor) -> Tensor:
    """w[e] times x [K], rounded as the scheme says."""
    scheme, x = layer.scheme, x.double()
    if scheme.inputs is None:
        return _matrix(layer, e) @ x
    size = (scheme.inputs.granularity.cols or len(x)) if not scales_by_row(scheme) else len(x)
    groups = x.view(-1, size)
    if layer.input_scale is not None:
        scale = layer.input_scale[e].double().view(1, 1)
    else:
        scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-30).float().div(448).double()
        scale = torch.exp2(scale.log2().ceil()) if scheme.inputs.scale == "e8m0" else scale
    rounded = (groups / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale
    return _matrix(layer, e) @ rounded.flatten()


def _matrix(layer: PackedGroupedLinear, e: int) -> Tensor:
    data, scale = layer.weight[e].double(), layer.weight_scale[e]
    wide = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    rows, columns = (-(-size // count) for size, count in zip(data.shape, wide.shape, strict=True))
    return data * wide.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
