"""The experts of a mixture, one after another, each with its own matrices: y = down(act(gate(x)) * up(x))."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from octavo.hf.expert_names import ExpertMatrices

LinearFn = Callable[[str, Tensor], Tensor]
"""name of the layer in files, x [..., K] -> y [..., N] in float32, without bias"""


class StreamedExperts(nn.Module):
    """Replaces a module of experts. Each matrix is computed by `compute` for the tokens of its expert."""

    def __init__(self, experts: Sequence[ExpertMatrices], act: Callable[[Tensor], Tensor], compute: LinearFn) -> None:
        super().__init__()
        self._experts, self._act, self._compute = experts, act, compute

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The output [T, K] of x [T, K]; index and weights are [T, top_k]."""
        x, out = hidden_states, hidden_states.new_zeros(hidden_states.shape)
        for e, names in enumerate(self._experts):
            token, slot = (top_k_index == e).nonzero(as_tuple=True)
            if len(token):
                gate, up = (self._compute(name, x[token]).to(x.dtype) for name in (names.gate, names.up))
                y = self._compute(names.down, self._act(gate) * up).to(x.dtype)
                out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(x.dtype))
        return out
