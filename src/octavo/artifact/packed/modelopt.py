"""The layout modelopt, which NVIDIA ModelOpt exports, and vLLM and TensorRT-LLM read.

One scheme for the whole model, named in `quant_algo`:

    FP8                          static     weight_scale [], input_scale []
    FP8_PER_CHANNEL_PER_TOKEN    channel    weight_scale [N]
    FP8_PB_WO                    block      weight_scale [N / 128, 1, K / 128, 1]; vLLM casts inputs by 1 x 128

A folder states the scheme twice: in the `quantization_config` of config.json and, in an older spelling, in
hf_quant_config.json. It may also have only one of the two, or the older spelling in config.json. Both spellings are in
github.com/NVIDIA/Model-Optimizer, modelopt/torch/export/convert_hf_config.py, and
vllm/model_executor/layers/quantization/modelopt.py reads them. Unpacked layers may be patterns. The names and shapes of
tensors are in `octavo.artifact.packed.layouts`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.config_checks import check_settings, packed_layers
from octavo.artifact.packed.scheme import BLOCK, CHANNEL, STATIC, Scheme
from octavo.version import __version__

SIDE_FILE = "hf_quant_config.json"
_ALGORITHMS = {"FP8": STATIC, "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL, "FP8_PB_WO": BLOCK}
_EIGHT_BITS = {"num_bits": 8, "type": "float"}
_KV_CACHE = {"dynamic": False, **_EIGHT_BITS}
_PRODUCER = {"name": "octavo", "version": __version__}


def describe(schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
    """The `quantization_config` of config.json. All layers have one scheme."""
    scheme = next(iter(schemes.values()), STATIC)
    (algorithm,) = (name for name, held in _ALGORITHMS.items() if held is scheme)
    inputs = {"dynamic": not scheme.static, **_EIGHT_BITS}
    weights = {"dynamic": False, **_EIGHT_BITS}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "kv_cache_scheme": dict(_KV_CACHE) if kv_cache else None,
        "config_groups": {"group_0": {"input_activations": inputs, "weights": weights, "targets": ["Linear"]}},
        "ignore": list(ignore),
        "producer": _PRODUCER,
    }


def side_file(described: Mapping[str, Any]) -> dict[str, Any]:
    """The content of hf_quant_config.json for a result of `describe`."""
    return {
        "producer": described["producer"],
        "quantization": {
            "quant_algo": described["quant_algo"],
            "kv_cache_quant_algo": "FP8" if described["kv_cache_scheme"] else None,
            "exclude_modules": described["ignore"],
        },
    }


def is_modelopt(found: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is ModelOpt's. An older one may lack the quant_method, but has ModelOpt's
    keys."""
    return found.get("quant_method", "modelopt") == "modelopt" and bool({"quant_algo", "quantization"} & found.keys())


def in_newer_spelling(found: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """A `quantization_config` in the spelling of `describe`.

    `found` is hf_quant_config.json, or a `quantization_config` in the spelling of that file, with or without the object
    `quantization`. One in the newer spelling is returned unchanged.

    Raises:
        ArtifactError: `quantization` is no object, or the cache of keys and values is not FP8.
    """
    said = found.get("quantization", found)
    if not isinstance(said, dict):
        raise ArtifactError(f"{where}: `quantization` must be an object, got {said!r}")
    if said is found and not {"kv_cache_quant_algo", "exclude_modules"} & found.keys():
        return {"quant_method": "modelopt", **found}
    cache = said.get("kv_cache_quant_algo")
    if cache not in (None, "FP8"):
        raise ArtifactError(f"{where}: kv_cache_quant_algo is {cache!r}, octavo runs 'FP8' or none")
    return {
        "quant_method": "modelopt",
        "quant_algo": said.get("quant_algo"),
        "kv_cache_scheme": dict(_KV_CACHE) if cache else said.get("kv_cache_scheme"),
        "ignore": said.get("exclude_modules", said.get("ignore")),
    }


def read(found: Mapping[str, Any], linears: Sequence[str], where: Path) -> tuple[dict[str, Scheme], bool]:
    """See `octavo.artifact.packed.compressed_tensors.read`."""
    algorithm = str(found.get("quant_algo")).upper()
    if algorithm not in _ALGORITHMS:
        raise ArtifactError(f"{where}: quant_algo is {found.get('quant_algo')!r}, octavo runs {', '.join(_ALGORITHMS)}")
    kv_cache = found.get("kv_cache_scheme") is not None
    required = {"quant_method": "modelopt", "kv_cache_scheme": _KV_CACHE if kv_cache else None}
    check_settings({**found, "quant_algo": None}, required, where)
    packed = packed_layers(found, "ignore", linears, where)
    return dict.fromkeys(packed, _ALGORITHMS[algorithm]), kv_cache
