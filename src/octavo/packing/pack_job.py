"""The packing of one model: from its tensors to those of the packed folder."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE, Packing, quantization_config
from octavo.artifact.packed.scales import INPUT_SCALE_NAME, SCALE_NAME
from octavo.artifact.packed.scheme import Scheme
from octavo.artifact.safetensors_files import Spec
from octavo.hf.source import Source
from octavo.nn.coverage import Leftover, find_coverage
from octavo.packing.chosen_layers import ChosenLayers
from octavo.packing.options import PackOptions
from octavo.packing.weight_scales import WeightScales


class PackJob:
    """The packing of one model: the new tensors, config.json and octavo.json.

    Attributes:
        packing: the layout, and the scheme of each packed layer by its name in the files.
        weights: the scales of weights.
        kv_scales: the scales of a cache of keys and values, by their names in the files.
    """

    def __init__(self, source: Source, layers: ChosenLayers, options: PackOptions) -> None:
        self.source, self.schemes, self.static = source, layers.schemes, layers.static
        self.experts = layers.experts
        in_files = {source.meta_model.file_name(name): scheme for name, scheme in self.schemes.items()}
        keys_and_values = {} if self.static is None else self.static.keys_and_values
        self.packing = Packing(options.layout, in_files | dict(self.experts), bool(keys_and_values))
        self.kv_scales = self.packing.to_files(keys_and_values)
        trained = {} if self.static is None else self.static.weights
        self.weights = WeightScales(source, {**self.schemes, **self.experts}, options, trained)

    @cached_property
    def not_linear(self) -> list[Leftover]:
        """The matrices that stay in BF16 because no linear layer holds them."""
        files = self.source.meta_model.experts
        stacks = {} if files is None else files.parts_of_stacks
        packed = [name for name, parts in stacks.items() if all(_layer(part) in self.experts for part in parts)]
        left = find_coverage(self.source.meta_model.model, [*self.schemes, *packed]).left
        return [entry for entry in left if entry.kind != "linear layer"]

    def change(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of the files that hold the model's tensor `name`, see `octavo.hf.model_writer.Change`."""
        module, _, leaf = name.rpartition(".")
        in_files = self.source.meta_model.split_experts
        if leaf == "weight" and module in self.schemes:
            return self.packing.to_files(in_files(self._packed(module, self.schemes[module], tensor)))
        stored: dict[str, Tensor] = {}
        rounded = in_files({name: tensor.to(self.source.meta_model.dtypes[name])})
        for part, t in rounded.items():
            expert = _layer(part)
            packed = expert in self.experts
            stored |= self._packed(expert, self.experts[expert], t.contiguous()) if packed else {part: t}
        return self.packing.to_files(stored)

    def _packed(self, module: str, scheme: Scheme, w: Tensor) -> dict[str, Tensor]:
        """The bytes and the scales in place of a weight."""
        q = self.weights.quantize(module, w)
        stored = {f"{module}.weight": q.data, f"{module}.{SCALE_NAME}": scheme.stored_scale(q)}
        if self.static is not None and scheme.static:
            stored[f"{module}.{INPUT_SCALE_NAME}"] = self.static.inputs[module].to(w.device)
        return stored

    @property
    def bf16_bytes(self) -> int:
        """The bytes of the packed weights in BF16."""
        linears = 2 * sum(self.source.specs[f"{name}.weight"].numel for name in self.schemes)
        return linears + self._expert_bytes(packed=True)

    @property
    def unpacked_expert_bytes(self) -> int:
        """The bytes of the experts that stay in BF16."""
        return self._expert_bytes(packed=False)

    def _expert_bytes(self, *, packed: bool) -> int:
        """The bytes in BF16 of the experts that are packed, or of those that are not."""
        files, size = self.source.meta_model.experts, 0
        for stack, parts in ({} if files is None else files.parts_of_stacks).items():
            count = sum((_layer(part) in self.experts) == packed for part in parts)
            size += 2 * self.source.specs[stack].numel // len(parts) * count  # the parts of a stack are of one size
        return size

    def config(self) -> dict[str, Any]:
        meta_model = self.source.meta_model
        config = {key: value for key, value in self.source.config.items() if key != "torch_dtype"}  # dtype's older name
        linears = meta_model.linears()
        if meta_model.experts is not None:
            linears += meta_model.experts.unpacked(self.packing.layout, self.experts)
        config["dtype"] = str(UNQUANTIZED_DTYPE).removeprefix("torch.")
        config["quantization_config"] = quantization_config(self.packing, linears)
        if self.packing.kv_cache and "num_attention_heads" in config:  # compressed-tensors needs it, OPT lacks it
            config.setdefault("num_key_value_heads", config["num_attention_heads"])
        return config

    def record(self, remarks: Mapping[str, object]) -> dict[str, object]:
        """The entries of octavo.json (docs/format.md), `remarks` last."""
        schemes = {
            scheme.name: {
                "weight": self.weights.cast(scheme).to_dict(),
                "input": scheme.inputs and scheme.inputs.to_dict(),
            }
            for scheme in (*self.schemes.values(), *self.experts.values())
        }
        left = {"not_linear": {entry.name: entry.share for entry in self.not_linear}} if self.not_linear else {}
        return {
            "layout": self.packing.layout,
            "schemes": schemes,
            "layers": {name: scheme.name for name, scheme in self.packing.schemes.items()},
            "weight_scales": self.weights.record(),
            "calibration": None if self.static is None else self.static.record,
            **left,
            **remarks,
        }

    def packed_bytes(self, specs: Mapping[str, Spec]) -> int:
        """The bytes of the packed weights and their scales among the files' tensors `specs`."""
        packed = {f"{name}.weight" for name in self.packing.schemes}
        packed |= {self.packing.name_in_files(f"{name}.{SCALE_NAME}") for name in self.packing.schemes}
        return sum(specs[name].nbytes for name in packed)


def _layer(weight: str) -> str:
    """The name of the layer whose weight is called `weight`."""
    return weight.removesuffix(".weight")
