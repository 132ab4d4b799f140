"""LoRA adapters of PEFT on converted layers and on the packed layers of `octavo.load`.

model = octavo.load("packed/qwen")
config = support(LoraConfig(target_modules=["q_proj", "v_proj"]))
model = get_peft_model(model, config)

On converted layers PEFT works as it is too, outside of the passes that fuse norms, layers and activations.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from octavo.inference.packed_experts import PackedExperts
from octavo.inference.packed_linear import PackedLinear
from octavo.nn.conversion import find_experts
from octavo.nn.linear import adapted_output
from octavo.nn.module_tools import AdaptedLayer, Adapter, PrecomputedProjections, shape_of
from octavo.nn.selection import skipped_by_name

ConfigT = TypeVar("ConfigT", bound=LoraConfig)


def support(config: ConfigT) -> ConfigT:
    """Let adapters of this configuration wrap packed layers and run in fused passes, and return it.

    PEFT does not save this setting: a saved adapter is opened by

        PeftModel.from_pretrained(model, folder, config=support(LoraConfig.from_pretrained(folder)))
    """
    if not isinstance(config, LoraConfig):
        raise TypeError(f"support takes a LoraConfig, got {type(config).__name__}: other adapters run without it")
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

    def parts(self: Any) -> tuple[nn.Module, list[Adapter]] | None:  # mypy knows no attributes of PEFT
        if self.disable_adapters or self.merged:
            return None if self.disable_adapters and self.merged else (self.base_layer, [])
        active = [name for name in self.active_adapters if name in self.lora_A]
        layers = [(self.lora_A[name], self.lora_B[name]) for name in active]
        dropped = self.training and any(getattr(self.lora_dropout[name], "p", 0) for name in active)
        plain = all(type(a) is type(b) is nn.Linear and b.bias is None for a, b in layers)
        if dropped or not plain or any(name in self.lora_variant for name in active):
            return None
        scales = [float(self.scaling[name]) for name in active]
        return self.base_layer, [Adapter(a.weight, b.weight, s) for (a, b), s in zip(layers, scales, strict=True)]


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

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        return base_layer.weight.device, torch.bfloat16  # not the dtype of the weight: adapters are not in eight bits


# ---- The adapters of `octavo train --lora`.


def inject(model: nn.Module, rank: int, alpha: float, targets: Sequence[str], dtype: torch.dtype, base: str) -> None:
    """Put adapters of `dtype` around the linear layers of `model`, in place, and freeze all other parameters.

    `targets` are names of layers or their last parts, as PEFT takes them; none are all linear layers but heads and
    routers. `base` is the folder of the model, for those who open the saved adapters. A ValueError for a model without
    such layers, for a target that is none, for a rank above the smallest side of these layers, and without targets for
    a model of experts, whose matrices take no adapters.
    """
    if not (layers := adaptable(model)):
        raise ValueError("lora requires an nn.Linear below the head, and this model has none: leave lora out")
    chosen = [name for name in layers if not targets or f".{name}".endswith(tuple(f".{each}" for each in targets))]
    if unknown := [each for each in targets if not any(f".{name}".endswith(f".{each}") for name in chosen)]:
        raise ValueError(f"targets has {unknown[0]!r}, and the linear layers are {', '.join(_kinds(layers))}")
    experts = [*find_experts(model), *(name for name, m in model.named_modules() if isinstance(m, PackedExperts))]
    if experts and not targets:
        raise ValueError(
            f"{experts[0]} ({len(experts)} such modules) has stacked experts; PEFT would add B A to all in each pass: "
            f"leave them as they are, and name the layers that get some: --targets {' '.join(_kinds(layers))}"
        )
    sides = {name: min(shape_of(layers[name])) for name in chosen}
    narrowest = min(sides, key=sides.__getitem__)
    if rank > sides[narrowest]:
        raise ValueError(
            f"lora {rank} requires layers with as many features; got {narrowest} with {sides[narrowest]}: give at most "
            "that, or the targets without it"
        )
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=chosen, task_type="CAUSAL_LM", base_model_name_or_path=base
    )
    inject_adapter_in_model(support(config), model)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(dtype)


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a model, converted, packed or plain, by name; no heads and no routers."""
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear | PackedLinear))
    untied = {name: layer for name, layer in linears if id(layer.weight) not in tied}
    return {name: layer for name, layer in untied.items() if not skipped_by_name(name, *shape_of(layer), ())}


def _kinds(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})
