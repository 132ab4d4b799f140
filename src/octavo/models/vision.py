"""Two models of images: a vision transformer, and below it a diffusion transformer.

The patches of an image are the tokens of a pre-norm transformer, whose mean is classified.

    x = patches(image) + positions
    x = x + proj(attention(qkv(norm1(x))));  x = x + fc2(gelu(fc1(norm2(x))))
    logits = head(mean over tokens of norm(x))

Dosovitskiy et al. 2021, arXiv:2010.11929, with the mean of the tokens in place of a class token (Beyer et al. 2022,
arXiv:2205.01580). The patches are a convolution with windows that do not overlap, so it is a matrix product.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn import GELU, NormLinear


@dataclass(frozen=True)
class ImageConfig:
    """Sizes of a transformer on square images; `image` and `patch` are heights and widths in pixels. Raises a
    ValueError if they do not fit together."""

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
        return self.proj(images).flatten(2).transpose(1, 2) + self.positions


class SelfAttention(nn.Module):
    """Attention of all tokens to all; `forward` takes q, k and v as one tensor [B, T, 3 width]."""

    layer_after = "proj"  # whose input is the result of PyTorch's attention (`octavo.nn.attention_layers`)

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))  # type: ignore[no-untyped-call]
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


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
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """[B, width], from which the head predicts the class."""
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)


# ---- A diffusion transformer that makes images of a class from noise, by rectified flow.
#
#     x_t = (1 - t) image + t noise;  the model predicts v = noise - image from x_t, t and the class
#     image = x_1 - (the integral of v from t = 1 to 0), by Euler's method
#
# The transformer is DiT (Peebles and Xie 2023, arXiv:2212.09748): each norm is shifted and scaled, and each branch is
# gated, by a linear function of time and class, whose weights begin with zeros ("adaLN-Zero"). Source of the flow: Liu
# et al. 2023, arXiv:2209.03003.


FREQUENCIES = 32


class DiffusionBlock(nn.Module):
    """A block whose norms and branches depend on the condition c [B, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = SelfAttention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = GELU(self, "fc1", "fc2")
        self.modulation = _zeros(nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        n = torch.addcmul(shift1, self.norm1(x), 1 + scale1)
        x = x + gate1 * self.attention(self.attention.qkv(n))
        n = torch.addcmul(shift2, self.norm2(x), 1 + scale2)
        return x + gate2 * self.mlp(n)


class DiffusionTransformer(nn.Module):
    """The velocity v [B, C, H, W] of x_t [B, C, H, W] at the times t [B] in 0 to 1, for the classes [B]."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.patches = Patches(config)
        self.time1, self.time2 = nn.Linear(2 * FREQUENCIES, width), nn.Linear(width, width)
        self.classes = nn.Embedding(config.classes, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width, config.heads) for _ in range(config.layers))
        self.norm, self.modulation = nn.LayerNorm(width, elementwise_affine=False), _zeros(nn.Linear(width, 2 * width))
        self.head = _zeros(nn.Linear(width, config.channels * config.patch**2))

    def forward(self, x: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        # Sines and cosines [B, 2 FREQUENCIES] of the times, from one period to 1,000.
        rates = torch.logspace(0, 3, FREQUENCIES, device=t.device) * 2 * math.pi
        angles = t[:, None] * rates
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
        c = self.time2(F.silu(self.time1(waves))) + self.classes(classes)
        y = self.patches(x)
        for block in self.blocks:
            y = block(y, c)
        shift, scale = self.modulation(F.silu(c)).unsqueeze(1).chunk(2, dim=-1)
        y = self.head(torch.addcmul(shift, self.norm(y), 1 + scale))  # [B, T, C p p]
        return F.fold(y.transpose(1, 2), self.config.image, self.config.patch, stride=self.config.patch)


def flow_loss(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """The mean squared error of v at a random time of each image, against fresh noise."""
    noise, t = torch.randn_like(images), torch.rand(len(images), device=images.device)
    at = t.view(-1, 1, 1, 1)
    v = model((1 - at) * images + at * noise, t, classes)
    return F.mse_loss(v.float(), noise - images)


@torch.no_grad()
def sample(model: DiffusionTransformer, classes: Tensor, steps: int = 20) -> Tensor:
    """Images [B, C, H, W] of the classes [B], from noise, in `steps` steps of Euler's method."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    config = model.config
    x = torch.randn(len(classes), config.channels, config.image, config.image, device=classes.device)
    for step in range(steps):
        t = torch.full((len(classes),), 1 - step / steps, device=x.device)
        x = x - model(x, t, classes).float() / steps
    return x


def _zeros(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
