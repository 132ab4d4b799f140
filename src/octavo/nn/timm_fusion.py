"""Blocks of timm's vision transformers whose norms and MLPs are fused with quantization, once they are converted.

    q, k, v = attn.qkv(norm1(x))                           one pass: `NormLinear`
    z = x + drop_path1(ls1(attn.proj(attention(q, k, v))))
    y = z + drop_path2(ls2(mlp(norm2(z))))                 the MLP with its norm in one pass: `GELU`

As in `octavo.nn.transformers_fusion`, a block becomes a subclass of its class with the same name, and the attention is
timm's own code. Saved for the backward pass are x, z, q, k, v, the output of the attention, and the input of the GELU.
"""

from typing import Any

from torch import Tensor, nn

from octavo.nn.mixed_class import mix_classes
from octavo.nn.mlp import GELU
from octavo.nn.module_class import is_of_library
from octavo.nn.norm_linear import NormLinear, child, watched
from octavo.nn.precomputed import PrecomputedProjections


def fuse_vision_blocks(model: nn.Module) -> None:
    """Fuse the norms and MLPs of timm's blocks; idempotent."""
    for module in list(model.modules()):
        if not isinstance(module, VisionBlock) and is_known(module):
            any_module: Any = module
            any_module.fused_qkv = NormLinear(module, "norm1", "attn.qkv")
            any_module.fused_mlp = GELU(any_module.mlp, "fc1", "fc2")
            module.__class__ = mix_classes(VisionBlock, type(module))


def is_known(block: Any) -> bool:
    """Whether `block` is one of timm, with plain attention, and an MLP of two layers, the exact GELU and no dropout."""
    if not is_of_library(block, "timm", "Block"):
        return False
    attn, mlp = block.attn, block.mlp
    if not (is_of_library(attn, "timm", "Attention") and is_of_library(mlp, "timm", "Mlp")):
        return False
    exact = type(mlp.act).__name__ == "GELU" and getattr(mlp.act, "approximate", "none") == "none"
    plain = type(getattr(mlp, "norm", None)) in (type(None), nn.Identity) and mlp.drop1.p == mlp.drop2.p == 0
    linears = all(isinstance(layer, nn.Linear) for layer in (attn.qkv, attn.proj, mlp.fc1, mlp.fc2))
    return exact and plain and linears and getattr(attn, "gate", None) is None


class VisionBlock(nn.Module):
    """A block of timm that runs norm and projections, and norm and MLP, in one pass each."""

    fused_qkv: NormLinear
    fused_mlp: GELU
    ls1: nn.Module
    ls2: nn.Module
    drop_path1: nn.Module
    drop_path2: nn.Module

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the class's own forward: x [B, T, K] to [B, T, K]; other arguments go to the attention."""
        attend, qkv = child(self, "attn"), child(self, "fused_qkv")
        fused = None if watched(attend) or watched(child(self, "mlp")) else qkv.fused(x)
        if fused is None:
            return super().forward(x, *args, **kwargs)
        attention = attend(PrecomputedProjections(x, qkv.linears, fused[0]), *args, **kwargs)
        attention = self.drop_path1(self.ls1(attention))
        y, total = child(self, "fused_mlp").run(x, child(self, "norm2"), attention)
        return total + self.drop_path2(self.ls2(y))
