"""The loss that a language model is trained on: the mean cross-entropy of the next token.

A `Loss` takes the model, the inputs and the targets. `whole_loss` computes all logits. `ChunkedLoss` puts itself in the
place of the model's head, so that the head's inputs go to `linear_cross_entropy`, which computes the logits of some
tokens at a time. The head's weight is read within the model's forward pass: there FSDP2 has gathered it.

In training, the gradient of a mixture includes that of its balance loss; the value of the loss does not.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.causal import head_name, logits_of
from octavo.models.mixture import Mixture
from octavo.train.config import Config, ConfigError
from octavo.train.head_loss import linear_cross_entropy

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]

LARGE_VOCABULARY = 32768  # "auto" takes chunks for this size and larger ones


def make_loss(config: Config, model: nn.Module) -> Loss:
    """The loss that the settings choose. Call it before the model is converted, sharded or compiled.

    Raises:
        ConfigError: logits in chunks are required of a model whose head does more than multiply by a weight.
    """
    choice = config.loss.logits
    large = any(isinstance(m, nn.Linear) and m.out_features >= LARGE_VOCABULARY for m in model.modules())
    if choice == "whole" or (choice == "auto" and not large):
        return whole_loss
    name = head_name(model)
    if name is not None:
        return ChunkedLoss(name, config.loss.chunk)
    if choice == "auto":
        return whole_loss
    raise ConfigError(
        f"loss.logits = chunked requires a model whose logits are the outputs of a linear layer without bias; "
        f"{type(model).__name__} computes them in another way: choose auto or whole"
    )


def whole_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, 0-dim, of int64 inputs and targets, each [B, T]; logits and sums in float32."""
    predicted = logits_of(model(inputs))
    return _balanced(F.cross_entropy(predicted.flatten(0, 1).float(), targets.flatten()), model)


def _balanced(loss: Tensor, model: nn.Module) -> Tensor:
    """`loss`, with the gradient of the balance loss of a mixture added to its own."""
    balance = model.take_balance() if isinstance(model, Mixture) else None
    return loss if balance is None else loss + (balance - balance.detach())


class ChunkedLoss:
    """The loss of `whole_loss`, with the logits of `chunk` tokens in memory at a time.

    Args:
        head: the name of the model's head, of `octavo.models.causal.head_name`.
        chunk: tokens whose logits exist at a time.
    """

    def __init__(self, head: str, chunk: int) -> None:
        self._parent, _, self._name = head.rpartition(".")
        self._chunk = chunk

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        owner = model.get_submodule(self._parent)
        head = getattr(owner, self._name)
        setattr(owner, self._name, _LossHead(head, targets, self._chunk))
        try:
            return _balanced(logits_of(model(inputs)), model)
        finally:
            setattr(owner, self._name, head)


class _LossHead(nn.Module):
    """Returns the loss of the head's outputs in their place."""

    def __init__(self, head: nn.Linear, targets: Tensor, chunk: int) -> None:
        super().__init__()
        self.head, self.targets, self.chunk = head, targets, chunk

    def forward(self, x: Tensor) -> Tensor:
        return linear_cross_entropy(x, self.head.weight, self.targets, chunk=self.chunk)
