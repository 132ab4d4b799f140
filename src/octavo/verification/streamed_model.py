"""A model of transformers in float32 whose linear layers and experts read their weight when they run.

Memory holds embeddings, norms and one layer's weight, whatever the size of the model. `StreamedModel` runs MODEL, the
bytes of a packed folder, and the INT8 baseline, which differ only in what a linear layer computes.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.files import model_tensors
from octavo.hf import meta_model as models
from octavo.hf.meta_model import ExpertMatrices, MetaModel
from octavo.nn.module_tools import computes_linearly
from octavo.verification.checks import Required

LinearFn = Callable[[str, Tensor], Tensor]
"""name of the layer in files, x [..., K] -> y [..., N] in float32, without bias"""


class StreamedLinear(nn.Module):
    """Replaces a linear layer: y = compute(name, x) + bias."""

    def __init__(self, name: str, linear: nn.Linear, compute: LinearFn) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=linear.weight.dtype)  # some models cast an input to its dtype
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._name, self._compute = name, compute

    def forward(self, x: Tensor) -> Tensor:
        y = self._compute(self._name, x).to(x.dtype)
        return y if self.bias is None else y + self.bias


class StreamedModel:
    """A model of transformers (of `transformers_meta_model`, changed in place), to run. `get` reads a tensor to the CPU
    by its name in the files, which hold `stored`. `compute` computes a linear layer, `rounds` has a function for each
    layer that rounds keys and values; both may be replaced between calls. `logits`: its outputs are those of tokens."""

    def __init__(
        self,
        meta_model: MetaModel,
        get: Callable[[str], Tensor],
        stored: Collection[str],
        compute: LinearFn,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model: Any = meta_model.model.to(dtype)
        known = models.expert_matrices(meta_model)
        experts = {n: m for n, m in known.items() if all(f"{part}.weight" in stored for each in m for part in each)}
        if meta_model.experts.stacks:
            get, stored = meta_model.experts.by_model_names(get, stored)
        model.config.use_cache = False
        self.compute, self.device, self.logits = compute, torch.device(device), models.predicts_tokens(model)
        self.rounds: Sequence[Callable[[Tensor, Tensor], Sequence[Tensor]]] = ()
        self.experts: dict[str, StreamedExperts] = {}  # each module of them, by its name
        tied = models.tied_names(model)
        for name, module in list(model.named_modules()):
            weight = f"{name}.weight"
            # State-space layers read the weight of dt_proj without a call; the router of Llama 4 is no linear layer.
            called = isinstance(module, nn.Linear) and computes_linearly(module) and not name.endswith(".dt_proj")
            if called and weight in stored and len(tied.get(weight, [])) < 2:
                layer = StreamedLinear(meta_model.file_name(name), module, lambda layer, x: self.compute(layer, x))
                model.set_submodule(name, layer)
        for name, matrices in experts.items():
            act: Any = model.get_submodule(name).act_fn
            self.experts[name] = StreamedExperts(matrices, act, lambda layer, x: self.compute(layer, x))
            model.set_submodule(name, self.experts[name])
        metas = model_tensors(model)
        found = {name: [each for each in tied.get(name, [name]) if each in stored] for name in metas}
        tensors = {name: get(names[0]).to(metas[name].dtype) for name, names in found.items() if names}
        self.model = models.fill_model(meta_model, tensors).to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs float32 (`octavo.hf.meta_model.model_outputs`) of token ids int64 [B, T] or of images."""
        # cuDNN convolves float32 with the 10 bits of TF32 unless it is told not to.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return models.model_outputs(self.model, inputs.to(self.device), self.logits, self.rounds)


def required_by(meta_model: MetaModel) -> Required:
    """The tensors that the files of a model must hold."""
    model = meta_model.model
    shapes = {name: tuple(tensor.shape) for name, tensor in meta_model.experts.split(model.state_dict()).items()}
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linears = [*map(meta_model.file_name, modules), *meta_model.experts.experts]
    in_file = meta_model.experts.file_name
    tied = {in_file(name): [in_file(each) for each in names] for name, names in models.tied_names(model).items()}
    return Required(shapes, linears, tied, modules)


# ---- The experts of a mixture, one after another, each with its own matrices: y = down(act(gate(x)) * up(x)).


class StreamedExperts(nn.Module):
    """Replaces a module of experts. Each matrix is computed by `compute` for the tokens of its expert."""

    def __init__(self, experts: Sequence[ExpertMatrices], act: Callable[[Tensor], Tensor], compute: LinearFn) -> None:
        super().__init__()
        self.matrices, self._act, self._compute = experts, act, compute
        self.tokens: Tensor | None = None  # [4, K], the first of the last call

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The output [T, K] of x [T, K]; index and weights are [T, top_k]."""
        x, out, self.tokens = hidden_states, hidden_states.new_zeros(hidden_states.shape), hidden_states[:4].bfloat16()
        for e, names in enumerate(self.matrices):
            token, slot = (top_k_index == e).nonzero(as_tuple=True)
            if len(token):
                gate, up = (self._compute(name, x[token]).to(x.dtype) for name in (names.gate, names.up))
                y = self._compute(names.down, self._act(gate) * up).to(x.dtype)
                out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(x.dtype))
        return out


@torch.inference_mode()
def expert_outputs(model: Any, name: str, tokens: Tensor, count: int) -> Tensor:
    """What each of the `count` experts of the module `name` computes for the same tokens [T, K], whatever the router
    would choose: y float32 [count, T, K] on the CPU."""
    device = next(model.parameters()).device
    x = tokens.repeat(count, 1).to(device, model.dtype)  # [count * T, K]
    index = torch.arange(count, device=device).repeat_interleave(len(tokens)).unsqueeze(1)
    y = model.get_submodule(name)(x, index, torch.ones_like(index, dtype=x.dtype))
    return y.float().cpu().view(count, *tokens.shape)
