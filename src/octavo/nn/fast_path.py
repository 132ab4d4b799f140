"""Keep PyTorch off the fast path of `nn.TransformerEncoderLayer`, which reads weights and never calls the layers.

PyTorch takes the fast path in evaluation mode without gradients. A converted linear layer would then not run in FP8. So
an encoder layer that has one becomes a subclass of its class, with the same name, in which the conditions of the fast
path are false. So does the `nn.TransformerEncoder` around it. The attributes of the modules stay as they are.
A converted `nn.MultiheadAttention` has a forward of its own, without a fast path.
"""

from torch import nn

from octavo.nn.linear import RecipeLayer
from octavo.nn.mixed_class import mix_classes


class CallingEncoderLayer:
    """An encoder layer that calls its linear layers: the fast path requires a ReLU or GELU, and none is reported."""

    activation_relu_or_gelu = property(lambda self: 0)


class CallingEncoder:
    """An encoder that passes padded tensors to its layers: only the fast path takes nested tensors."""

    use_nested_tensor = property(lambda self: False)


def leave_fast_paths(model: nn.Module) -> None:
    """Make every encoder layer of `model` that has a converted layer call it; idempotent."""
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoderLayer) and _is_converted(module):
            _mix(CallingEncoderLayer, module)
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, CallingEncoderLayer) for m in module.layers):
            _mix(CallingEncoder, module)


def _is_converted(layer: nn.TransformerEncoderLayer) -> bool:
    return any(isinstance(module, RecipeLayer) for module in layer.modules())


def _mix(ours: type, module: nn.Module) -> None:
    if not isinstance(module, ours):
        module.__class__ = mix_classes(ours, type(module))
