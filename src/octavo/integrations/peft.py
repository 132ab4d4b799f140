"""LoRA adapters of PEFT on the packed layers of `octavo.load`. On converted layers PEFT works as it is.

model = octavo.load("packed/qwen")
config = support_packed(LoraConfig(target_modules=["q_proj", "v_proj"]))
model = get_peft_model(model, config)
"""

from typing import Any, TypeVar

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from octavo.inference.packed_linear import PackedLinear

ConfigT = TypeVar("ConfigT", bound=LoraConfig)


def support_packed(config: ConfigT) -> ConfigT:
    """Let adapters of this configuration wrap packed layers, and return it.

    PEFT does not save this setting: a saved adapter is opened by

        PeftModel.from_pretrained(model, folder, config=support_packed(LoraConfig.from_pretrained(folder)))
    """
    config._register_custom_module({PackedLinear: PackedLoraLinear})
    return config


class PackedLoraLinear(LoraLinear):  # type: ignore[misc]
    """A packed layer, y = x_q @ w_q^T * scales, plus an adapter, B(A(x)) * alpha / r, in high precision."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """Plain LoRA only: variants such as DoRA read the weight, and would take its bytes for numbers."""
        return {(): None}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise NotImplementedError(
            "an adapter cannot be merged into a weight of eight bits, which would round it away: unpack the folder "
            "(octavo unpack), open the adapter on that model, merge it there, and pack the result"
        )

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        layer: Any = module
        return layer.in_features, layer.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        layer: Any = base_layer
        return layer.weight.device, torch.bfloat16  # not the dtype of the weight: adapters are not in eight bits
