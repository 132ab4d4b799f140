"""The GEMM that a packed layer runs on a device, by its scheme.

    eight bits     y = x_q[T,K] @ w_q[N,K]^T    the input is cast as the scheme says
    weight-only    y = x[T,K] @ w_q[N,K]^T      the input keeps its dtype, and the weight is widened in the kernel

The scheme `weight` is weight-only on every device. So is every other FP8 scheme on a GPU without an FP8 GEMM for it,
such as an Ampere: the result is then closer to the BF16 model's than the scheme's own. `int8` casts inputs on every
device.
"""

from collections import Counter
from functools import lru_cache

import torch

from octavo.artifact.packed.scheme import Scheme
from octavo.int8 import find_int8_backend
from octavo.nn.backends import product_backend
from octavo.numerics import TENSOR, Cast
from octavo.ops import Backend, find_weight_only_backend
from octavo.ops.gemm import MAX_M_OF_GROUPS
from octavo.ops.gpu_architecture import Place
from octavo.ops.weight_only import MAX_FASTER_M
from octavo.words import plural

_BY_ROW = {name: Cast(name) for name in ("e4m3", "e4m3fnuz")}


def input_cast(scheme: Scheme, device: torch.device) -> Cast | None:
    """The cast of the input of a layer on `device`; None if its GEMM is weight-only."""
    find = _input_cast if torch.compiler.is_compiling() else _find_cached  # torch.compile warns of a cached function
    return find(scheme, device)


def _input_cast(scheme: Scheme, device: torch.device) -> Cast | None:
    if scheme.inputs is None or _eight_bit_gemm(scheme, scheme.inputs, device).name == "none":
        return None
    return scheme.inputs


_find_cached = lru_cache(maxsize=256)(_input_cast)


def find_gemm(scheme: Scheme, device: Place) -> tuple[Cast | None, Backend]:
    """The cast of the input of a layer on `device`, None if its GEMM is weight-only; and the GEMM: for a large M, or
    weight-only for one row."""
    weight_only = find_weight_only_backend(device, torch.bfloat16, scheme.weight.granularity, 1)
    if scheme.inputs is None:
        return None, weight_only
    backend = _eight_bit_gemm(scheme, scheme.inputs, device)
    if backend.name == "none":
        return None, Backend(weight_only.name, f"{backend.reason}: weight-only")
    return scheme.inputs, backend


def _eight_bit_gemm(scheme: Scheme, x: Cast, device: Place) -> Backend:
    """The GEMM of quantized inputs. torch.compile traces this, and torch 2.11 refuses a cast that is made meanwhile."""
    if scheme.weight.format == "int8":
        return find_int8_backend(device)
    spread = scheme.weight.granularity == TENSOR and not scheme.static  # as `Scheme.packed_weight` does
    return product_backend(x, _BY_ROW[scheme.weight.format] if spread else scheme.weight, device)


def weight_only_note(schemes: Counter[Scheme], device: torch.device) -> str:
    """The layers that run weight-only on `device` although their scheme casts inputs, with the reason; "" for none.

    Args:
        schemes: of the packed layers, with the number of layers of each.
    """
    notes = []
    for scheme, count in schemes.items():
        cast, backend = find_gemm(scheme, device)
        if scheme.inputs is not None and cast is None:
            notes.append(f"{plural(count, 'layer')} of the scheme {scheme.name} ({backend.reason})")
    if not notes:
        return ""
    return f"on {device} these layers compute with inputs that are not quantized: {'; '.join(notes)}"


def widened_note(schemes: Counter[Scheme], device: torch.device) -> str:
    """The layers whose operands are widened to BF16 at a large M, which is slower than a BF16 model; "" for none."""
    notes = []
    for scheme, count in schemes.items():
        cast, backend = find_gemm(scheme, device)
        if backend.name == "dequantized" or (cast is None and device.type == "cuda"):
            above = MAX_FASTER_M if cast is None else MAX_M_OF_GROUPS
            notes.append(f"{plural(count, 'layer')} of the scheme {scheme.name} above {above} tokens")
    if not notes:
        return ""
    return (
        f"on {device} these layers are slower than BF16, because their operands are widened to BF16: "
        f"{'; '.join(notes)}. docs/packing.md names the schemes with a GEMM of their own"
    )
