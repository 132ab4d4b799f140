"""Model FLOPs utilization (MFU): the share of a GPU's peak that the arithmetic of the model alone amounts to.

    FLOPs of a token = 6 N + 12 L H Q T        MFU = FLOPs of a token * tokens a second a GPU / peak

N is the number of parameters that multiply activations, L the number of layers, H that of heads of Q features, and T
the sequence's length (PaLM: Chowdhery et al., arXiv:2204.02311, appendix B). What activation checkpointing computes
again does not count. The peak is the dense one of BF16 for every recipe, so that runs in BF16 and FP8 compare.
"""

import re
from typing import Any

import torch
from torch import nn

from octavo.models.decoder import Decoder

# Dense BF16 FLOP/s by a pattern of the device's name. From the data sheets of NVIDIA (half of the figure with sparsity,
# where only that is given) and AMD.
_PEAKS = {
    r"H200|H100 80GB HBM3|H100 SXM|GH200": 989.4e12,  # H100 and H200 data sheets: 1,979 TFLOP/s with sparsity
    r"H100 NVL": 835.5e12,  # H100 NVL: 1,671 with sparsity
    r"H100 PCIe": 756.5e12,  # H100 PCIe: 1,513 with sparsity
    r"H800": 989.4e12,  # as H100: it differs in its links
    r"GB200": 2500e12,  # GB200 NVL72, a GPU: 5,000 with sparsity
    r"B200": 2250e12,  # HGX B200, a GPU: 4,500 with sparsity
    r"A100|A800": 312e12,  # A100 data sheet
    r"L40S": 362.05e12,  # L40S data sheet
    r"\bL4\b": 121e12,  # L4: 242 with sparsity
    r"RTX 4070$": 58.3e12,  # 5,888 cores at 2.475 GHz, with the rates of a core of the next line
    r"RTX 4090$": 165.2e12,  # Ada GPU architecture whitepaper, sums in FP32
    r"RTX 5090$": 209.5e12,  # RTX Blackwell GPU architecture whitepaper, sums in FP32
    r"MI300X|MI325X": 1307.4e12,  # MI300X and MI325X data sheets
    r"MI355X": 2516.6e12,  # MI355X data sheet
}


def peak_flops(name: str) -> float | None:
    """The peak of dense BF16 arithmetic, FLOP/s, of the GPU with this name; None for one that the table lacks.

    Example:
        >>> peak_flops("NVIDIA H200")
        989400000000000.0
    """
    return next((peak for pattern, peak in _PEAKS.items() if re.search(pattern, name)), None)


def flops_per_token(model: nn.Module, context: int) -> float | None:
    """The FLOPs of the forward and backward pass for a token of a sequence of `context` tokens.

    None for a model with stacked experts: a token uses some of them only, and the shapes do not say how many.
    """
    if any(p.ndim > 2 for p in model.parameters()):
        return None
    layers = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    multiplied = {id(p): p.numel() for m in layers for p in m.parameters(recurse=False) if p.ndim == 2}
    return 6.0 * sum(multiplied.values()) + 12.0 * _attention_features(model) * context


def _attention_features(model: Any) -> int:
    """L H Q: the features of the queries of all layers."""
    if isinstance(model, Decoder):
        return model.config.layers * model.config.width
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * config.num_attention_heads * head)


def mfu(flops: float | None, tokens_per_second: float, device: torch.device) -> float | None:
    """The utilization of one GPU, 0 to 1; None if the FLOPs of a token or the peak are not known."""
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if flops is None or peak is None else flops * tokens_per_second / peak
