"""The scales that are fixed when a model is packed, from its calibration: of the inputs of layers whose scheme is
`static`, and of a cache of keys and values in e4m3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from octavo.artifact.kv_scales import K_SCALE, V_SCALE, attentions
from octavo.serve.calibration import Calibration, hash_model
from octavo.serve.source import Source

CACHES = ("fp8",)


@dataclass(frozen=True)
class StaticScales:
    """Scales, float32 [1], and where they come from.

    Attributes:
        inputs: of the inputs of layers, by the name of the layer.
        keys_and_values: <attention>.k_scale and <attention>.v_scale, of the keys after the rotation and of the values,
            for every attention layer; empty without a cache.
        record: what octavo.json says of the calibration.
    """

    inputs: Mapping[str, Tensor]
    keys_and_values: Mapping[str, Tensor]
    record: Mapping[str, object]

    @classmethod
    def read(
        cls, folder: Path | None, rule: str, source: Source, layers: Sequence[str], kv_cache: str | None
    ) -> StaticScales:
        """Of the calibration in `folder`: the inputs of `layers`, and with `kv_cache` the keys and values.

        Raises:
            FileNotFoundError, ArtifactError: the calibration is not whole.
            ValueError: none is given, it is of another model, or it has not seen what is asked for.
        """
        if folder is None:
            what = "the scheme static stores the scales of inputs" if layers else "--kv-cache stores those of K and V"
            raise ValueError(f"{what}: give --calibration, made by octavo calibrate")
        found = Calibration.load(folder)
        if found.model_hash != hash_model(source.origin):
            raise ValueError(f"{folder} is a calibration of another model than {source.origin}: calibrate this one")
        if missing := [name for name in layers if name not in found.layers]:
            raise ValueError(f"{folder} knows nothing of {missing[0]}: calibrate the model with this version")
        inputs = {name: found.scale(name, rule).reshape(1) for name in layers}
        settings = dict(found.settings)
        record = {"rule": rule, "prompts": found.prompts, "tokens": found.tokens, "settings": settings}
        keys_and_values = {} if kv_cache is None else _keys_and_values(found, rule, source)
        return cls(inputs, keys_and_values, record | {"model_hash": found.model_hash, "kv_cache": kv_cache})


def check_cache(kv_cache: str | None) -> bool:
    """Whether a cache was asked for; a ValueError names the choices."""
    if kv_cache is not None and kv_cache not in CACHES:
        raise ValueError(f"unknown cache {kv_cache!r} of keys and values: choose {' or '.join(CACHES)}, or none")
    return kv_cache is not None


def _keys_and_values(calibration: Calibration, rule: str, source: Source) -> dict[str, Tensor]:
    names = attentions(disk for disks in source.skeleton.linears().values() for disk in disks)
    if not names:
        raise ValueError(
            f"{source.origin} has no attention layers with k_proj, which the scales of a KV cache are named after: "
            "pack it without --kv-cache"
        )
    sites = {f"{name}.{leaf}": f"{name}.{leaf[0]}" for name in names for leaf in (K_SCALE, V_SCALE)}
    if missing := [site for site in sites.values() if site not in calibration.sites]:
        raise ValueError(
            f"the calibration has seen no {missing[0]}, so that a KV cache would have no scale there: "
            "calibrate the model with this version"
        )
    return {name: calibration.scale(site, rule).reshape(1) for name, site in sites.items()}
