"""LoRA adapters of PEFT on converted layers and on the packed layers of `octavo.load`.

model = octavo.load("packed/qwen")
config = support(LoraConfig(target_modules=["q_proj", "v_proj"]))
model = get_peft_model(model, config)

On converted layers PEFT works as it is too, outside of the passes that fuse norms, layers and activations.
"""

from typing import Any, TypeVar

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from octavo.inference.packed_linear import PackedLinear
from octavo.nn.linear import adapted_output
from octavo.nn.module_tools import AdaptedLayer, Adapter, PrecomputedProjections

ConfigT = TypeVar("ConfigT", bound=LoraConfig)


def support(config: ConfigT) -> ConfigT:
    """Let adapters of this configuration wrap packed layers and run in fused passes, and return it.

    PEFT does not save this setting: a saved adapter is opened by

        PeftModel.from_pretrained(model, folder, config=support(LoraConfig.from_pretrained(folder)))
    """
    config._register_custom_module({PackedLinear: PackedLoraLinear, nn.Linear: FusedLoraLinear})
    return config


class FusedLoraLinear(AdaptedLayer, LoraLinear):  # type: ignore[misc]
    """A linear layer plus adapters, B(A(x)) * alpha / r: by PEFT, or in the passes of a converted, frozen layer.

    PEFT computes dropout, variants of LoRA and adapters of its mixed batches.
    """

    def forward(self, x: Tensor | PrecomputedProjections, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, PrecomputedProjections):
            return x.output_of(self)
        y = None if args or kwargs else adapted_output(self, x)
        return super().forward(x, *args, **kwargs) if y is None else y

    def parts(self) -> tuple[nn.Module, list[Adapter]] | None:
        me: Any = self  # mypy takes the attributes of PEFT for those of a module
        base: nn.Module = me.base_layer
        if me.disable_adapters or me.merged:
            return None if me.disable_adapters and me.merged else (base, [])
        active = [name for name in me.active_adapters if name in me.lora_A]
        layers = [(me.lora_A[name], me.lora_B[name]) for name in active]
        dropped = self.training and any(getattr(me.lora_dropout[name], "p", 0) for name in active)
        plain = all(type(a) is type(b) is nn.Linear and b.bias is None for a, b in layers)
        if dropped or not plain or any(name in me.lora_variant for name in active):
            return None
        scales = [float(me.scaling[name]) for name in active]
        return base, [Adapter(a.weight, b.weight, s) for (a, b), s in zip(layers, scales, strict=True)]


class PackedLoraLinear(FusedLoraLinear):
    """The same around a packed layer."""

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
