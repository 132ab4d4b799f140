"""The experts of a mixture, one after another, each with its own matrices: y = down(act(gate(x)) * up(x))."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from octavo.hf.meta_model import MetaModel
from octavo.nn.expert_conversion import find_experts

LinearFn = Callable[[str, Tensor], Tensor]
"""name of the layer in files, x [..., K] -> y [..., N] in float32, without bias"""


class Expert(NamedTuple):
    """The names of an expert's matrices in the files."""

    gate: str
    up: str
    down: str


class StreamedExperts(nn.Module):
    """Replaces a module of experts. Each matrix is computed by `compute` for the tokens of its expert."""

    def __init__(self, experts: Sequence[Expert], act: Callable[[Tensor], Tensor], compute: LinearFn) -> None:
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


def expert_matrices(meta_model: MetaModel, stored: Collection[str]) -> dict[str, list[Expert]]:
    """The experts of each module of the model whose mathematics is known and whose matrices are all `stored`."""
    files, found = meta_model.experts, {}
    if files is None:
        return {}
    for name in find_experts(meta_model.model):
        inner, outer = (files.parts.get(f"{name}.{leaf}", []) for leaf in ("gate_up_proj", "down_proj"))
        if outer and len(inner) == 2 * len(outer) and all(part in stored for part in (*inner, *outer)):
            parts = zip(inner[: len(outer)], inner[len(outer) :], outer, strict=True)  # the gates of all, then the ups
            found[name] = [Expert(*(part.removesuffix(".weight") for part in each)) for each in parts]
    return found
