"""Keys and values as a KV cache in e4m3 keeps them, where a packed folder has scales for one.

    k_q = e4m3(k / k_scale) * k_scale      k after its rotation; v alike, whole tensors by one scale, beyond 448 clipped

Written from docs/format.md, as the rest of the reference, and from no code of ours.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from octavo.verification.files import Bytes
from octavo.verification.layer_spec import Words
from octavo.verification.numbers import round_input

_E4M3 = Words(0, 0, "static")
# Below the name of an attention layer, as compressed-tensors, ModelOpt and AutoFP8 (two ways) spell them.
_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "kv_scale", "k_proj.output_scale")
_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "kv_scale", "v_proj.output_scale")


def cache_scales(read: Bytes) -> dict[str, tuple[Tensor, Tensor]]:
    """The scales of keys and values by the name of their attention, in the order of the layers; empty where a folder
    has not all of them."""
    attentions = {name.removesuffix(".k_proj.weight") for name in read.shapes if name.endswith(".k_proj.weight")}
    found = {}
    for attention in sorted(attentions, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        k, v = (_stored(read, attention, leaves) for leaves in (_KEYS, _VALUES))
        if k is None or v is None:
            return {}
        found[attention] = (k, v)
    return found


def _stored(read: Bytes, attention: str, leaves: tuple[str, ...]) -> Tensor | None:
    name = next((f"{attention}.{leaf}" for leaf in leaves if f"{attention}.{leaf}" in read.shapes), None)
    return None if name is None else read.get(name)


def rounded_cache(scales: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """An empty cache of transformers, for `past_key_values`, that rounds keys and values as they come."""
    utils: Any = importlib.import_module("transformers.cache_utils")
    layers = [utils.DynamicLayer() for _ in scales]
    for layer, pair in zip(layers, scales.values(), strict=True):
        layer.update = partial(_update, layer.update, pair)
    return utils.Cache(layers=layers)


def _update(
    keep: Callable[..., tuple[Tensor, Tensor]], scales: tuple[Tensor, Tensor], k: Tensor, v: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    k, v = (round_input(x, _E4M3, s.to(x.device)).to(x.dtype) for x, s in zip((k, v), scales, strict=True))
    return keep(k, v, *args)
