"""`Conv1D`, the linear layer of transformers' GPT-2, computed by a recipe.

    Conv1D: y = x @ W[K,N] + b          nn.Linear: y = x @ W[N,K]^T + b

It is a linear layer whose weight is stored transposed. The recipe casts W^T, so that row scales belong to outputs as in
`nn.Linear`, and the gradient is transposed back. The parameter and its `state_dict` stay as they are.
"""

from typing import Any

from torch import Tensor, nn

from octavo.nn.linear import RecipeLayer


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is a `Conv1D` of transformers, converted or not, by name: transformers need not be installed."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils" for cls in type(module).__mro__
    )


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """N outputs and K inputs of an `nn.Linear` or a `Conv1D`."""
    any_layer: Any = layer
    if is_conv1d(layer):
        inputs, outputs = any_layer.weight.shape
        return outputs, inputs
    return any_layer.out_features, any_layer.in_features


class Conv1D(RecipeLayer):
    """A converted `Conv1D`. `octavo.cast_once` does not cache its weight: it is cast in every forward pass."""

    weight: nn.Parameter  # [K, N]
    bias: nn.Parameter  # [N]

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight.t(), self.bias, None)
