"""An activation whose output is quantized as it is made, and its gradient, quantized too."""

from octavo.ops.activation.op import ActivationGradient, activation_backward, activation_quantize

__all__ = ["ActivationGradient", "activation_backward", "activation_quantize"]
