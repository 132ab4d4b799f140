"""`nn.TransformerEncoderLayer` has a fast path that reads the weights of its linear layers and never calls them.

PyTorch takes it in evaluation mode without gradients. An encoder layer of which a linear layer was converted leaves it,
or FP8 would not run there. Its class becomes a subclass with the same name, in which the conditions of the fast path
are false. So does the class of the `nn.TransformerEncoder` around it. The attributes of the modules stay as they are.
"""

from __future__ import annotations

from torch import nn

from octavo.nn.linear import Linear
from octavo.nn.mixed import mixed


class CallingEncoderLayer:
    """An encoder layer that calls its linear layers: PyTorch's condition, that the activation be known, is false."""

    activation_relu_or_gelu = property(lambda self: 0)


class CallingEncoder:
    """An encoder that gives its layers padded tensors; only the fast path takes nested ones."""

    use_nested_tensor = property(lambda self: False)


def leave_fast_paths(model: nn.Module) -> None:
    """Let every encoder layer of `model` that has a converted linear layer call it; idempotent."""
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoderLayer) and _is_converted(module):
            _mix(CallingEncoderLayer, module)
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, CallingEncoderLayer) for m in module.layers):
            _mix(CallingEncoder, module)


def _is_converted(layer: nn.TransformerEncoderLayer) -> bool:
    return isinstance(layer.linear1, Linear) or isinstance(layer.linear2, Linear)


def _mix(ours: type, module: nn.Module) -> None:
    if not isinstance(module, ours):
        module.__class__ = mixed(ours, type(module))
