"""The rounding of keys and values by an e4m3 KV cache, for packed folders that have scales for one.

    k_q = e4m3(k / k_scale) * k_scale      k after rotary embedding; v alike; one scale a tensor, saturating at 448

This module follows docs/format.md, as the rest of the reference does, and uses no code of Octavo that packs.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from octavo.verification.files import CheckpointFiles
from octavo.verification.layer_spec import LayerSpec
from octavo.verification.numbers import round_input

_E4M3 = LayerSpec.per_tensor("static")
# The names below that of an attention layer, as compressed-tensors, ModelOpt and AutoFP8 (two) spell them.
_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale", "k_proj.output_scale")
_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "kv_scale", "v_proj.output_scale")


def cache_scales(files: CheckpointFiles) -> dict[str, tuple[Tensor, Tensor]]:
    """The scales (of keys, of values) by the name of their attention, in the order of the layers.

    Empty unless the folder has scales for every layer.
    """
    attentions = {name.removesuffix(".k_proj.weight") for name in files.shapes if name.endswith(".k_proj.weight")}
    scales = {}
    for attention in sorted(attentions, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        k, v = (_first_stored(files, attention, leaves) for leaves in (_KEYS, _VALUES))
        if k is None or v is None:
            return {}
        scales[attention] = (k, v)
    return scales


def _first_stored(files: CheckpointFiles, attention: str, leaves: tuple[str, ...]) -> Tensor | None:
    name = next((f"{attention}.{leaf}" for leaf in leaves if f"{attention}.{leaf}" in files.shapes), None)
    return None if name is None else files.get(name)


def rounding_cache(scales: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """An empty cache of transformers, for `past_key_values`, that rounds all keys and values it is given."""
    from transformers.cache_utils import Cache, DynamicLayer

    layers = [DynamicLayer() for _ in scales]
    for layer, pair in zip(layers, scales.values(), strict=True):
        layer.update = partial(_update, layer.update, pair)
    return Cache(layers=layers)


def _update(
    update: Callable[..., tuple[Tensor, Tensor]], scales: tuple[Tensor, Tensor], k: Tensor, v: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    k, v = (round_input(x, _E4M3, s.to(x.device)).to(x.dtype) for x, s in zip((k, v), scales, strict=True))
    return update(k, v, *args)
