"""A model of transformers in float32 whose linear layers and experts read their weight when they run.

Memory holds embeddings, norms and one layer's weight, whatever the size of the model. `StreamedModel` runs MODEL, the
bytes of a packed folder, and the INT8 baseline, which differ only in what a linear layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from octavo.artifact.files import model_tensors
from octavo.hf.expert_names import expert_matrices
from octavo.hf.meta_model import MetaModel, compute_buffers, transformers_meta_model
from octavo.hf.outputs import model_outputs, predicts_tokens
from octavo.hf.source import Source, open_source
from octavo.verification.checks import Required
from octavo.verification.streamed_experts import LinearFn, StreamedExperts


class StreamedLinear(nn.Module):
    """Replaces a linear layer: y = compute(name, x) + bias."""

    weight = None  # T5 asks for its dtype, unless it is no tensor

    def __init__(self, name: str, linear: nn.Linear, owner: StreamedModel) -> None:
        super().__init__()
        self.name, self.in_features, self.out_features = name, linear.in_features, linear.out_features
        self.bias = linear.bias
        self._owner = [owner]  # in a list, so that nn.Module does not register it

    def forward(self, x: Tensor) -> Tensor:
        y = self._owner[0].compute(self.name, x).to(x.dtype)
        return y if self.bias is None else y + self.bias


class StreamedModel:
    """A model of transformers, to run.

    Args:
        meta_model: made by `octavo.hf.meta_model.transformers_meta_model`; it is changed in place.
        get: reads a tensor, by its name in files, to the CPU.
        stored: the names of the tensors in the files.
        compute: computes a linear layer. It may be replaced between calls.
        device, dtype: of everything else.
        make_cache: makes the KV cache of a call; None runs without one.

    Attributes:
        logits: whether its outputs are logits of tokens, see `octavo.hf.outputs.predicts_tokens`.
    """

    def __init__(
        self,
        meta_model: MetaModel,
        get: Callable[[str], Tensor],
        stored: Collection[str],
        compute: LinearFn,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        make_cache: Callable[[], Any] | None = None,
    ) -> None:
        model: Any = meta_model.model.to(dtype)
        known = expert_matrices(meta_model)
        experts = {
            name: m for name, m in known.items() if all(f"{part}.weight" in stored for each in m for part in each)
        }
        if meta_model.experts is not None:
            get, stored = meta_model.experts.by_model_names(get, stored)
        model.config.use_cache = False
        self.compute, self.device, self.logits = compute, torch.device(device), predicts_tokens(model)
        self._make_cache = make_cache
        tied = _tied_names(model)
        for name, module in list(model.named_modules()):
            weight = f"{name}.weight"
            # State-space layers, as Mamba's, and PyTorch's attention read the weights of these without a call.
            called = not name.endswith(".dt_proj") and not isinstance(module, NonDynamicallyQuantizableLinear)
            if isinstance(module, nn.Linear) and called and weight in stored and len(tied.get(weight, [])) < 2:
                model.set_submodule(name, StreamedLinear(name, module, self))
        for name, matrices in experts.items():
            act: Any = model.get_submodule(name).act_fn
            model.set_submodule(name, StreamedExperts(matrices, act, lambda layer, x: self.compute(layer, x)))
        compute_buffers(model, self.device)
        _fill(model, get, stored, self.device)
        self._model = model.to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs float32 (`octavo.hf.outputs.model_outputs`) of token ids int64 [B, T] or of images."""
        cache = {} if self._make_cache is None else {"past_key_values": self._make_cache()}
        # cuDNN convolves float32 with the 10 bits of TF32 unless it is told not to.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return model_outputs(self._model, inputs.to(self.device), self.logits, **cache)


def required_by(meta_model: MetaModel) -> Required:
    """The tensors that the files of a model must hold."""
    model = meta_model.model
    shapes = {name: tuple(tensor.shape) for name, tensor in meta_model.split_experts(model.state_dict()).items()}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linears += [] if meta_model.experts is None else meta_model.experts.experts
    return Required(shapes, linears, _tied_names(model))


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """For the name of each parameter, all names of it."""
    names: dict[Tensor, list[str]] = {}  # tensors as keys compare by identity
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {name: group for group in names.values() for name in group}


def _fill(model: Any, get: Callable[[str], Tensor], stored: Collection[str], device: torch.device) -> None:
    """Read all tensors that are not streamed; tied parameters are read once."""
    for group in {id(group): group for group in _tied_names(model).values()}.values():
        file_name = next((name for name in group if name in stored), None)
        if file_name is None:
            raise ValueError(f"{group[0]} is not stored, and {type(model).__name__} needs it")
        dtype = model.get_parameter(group[0]).dtype
        filled = nn.Parameter(get(file_name).to(device, dtype), requires_grad=False)
        for name in group:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, filled)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta and name in stored:
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module)._buffers[leaf] = get(name).to(device)


class BaselineModel:
    """The model that a folder was packed from, MODEL: a Hugging Face folder or a run of `octavo train`.

    Args:
        path: MODEL.
        step: the checkpoint of a run; None takes the newest.

    Attributes:
        folder: with its config.json and its tokenizer.
        shapes: of its tensors, by their names in files.
        meta_model: the model without weights.
        logits: whether its outputs are logits of tokens.

    Raises:
        FileNotFoundError, ArtifactError, ImportError: see `octavo.hf.source.open_source`.
    """

    def __init__(self, path: Path, step: int | None) -> None:
        self._source: Source = open_source(path, step)
        self.folder = self._source.description
        self.meta_model = self._source.meta_model
        self.logits = predicts_tokens(self.meta_model.model)
        metas = self.meta_model.split_experts(model_tensors(self.meta_model.model))
        self.shapes = {name: tuple(t.shape) for name, t in metas.items()}
        self._dtypes = {name: t.dtype for name, t in metas.items()}

    def get(self, name: str) -> Tensor:
        return self._source.get_from_file(name)

    def get_served(self, name: str) -> Tensor:
        """Read a tensor, in the dtype in which the model is served: BF16 for all weights of linear layers."""
        return self.get(name).to(self._dtypes[name])

    def streamed(self, compute: LinearFn, device: str) -> StreamedModel:
        """The model in float32 with weights as they are served, whose linear layers are computed by `compute`."""
        meta_model = transformers_meta_model(self._source.config, self.folder)
        return StreamedModel(meta_model, self.get_served, self.shapes, compute, device)
