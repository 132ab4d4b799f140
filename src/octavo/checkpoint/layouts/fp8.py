"""The layout fp8: 128 x 128 blocks, in the names of DeepSeek-V3 and transformers' FineGrainedFP8Config.

Two variants of other writers are read:

    scale_fmt "ue8m0"           all scales are powers of two, those of inputs too (DeepSeek); with 1 x 32 it is MX
    weight_block_size null      one scale a tensor, and activation_scheme static or dynamic (transformers)

transformers leaves output heads unpacked even if the list of unpacked layers lacks them, and so does
`octavo.checkpoint.layouts.layout.read_packing`. AutoFP8 (github.com/neuralmagic/AutoFP8) has the same quant_method, no
weight_block_size, and other names of scales. It is refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.layouts.layout import LAYOUTS, Layout, check_settings, packed_layers, register
from octavo.checkpoint.scheme import BLOCK, BLOCK_POW2, MX, OTHER_NAMES, SCALE_NAME, STATIC, TENSORWISE, Scheme

_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_MADE = {"scale_fmt": "float", "expert_dtype": "fp8"}  # where a folder does not state them


class Fp8(Layout):
    """`weight_scale_inv` multiplies, as every scale does."""

    name, needs = "fp8", "accelerate"
    schemes = (BLOCK.name,)
    ignore = ("modules_to_not_convert", "ignored_layers")
    holds_cache = False

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
        return {**_BLOCKS, "fmt": "e4m3", "modules_to_not_convert": list(ignore)}

    def read(self, found: Mapping[str, Any], linears: Sequence[str], where: Path) -> tuple[dict[str, Scheme], bool]:
        if "weight_block_size" not in found:
            raise ArtifactError(
                f"{where}: quant_method fp8 without a weight_block_size is AutoFP8, and octavo reads the layouts "
                f"{', '.join(LAYOUTS)}: pack the BF16 model again, or write it with llm-compressor"
            )
        required, scheme = _variant(found)
        check_settings({**_MADE, **found}, {**_MADE, **required}, where)
        return dict.fromkeys(packed_layers(self, found, linears, where), scheme), False

    def rename(self, name: str) -> str:
        return f"{name}_inv" if name.endswith(f".{SCALE_NAME}") else name

    def names_in_memory(self, name: str, kv_cache: bool) -> list[str]:
        module, _, leaf = name.rpartition(".")
        return [f"{module}.{OTHER_NAMES[leaf]}"] if leaf in OTHER_NAMES else super().names_in_memory(name, kv_cache)


def _variant(found: Mapping[str, Any]) -> tuple[dict[str, Any], Scheme]:
    """The settings that a `quantization_config` must have, and its scheme."""
    block, static = found["weight_block_size"], found.get("activation_scheme") == "static"
    if not block:
        inputs = "static" if static else "dynamic"
        return {**_BLOCKS, "activation_scheme": inputs, "weight_block_size": block}, STATIC if static else TENSORWISE
    if found.get("scale_fmt") != "ue8m0":
        return _BLOCKS, BLOCK
    if list(block) == [1, 32]:  # MX, as transformers has it
        return {**_BLOCKS, "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}, MX
    return {**_BLOCKS, "scale_fmt": "ue8m0"}, BLOCK_POW2


register(Fp8())
