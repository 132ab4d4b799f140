"""AdamW on FP32 master weights, and its state as named tensors.

Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) on matrices, none on norms and biases.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octavo.train.config import Config


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW over the parameters of `model` that are trained, its fused implementation (CPU and CUDA have one)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, betas=betas, fused=True)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as PARAMETER.ENTRY -> tensor: zeros for a trained parameter that was never stepped."""
    state: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            entries = optimizer.state.get(p) or {entry: torch.zeros_like(p) for entry in ("exp_avg", "exp_avg_sq")}
            state |= {f"{name}.{entry}": tensor for entry, tensor in ({"step": torch.zeros(())} | entries).items()}
    return state


def required_state(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the names and shapes that `optimizer_state` gives."""
    required: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            required |= {f"{name}.exp_avg": p, f"{name}.exp_avg_sq": p, f"{name}.step": torch.zeros(())}
    return required


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_state` gave: tensors as `required_state` names them."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            entries = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[p] = {entry: state[f"{name}.{entry}"].to(p.device) for entry in entries}
