"""The two layouts with the quant_method "fp8". `weight_block_size` distinguishes them.

    fp8        128 x 128 blocks, in the names of DeepSeek-V3 and transformers' FineGrainedFP8Config
    autofp8    one scale a tensor, in the names of AutoFP8 (github.com/neuralmagic/AutoFP8), which vLLM reads
               (vllm/model_executor/layers/quantization/fp8.py): activation_scheme static or dynamic, and the unpacked
               layers in ignored_layers; or the names of transformers' FineGrainedFP8Config, whose weight_block_size is
               null then

`scale_fmt` "ue8m0" (DeepSeek) means that all scales are powers of two, those of inputs too. transformers leaves output
heads unpacked even if the list of unpacked layers lacks them, and so does
`octavo.artifact.packed.layouts.read_packing`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.artifact.packed.config_checks import check_settings, packed_layers
from octavo.artifact.packed.scheme import BLOCK, BLOCK_POW2, MX, STATIC, TENSORWISE, Scheme

_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_KV_CACHE = "static"


def describe_blocks(ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of the layout fp8, with the layers `ignore` unpacked."""
    return {**_BLOCKS, "fmt": "e4m3", "modules_to_not_convert": list(ignore)}


def describe_tensors(schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
    """The `quantization_config` of the layout autofp8. All layers have one scheme."""
    static = any(scheme.static for scheme in schemes.values())
    described = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    return described | {"ignored_layers": list(ignore)} | ({"kv_cache_scheme": _KV_CACHE} if kv_cache else {})


def is_blocks(found: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` of quant_method "fp8" is of the layout fp8, and not autofp8."""
    return bool(found.get("weight_block_size"))


def read(found: Mapping[str, Any], linears: Sequence[str], where: Path) -> tuple[dict[str, Scheme], bool]:
    """See `octavo.artifact.packed.compressed_tensors.read`."""
    static, kv_cache = found.get("activation_scheme") == "static", found.get("kv_cache_scheme") is not None
    if is_blocks(found):
        required, scheme, kv_cache = _blocks(found)
    else:
        required = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
        required |= {"scale_fmt": "float"} | ({"kv_cache_scheme": _KV_CACHE} if kv_cache else {})
        scheme = STATIC if static else TENSORWISE
    check_settings({"scale_fmt": "float", "expert_dtype": "fp8", **found}, {"expert_dtype": "fp8", **required}, where)
    key = "ignored_layers" if found.get("ignored_layers") else "modules_to_not_convert"
    return dict.fromkeys(packed_layers(found, key, linears, where), scheme), kv_cache


def _blocks(found: Mapping[str, Any]) -> tuple[dict[str, Any], Scheme, bool]:
    """The required settings of a packing in blocks, its scheme, and False: it has no scales of a cache."""
    if found.get("scale_fmt") != "ue8m0":
        return {**_BLOCKS, "scale_fmt": "float"}, BLOCK, False
    rows = list(found["weight_block_size"]) == [1, 32]  # MX, as transformers has it
    blocks = {"weight_block_size": [1, 32]} if rows else {}
    return {**_BLOCKS, "scale_fmt": "ue8m0", **blocks}, MX if rows else BLOCK_POW2, False
