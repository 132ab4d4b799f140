"""The attention of prompts, in BF16 or FP8."""

import warnings
from typing import Any

import torch

from octavo.generation.forward import Forward, key_shape
from octavo.ops import fp8_attention_limit

ATTENTIONS = ("bf16", "fp8")


def check_attention(name: str) -> None:
    """Raise a ValueError unless this names an attention of prompts."""
    if name not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {name!r}")


def use_fp8_attention(forward: Forward, model: Any, device: torch.device) -> None:
    """Let long prompts attend in FP8. A warning says so where that does not run."""
    if limit := fp8_attention_limit(device, key_shape(model).head_dim):
        warnings.warn(f"the attention of prompts runs in BF16: {limit}", stacklevel=2)
    forward.cache.fp8_attention = not limit
