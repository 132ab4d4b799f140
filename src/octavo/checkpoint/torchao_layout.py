"""The layout torchao: folders that transformers writes with a `TorchAoConfig` of E4M3 weights. They are read only.

    <module>._weight_qdata  e4m3 [N, K]                 read as <module>.weight
    <module>._weight_scale  float32 [N, 1] or [1, 1]    read as <module>.weight_scale; it multiplies

`quant_type.default` in the `quantization_config` is the configuration that torchao serializes:

    Float8DynamicActivationFloat8WeightConfig    PerRow: channel    PerTensor: tensor
    Float8WeightOnlyConfig                       PerRow: weight     PerTensor: weight, tensor

With PerTensor torchao scales an input by one amax, and Octavo by that of each token, which is finer. transformers packs
every linear layer but the output head and those in `modules_to_not_convert`. Source: torchao 0.18,
prototype/safetensors/safetensors_support.py; transformers 5, quantizers/quantizer_torchao.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.scheme import CHANNEL, TENSORWISE, WEIGHT, WEIGHT_ONLY, Layout, Scheme, packed_layers

_DYNAMIC, _WEIGHTS = "Float8DynamicActivationFloat8WeightConfig", "Float8WeightOnlyConfig"
_SCHEMES: dict[tuple[str, ...], Scheme] = {
    (_DYNAMIC, "PerRow"): CHANNEL,
    (_DYNAMIC, "PerTensor"): TENSORWISE,
    (_WEIGHTS, "PerRow"): WEIGHT,
    (_WEIGHTS, "PerTensor"): WEIGHT_ONLY[0],
}


class TorchAo(Layout):
    name, needs, written = "torchao", "torchao", False
    schemes = tuple(scheme.name for scheme in _SCHEMES.values())
    ignore = ("modules_to_not_convert",)
    holds_cache = False

    def read(self, found: Mapping[str, Any], linears: Sequence[str], where: Path) -> tuple[dict[str, Scheme], bool]:
        described: Any = found.get("quant_type")
        default = described.get("default") if isinstance(described, dict) and len(described) == 1 else None
        kind, settings = (default.get("_type"), default.get("_data")) if isinstance(default, dict) else (None, None)
        settings = settings if isinstance(settings, dict) else {}
        stated = [settings.get(name) for name in ("weight_dtype", "activation_dtype")]
        dtypes = {each.get("_data") if isinstance(each, dict) else each for each in stated} - {None}
        bounds = [settings.get(f"activation_value_{end}") for end in ("lb", "ub")]
        granularity = settings.get("granularity") or {"_type": "PerRow" if kind == _WEIGHTS else "PerTensor"}
        sides = granularity if isinstance(granularity, list) else [granularity]
        kinds = {str(side.get("_type")) if isinstance(side, dict) else str(side) for side in sides}
        scheme = _SCHEMES.get((str(kind), *kinds)) if len(kinds) == 1 else None
        embeddings = found.get("include_input_output_embeddings")
        if scheme is None or dtypes - {"float8_e4m3fn"} or bounds != [None, None] or embeddings:
            raise ArtifactError(
                f"{where}: quantization_config.quant_type is {kind}, {', '.join(map(str, kinds))}, "
                f"{', '.join(map(str, dtypes))}, bounds {bounds}, embeddings {bool(embeddings)}; octavo reads one "
                f"{_DYNAMIC} or {_WEIGHTS}, PerRow or PerTensor, in float8_e4m3fn, without bounds and embeddings: "
                "pack the BF16 model with octavo pack"
            )
        return dict.fromkeys(packed_layers(self, found, linears, where), scheme), False
