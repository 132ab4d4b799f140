"""The layout compressed-tensors: any scheme, and several in one model (github.com/vllm-project/compressed-tensors).

Each scheme is one of the `config_groups`. `kv_cache_scheme` declares the scales of keys and values, if there are any.
This module writes and reads only the `quantization_config`. Older writers state no `quantization_status`, write blocks
as "128x128", and describe a sparsity that a dense model does not have.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.layouts.layout import Layout, check_settings, differences, packed_layers, register
from octavo.checkpoint.scheme import BLOCK, CHANNEL, SCHEMES, WEIGHT_ONLY, Scheme

EXPERTS = r"re:.*\.experts\..*"  # every expert of a mixture, by its name in the files
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_FLOAT_SCALES = ("torch.float32", "torch.bfloat16", "torch.float16")
_REQUIRED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def is_expert(name: str) -> bool:
    """True if a layer is an expert of a mixture, by its name in the files."""
    return re.match(EXPERTS.removeprefix("re:"), name) is not None


class CompressedTensors(Layout):
    """The layout that holds all schemes."""

    name, needs, exact, experts = "compressed-tensors", "compressed-tensors", True, EXPERTS

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
        used = {scheme.name: scheme for scheme in schemes.values()}
        layers = {used[name]: [layer for layer, scheme in schemes.items() if scheme.name == name] for name in used}
        targets = {scheme: ["Linear"] if len(layers) == 1 else names for scheme, names in layers.items()}
        formats = {scheme.format for scheme in layers}
        if any(scheme.integers for scheme in layers):
            _point_at_experts(targets, schemes, ignore)
        return {
            **_REQUIRED,
            "kv_cache_scheme": dict(KV_CACHE_SCHEME) if kv_cache else None,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "config_groups": {f"group_{i}": scheme.group(names) for i, (scheme, names) in enumerate(targets.items())},
            "ignore": list(ignore),
        }

    def describe_parts(self, described: dict[str, Any], schemes: Mapping[str, Scheme]) -> dict[str, Any]:
        # sentence-transformers calls a part of the model, and transformers widens weights in a hook of the whole. With
        # this it widens them as it loads them, by the arguments of one group for all.
        return described | {"dequantize": True} if len(set(schemes.values())) == 1 else described

    def read(self, found: Mapping[str, Any], linears: Sequence[str], where: Path) -> tuple[dict[str, Scheme], bool]:
        kv_cache = found.get("kv_cache_scheme") is not None
        required = {**_REQUIRED, "kv_cache_scheme": KV_CACHE_SCHEME if kv_cache else None}
        check_settings({**_REQUIRED, **_stated(found)}, required, where)
        formats = {scheme.format for scheme in SCHEMES.values()} | {"mixed-precision", "naive-quantized"}
        if found.get("format") not in formats:
            raise ArtifactError(f"{where}: format is {found.get('format')!r}, octavo runs {', '.join(sorted(formats))}")
        packed, groups = packed_layers(self, found, linears, where), _groups(found, where)
        schemes = {name: scheme for name in packed if (scheme := _scheme_of(name, groups)) is not None}
        if left := [name for name in packed if name not in schemes]:
            raise ArtifactError(f"{where}: no group of config_groups has {left[0]}, and ignore does not: pack it again")
        return schemes, kv_cache

    def renew(self, config: dict[str, Any], folder: Path) -> None:
        if isinstance(older := config.pop("compression_config", None), dict):  # the name of 2024
            config.setdefault("quantization_config", {"quant_method": self.name, **older})

    def check_experts(self, schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> None:
        # transformers multiplies the weight of an expert by its scale element by element, which a scale for each of
        # several blocks does not fit. Groups do not fit either, and no layout that it opens holds those.
        for name, scheme in schemes.items():
            in_blocks = scheme is BLOCK and scheme.weight.granularity.scale_shape(shapes[name]) != (1, 1)
            if in_blocks and is_expert(name):
                raise ValueError(
                    f"{name}: transformers opens experts by {scheme.name} in the layout fp8 alone: --layout fp8, with "
                    "every layer by block, or experts by channel (--layer '*.experts.*=channel')"
                )


def _point_at_experts(targets: dict[Scheme, list[str]], schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> None:
    """Add a pattern of experts to `targets`. transformers loads all experts, packed or not, by the first group with
    such a pattern, or else by the first group; and by one of integers it loads none."""
    packed = next(filter(is_expert, schemes), None)
    if packed is not None:
        targets[schemes[packed]].append(f"re:{re.escape(packed)}$")
    elif EXPERTS in ignore or any(map(is_expert, ignore)):
        targets.setdefault(CHANNEL, []).append(EXPERTS)


def _stated(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without a status that is null and without the sparsity of a dense model, which mean nothing."""
    said = {key: value for key, value in found.items() if key != "quantization_status" or value is not None}
    sparsity = said.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") in (None, "dense"):
        del said["sparsity_config"]
    return said


def _groups(found: Mapping[str, Any], where: Path) -> list[tuple[list[str], Scheme]]:
    """The targets and the scheme of each of the `config_groups`."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()) or not groups:
        raise ArtifactError(f"{where}: quantization_config.config_groups must hold groups, got {groups!r}")
    for name, group in groups.items():
        if not isinstance(targets := group.get("targets") or [], list) or not all(isinstance(t, str) for t in targets):
            raise ArtifactError(
                f"{where}: quantization_config.config_groups.{name}.targets must be a list of names, got {targets!r}"
            )
    return [(group.get("targets") or [], _scheme(group, name, where)) for name, group in groups.items()]


def _scheme(group: Mapping[str, Any], name: str, where: Path) -> Scheme:
    path = f"quantization_config.config_groups.{name}"
    group = {key: _arguments(value) for key, value in group.items()}
    wrong = {scheme: differences(group, scheme.group([]), path) for scheme in (*SCHEMES.values(), *WEIGHT_ONLY)}
    closest = min(wrong, key=lambda scheme: len(wrong[scheme]))
    if wrong[closest]:
        raise ArtifactError(
            f"{where}: this is none of the schemes that octavo runs ({', '.join(SCHEMES)}); nearest is {closest.name}, "
            f"but {'; '.join(wrong[closest])}"
        )
    return closest


def _arguments(value: Any) -> Any:
    """The arguments of a cast in the newest spelling, with the defaults of missing ones. The dtype of a float scale is
    left out: it is that of the tensor."""
    if not isinstance(value, dict):
        return value
    said = {"dynamic": False, "symmetric": True} | {
        key: held for key, held in value.items() if key != "scale_dtype" or held not in _FLOAT_SCALES
    }
    if isinstance(blocks := said.get("block_structure"), str):
        said["block_structure"] = [int(size) for size in blocks.split("x") if size.isdigit()]
    return said


def _scheme_of(name: str, groups: Sequence[tuple[list[str], Scheme]]) -> Scheme | None:
    """The scheme of the first group that names the layer, by its name, a pattern (re:...) or its class."""
    for targets, scheme in groups:
        for target in targets:
            pattern = target.removeprefix("re:") if target.startswith("re:") else None
            if target in (name, "Linear") or (pattern is not None and re.match(pattern, name)):
                return scheme
    return None


register(CompressedTensors())
