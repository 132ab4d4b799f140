"""A model of transformers, its own modeling code in float32, whose linear layers fetch their weight when they run.

So memory holds embeddings, norms and one layer's weight, whatever the size of the model, and one class runs MODEL, the
bytes of a packed folder and the INT8 baseline: they differ in what a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.artifact.files import read_json
from octavo.hf.experts import ExpertReader
from octavo.hf.meta_model import MetaModel, compute_buffers, transformers_meta_model
from octavo.hf.outputs import gives_logits, is_language_model, outputs
from octavo.hf.source import Source, open_source
from octavo.verification.checks import Required

Linear = Callable[[str, Tensor], Tensor]
"""name of the layer on disk, x [..., K] -> y [..., N] without bias, float32"""


class Layer(nn.Module):
    """Stands in the place of a linear layer: y = compute(name, x) + bias."""

    def __init__(self, name: str, linear: nn.Linear, owner: StreamedModel) -> None:
        super().__init__()
        self.name, self.in_features, self.out_features = name, linear.in_features, linear.out_features
        self.bias = linear.bias
        self._owner = [owner]  # in a list, so that it is no submodule

    def forward(self, x: Tensor) -> Tensor:
        y = self._owner[0].compute(self.name, x).to(x.dtype)
        return y if self.bias is None else y + self.bias


class StreamedModel:
    """The model that `folder`/config.json describes.

    Args:
        folder: with a config.json.
        get: a tensor by its name on disk, on the CPU.
        stored: the names that there are.
        compute: what a linear layer does; it may be changed between runs.
        device, dtype: of everything else.
        cache: makes the cache that a call keeps its keys and values in; None keeps none.

    Attributes:
        layers: the linear layers that `compute` runs.
        causal: whether it is a language model, which has logits of the next token.

    Raises:
        ArtifactError, ImportError: see `octavo.hf.meta_model.transformers_meta_model`.
    """

    def __init__(
        self,
        folder: Path,
        get: Callable[[str], Tensor],
        stored: Collection[str],
        compute: Linear,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        cache: Callable[[], Any] | None = None,
    ) -> None:
        meta_model = transformers_meta_model(read_json(folder / "config.json"), folder)
        model: Any = meta_model.model.to(dtype)
        if meta_model.experts is not None:
            get, stored = meta_model.experts.by_model_names(get, stored)
        model.config.use_cache = False
        self.compute, self.device, self.causal = compute, torch.device(device), is_language_model(model)
        self._cache = cache
        self.layers: list[str] = []
        tied = _ties(model)
        for name, module in list(model.named_modules()):
            weight = f"{name}.weight"
            if isinstance(module, nn.Linear) and weight in stored and len(tied.get(weight, [])) < 2:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, Layer(name, module, self))
                self.layers.append(name)
        compute_buffers(model, self.device)
        _fill(model, get, stored, self.device)
        self._model = model.to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits float32 [B, T, V] of ids int64 [B, T]; of an encoder the last hidden states [B, T, width]."""
        kept = {} if self._cache is None else {"past_key_values": self._cache()}
        return outputs(self._model, ids.to(self.device), self.causal, **kept)


def required_by(meta_model: MetaModel) -> Required:
    """What the files of a model must hold."""
    model = meta_model.model
    shapes = {name: tuple(tensor.shape) for name, tensor in meta_model.split_experts(model.state_dict()).items()}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linears += [] if meta_model.experts is None else meta_model.experts.experts
    return Required(shapes, linears, _ties(model))


def _ties(model: nn.Module) -> dict[str, list[str]]:
    """All names of the parameter that a name stands for."""
    names: dict[Tensor, list[str]] = {}  # a tensor is equal to itself alone as a key
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {name: group for group in names.values() for name in group}


def _fill(model: Any, get: Callable[[str], Tensor], stored: Collection[str], device: torch.device) -> None:
    """Numbers for what is no streamed weight; what is tied is filled once."""
    for group in {id(group): group for group in _ties(model).values()}.values():
        disk = next((name for name in group if name in stored), None)
        if disk is None:
            raise ValueError(f"{group[0]} is not stored, and {type(model).__name__} needs it")
        dtype = model.get_parameter(group[0]).dtype
        filled = nn.Parameter(get(disk).to(device, dtype), requires_grad=False)
        for name in group:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, filled)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta and name in stored:
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module)._buffers[leaf] = get(name).to(device)


class Against:
    """The model that a folder was packed from, a Hugging Face folder or a run of ours, by its names on disk.

    Attributes:
        folder: with its config.json and its tokenizer.
        shapes: of its tensors.
        context: the tokens that it can see.
        causal: whether it is a language model.

    Raises:
        FileNotFoundError, ArtifactError, ImportError: see `octavo.hf.source.open_source`.
    """

    def __init__(self, path: Path) -> None:
        self._source: Source = open_source(path)
        self.folder = self._source.description
        self.context = self._source.meta_model.context
        self.causal = gives_logits(self._source)
        metas = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in self._source.specs.items()}
        self.shapes = {name: tuple(t.shape) for name, t in self._source.meta_model.split_experts(metas).items()}

    def get(self, name: str) -> Tensor:
        """A tensor, as it is stored."""
        experts, reader = self._source.meta_model.experts, self._source.reader
        if isinstance(reader, ExpertReader):
            return reader.in_file(name)  # one expert, without reading the stack of all
        return self._source.get(name) if experts is None else experts.part(name, self._source.get)

    def get_bf16(self, name: str) -> Tensor:
        """A tensor rounded to BF16, which is what the model is served in."""
        tensor = self.get(name)
        return tensor.bfloat16() if tensor.is_floating_point() else tensor
