"""Operations whose dtype under autocast the documentation of PyTorch states."""

import torch
import torch.nn.functional as F
from torch import nn


class Calls(nn.Module):
    """Calls a function, with a parameter so that there is a gradient."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return self.function(x, self.weight)


# (function, operation, its dtype where x is BF16, and w FP32), from "CUDA Op-Specific Behavior" of torch.amp's page
DOCUMENTED = [
    (lambda x, w: x @ w, "mm", "BF16"),
    (lambda x, w: torch.addmm(x, x, w), "addmm", "BF16"),
    (lambda x, w: F.linear(x, w), "mm", "BF16"),
    (lambda x, w: torch.einsum("ij,jk->ik", x, w), "bmm", "BF16"),
    (lambda x, w: F.conv1d(x[None], w[:, :, None]), "convolution", "BF16"),
    (lambda x, w: torch.exp(x) * w, "exp", "FP32"),
    (lambda x, w: x.abs().pow(2) * w, "pow", "FP32"),
    (lambda x, w: F.layer_norm(x, (8,), w[0]), "native_layer_norm", "FP32"),
    (lambda x, w: F.softmax(x, -1) * w, "_softmax", "FP32"),
    (lambda x, w: x.sum() * w, "sum", "FP32"),
    (lambda x, w: F.mse_loss(x, x + w), "mse_loss", "FP32"),
    (lambda x, w: F.log_softmax(x @ w, -1), "_log_softmax", "FP32"),
    (lambda x, w: F.nll_loss(x @ w, torch.zeros(8, dtype=torch.long)), "nll_loss_forward", "FP32"),
    # cross_entropy calls log_softmax with the dtype of the logits, and autocast leaves a dtype that is given
    (lambda x, w: F.cross_entropy(x @ w, torch.zeros(8, dtype=torch.long)), "_log_softmax", "BF16"),
    (lambda x, w: F.cross_entropy(x @ w, torch.zeros(8, dtype=torch.long)), "nll_loss_forward", "FP32"),
    (lambda x, w: torch.cumsum(x, 0) * w, "cumsum", "FP32"),
    (lambda x, w: F.relu(x) @ w, "relu", "BF16"),
    (lambda x, w: x + w, "add", "FP32"),
    (lambda x, w: F.gelu(x) @ w, "gelu", "BF16"),
    (lambda x, w: torch.addcmul(x, x, w), "addcmul", "FP32"),
]
