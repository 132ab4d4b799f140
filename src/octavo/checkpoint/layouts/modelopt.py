"""The layout modelopt, which NVIDIA ModelOpt exports, and vLLM and TensorRT-LLM read.

One scheme for the whole model, named in `quant_algo`:

    FP8                          static     weight_scale [], input_scale []
    FP8_PER_CHANNEL_PER_TOKEN    channel    weight_scale [N]
    FP8_PB_WO                    block      weight_scale [N / 128, 1, K / 128, 1]; vLLM casts inputs by 1 x 128

A folder states the scheme twice: in the `quantization_config` of config.json and, in an older spelling, in
hf_quant_config.json. It may also have only one of the two, or the older spelling in config.json. Both spellings are in
github.com/NVIDIA/Model-Optimizer, modelopt/torch/export/convert_hf_config.py, and
vllm/model_executor/layers/quantization/modelopt.py reads them. Unpacked layers may be patterns.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.checkpoint.files import ArtifactError, read_json
from octavo.checkpoint.layouts.layout import Layout, check_settings, packed_layers, register
from octavo.checkpoint.scheme import BLOCK, CHANNEL, INPUT_SCALE_NAME, SCALE_NAME, STATIC, Scheme, is_kv_scale
from octavo.numerics import TENSOR
from octavo.version import __version__

SIDE_FILE = "hf_quant_config.json"
_ALGORITHMS = {"FP8": STATIC, "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL, "FP8_PB_WO": BLOCK}
_EIGHT_BITS = {"num_bits": 8, "type": "float"}
_KV_CACHE = {"dynamic": False, **_EIGHT_BITS}
_PRODUCER = {"name": "octavo", "version": __version__}


class ModelOpt(Layout):
    """All layers have one scheme."""

    name, readers = "modelopt", "vLLM and TensorRT-LLM"
    schemes = tuple(scheme.name for scheme in _ALGORITHMS.values())

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
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

    def side_files(self, described: Mapping[str, Any]) -> dict[str, Any]:
        settings = {
            "quant_algo": described["quant_algo"],
            "kv_cache_quant_algo": "FP8" if described["kv_cache_scheme"] else None,
            "exclude_modules": described["ignore"],
        }
        return {SIDE_FILE: {"producer": described["producer"], "quantization": settings}}

    def read(self, found: Mapping[str, Any], linears: Sequence[str], where: Path) -> tuple[dict[str, Scheme], bool]:
        algorithm = str(found.get("quant_algo")).upper()
        if algorithm not in _ALGORITHMS:
            stated = f"{where}: quant_algo is {found.get('quant_algo')!r}"
            raise ArtifactError(f"{stated}, octavo runs {', '.join(_ALGORITHMS)}")
        kv_cache = found.get("kv_cache_scheme") is not None
        required = {"quant_method": "modelopt", "kv_cache_scheme": _KV_CACHE if kv_cache else None}
        check_settings({**found, "quant_algo": None}, required, where)
        return dict.fromkeys(packed_layers(self, found, linears, where), _ALGORITHMS[algorithm]), kv_cache

    def renew(self, config: dict[str, Any], folder: Path) -> None:
        where, found = folder / "config.json", config.get("quantization_config")
        if found is None and (folder / SIDE_FILE).is_file():
            where = folder / SIDE_FILE
            found = read_json(where)
        # An older one may lack the quant_method, but has ModelOpt's keys.
        ours = isinstance(found, dict) and found.get("quant_method", self.name) == self.name
        if found and ours and {"quant_algo", "quantization"} & found.keys():
            config["quantization_config"] = _in_newer_spelling(found, where)

    def rename(self, name: str) -> str:
        module, _, leaf = name.rpartition(".")
        return f"{module}.{leaf[0]}_proj.{leaf}" if is_kv_scale(name) else name

    def reshape(self, scale: Tensor, name: str, scheme: Scheme | None) -> Tensor:
        leaf = name.rpartition(".")[2]
        of_tensor = scheme is not None and scheme.weight.granularity == TENSOR
        if is_kv_scale(name) or (of_tensor and leaf in (SCALE_NAME, INPUT_SCALE_NAME)):
            return scale.reshape(())
        if scheme is None or leaf != SCALE_NAME:
            return scale
        return scale[:, None, :, None] if scheme is BLOCK else scale.flatten()


def _in_newer_spelling(found: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """A `quantization_config` in the spelling of `ModelOpt.describe`. `found` is hf_quant_config.json, or a
    `quantization_config` in its spelling, with or without the object `quantization`."""
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


register(ModelOpt())
