"""A vision transformer: patches of an image are tokens of a pre-norm transformer, whose mean is classified.

    x = patches(image) + positions
    x = x + proj(attention(qkv(norm1(x))));  x = x + fc2(gelu(fc1(norm2(x))))
    logits = head(mean over tokens of norm(x))

Dosovitskiy et al. 2021, arXiv:2010.11929, with the mean of the tokens in place of a class token (Beyer et al. 2022,
arXiv:2205.01580). The patches are a convolution whose windows do not overlap, which is a matrix product.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn import GELU, NormLinear


@dataclass(frozen=True)
class ImageConfig:
    """Sizes of a transformer on square images. Raises a ValueError if they do not fit together.

    Args:
        image: height and width, in pixels.
        patch: height and width of a patch.
        channels: of a pixel.
        classes: of the images.
        layers, width, heads: of the transformer.
    """

    image: int
    patch: int
    channels: int
    classes: int
    layers: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError(f"every size must be at least 1, got {self}")
        if self.image % self.patch:
            raise ValueError(
                f"image must be a multiple of patch, got image={self.image}, patch={self.patch}: resize or pad the "
                f"images to {-(-self.image // self.patch) * self.patch}"
            )
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width}, heads={self.heads}")

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


class Patches(nn.Module):
    """Tokens [B, T, width] of images [B, C, H, W]: a linear map of each patch, plus a learned position."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.config = config
        self.proj = nn.Conv2d(config.channels, config.width, config.patch, config.patch)
        self.positions = nn.Parameter(torch.randn(config.tokens, config.width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        expected = (self.config.channels, self.config.image, self.config.image)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise ValueError(f"images must be [B, {', '.join(map(str, expected))}], got {list(images.shape)}")
        return self.proj(images).flatten(2).transpose(1, 2) + self.positions  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Attention of all tokens to all; `forward` takes q, k and v as one tensor [B, T, 3 width]."""

    layer_after = "proj"  # whose input is the result of PyTorch's attention (`octavo.nn.saved_inputs`)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))  # type: ignore[no-untyped-call]
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm block. Once it is converted, norms and the activation quantize in the pass that computes them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), SelfAttention(width, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.qkv, self.mlp = NormLinear(self, "norm1", "attention.qkv"), GELU(self, "fc1", "fc2")

    def forward(self, x: Tensor) -> Tensor:
        (qkv,), _ = self.qkv(x)
        return self.mlp.forward_residual(x, self.norm2, self.attention(qkv))


class VisionTransformer(nn.Module):
    """Logits [B, classes] of images [B, C, H, W]."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.patches = Patches(config)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))  # type: ignore[no-any-return]

    def features(self, images: Tensor) -> Tensor:
        """[B, width], from which the head predicts the class."""
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)  # type: ignore[no-any-return]
