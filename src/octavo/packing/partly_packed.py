"""A model in which any subset of the layers runs packed and the others in BF16, to measure the cost of packing them.

The packed layers have the bytes and the arithmetic of a packed folder (`octavo.runtime.packed_linear`), so a
measurement with all of them is a measurement of the folder. Both forms of each layer are in memory: 1.5 times the
model.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.reader import PackedTensors
from octavo.artifact.packed.scales import INPUT_SCALE_NAME, SCALE_NAME
from octavo.hf.outputs import model_outputs, predicts_tokens
from octavo.hf.source import Source
from octavo.models.decoder import Decoder
from octavo.numerics.codec import cast, widen
from octavo.numerics.formats import E4M3
from octavo.runtime.packed_linear import PackedLinear


class PartlyPackedModel:
    """The model of `source` on `device`. Each of the layers `names` runs in BF16 or as in the packed folder `packed`.

    Attributes:
        saved: the bytes that packing saves, by the name of the layer.
        logits: whether its outputs are logits of tokens. Otherwise they are last hidden states.

    Raises:
        ArtifactError: a tensor is damaged, or the model does not give one output for each token.
    """

    def __init__(self, source: Source, packed: Path, names: Iterable[str], device: str | torch.device) -> None:
        tensors = PackedTensors(packed)
        packing, specs = tensors.packing, tensors.reader.specs
        in_model = source.meta_model.stack_experts(_tensors(tensors))
        self._model: nn.Module = source.fill_bf16()
        self.logits = predicts_tokens(source.meta_model.model)
        self._forms: dict[str, tuple[nn.Module, nn.Module]] = {}
        self.saved: dict[str, int] = {}
        self._kv_scales = tensors.kv_scales
        for name in names:
            linear: Any = self._model.get_submodule(name)
            disk = source.meta_model.file_name(name)
            layer = PackedLinear(linear, packing.schemes[disk], name)
            layer.load_state_dict({leaf: in_model[f"{name}.{leaf}"] for leaf in layer.state_dict()}, assign=True)
            self._forms[name] = (linear, layer.to(device))
            stored = [spec.nbytes for key, spec in specs.items() if _is_of(key, disk)]
            self.saved[name] = 2 * linear.weight.numel() - sum(stored)
        if not isinstance(self._model, Decoder):
            self._model.config.use_cache = False
        self._model.to(device)
        self._device = torch.device(device)

    def with_packed(self, names: Collection[str], *, cache: bool = False) -> Callable[[Tensor], Tensor]:
        """The model with exactly the layers `names` packed: ids int64 [B, T] -> logits [B, T, V], or the last
        hidden states [B, T, width]. `cache` rounds keys and values if the folder has scales for them."""
        scales = self._kv_scales if cache else {}

        def run(ids: Tensor) -> Tensor:
            for name, forms in self._forms.items():
                self._model.set_submodule(name, forms[name in names])
            kept = {"past_key_values": _rounded_cache(scales)} if scales else {}
            result = model_outputs(self._model, ids.to(self._device), self.logits, **kept)
            if result.shape[:-1] != ids.shape:
                raise ArtifactError(
                    f"{type(self._model).__name__} gives {list(result.shape)} for {list(ids.shape)} tokens: nothing to "
                    "measure"
                )
            return result

        return run


def _tensors(packed: PackedTensors) -> dict[str, Tensor]:
    """Every tensor of a packed folder, by its name in memory."""
    tensors = {name: packed.reader.get(name) for name in packed.others}
    for name, scheme in packed.packing.schemes.items():
        tensors[f"{name}.weight"], tensors[f"{name}.{SCALE_NAME}"] = packed.stored(name)
        if scheme.static:
            tensors[f"{name}.{INPUT_SCALE_NAME}"] = packed.input_scale(name)
    return tensors


def _is_of(key: str, disk: str) -> bool:
    """Whether the tensor `key` of the files is the weight of the layer `disk`, or a scale of it."""
    return key.rpartition(".")[0] == disk and not key.endswith(".bias")


def _rounded_cache(scales: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """An empty cache of transformers, for `past_key_values`, that rounds keys and values to E4M3 as they are stored."""
    from transformers.cache_utils import Cache, DynamicLayer

    layers = [DynamicLayer() for _ in scales]
    for layer, pair in zip(layers, scales.values(), strict=True):
        layer.update = partial(_update, layer.update, pair)
    return Cache(layers=layers)


def _update(
    store: Callable[..., tuple[Tensor, Tensor]], scales: tuple[Tensor, Tensor], k: Tensor, v: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    k, v = (_through_e4m3(x, scale.to(x.device)) for x, scale in zip((k, v), scales, strict=True))
    return store(k, v, *args)


def _through_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (widen(cast(x.float() / scale, E4M3)) * scale).to(x.dtype)
