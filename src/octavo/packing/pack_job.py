"""The packing of one model: from its tensors to those of the packed folder."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE, Packing, quantization_config
from octavo.artifact.packed.scales import INPUT_SCALE_NAME, SCALE_NAME
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
        in_files = {source.meta_model.file_name(name): scheme for name, scheme in self.schemes.items()}
        keys_and_values = {} if self.static is None else self.static.keys_and_values
        self.packing = Packing(options.layout, in_files, bool(keys_and_values))
        self.kv_scales = self.packing.to_files(keys_and_values)
        trained = {} if self.static is None else self.static.weights
        self.weights = WeightScales(source, self.schemes, options, trained)

    @cached_property
    def not_linear(self) -> list[Leftover]:
        """The matrices that stay in BF16 because no linear layer holds them."""
        left = find_coverage(self.source.meta_model.model, self.schemes).left
        return [entry for entry in left if entry.kind != "linear layer"]

    def change(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of the files that hold the model's tensor `name`, see `octavo.hf.model_writer.Change`."""
        module, _, leaf = name.rpartition(".")
        in_files = self.source.meta_model.split_experts
        if leaf != "weight" or module not in self.schemes:
            return in_files({name: tensor.to(UNQUANTIZED_DTYPE) if tensor.is_floating_point() else tensor})
        scheme = self.schemes[module]
        q = self.weights.quantize(module, tensor)
        stored = {name: q.data, f"{module}.{SCALE_NAME}": scheme.stored_scale(q)}
        if self.static is not None and scheme.static:
            stored[f"{module}.{INPUT_SCALE_NAME}"] = self.static.inputs[module].to(tensor.device)
        return self.packing.to_files(in_files(stored))

    def config(self) -> dict[str, Any]:
        meta_model = self.source.meta_model
        config = {key: value for key, value in self.source.config.items() if key != "torch_dtype"}  # dtype's older name
        linears = meta_model.linears()
        if meta_model.experts is not None:
            linears += meta_model.experts.unpacked(self.packing.layout)
        config["dtype"] = str(UNQUANTIZED_DTYPE).removeprefix("torch.")
        config["quantization_config"] = quantization_config(self.packing, linears)
        if self.packing.kv_cache and "num_attention_heads" in config:  # compressed-tensors needs it, OPT lacks it
            config.setdefault("num_key_value_heads", config["num_attention_heads"])
        return config

    def record(self, remarks: Mapping[str, object]) -> dict[str, object]:
        """The entries of octavo.json (docs/format.md), `remarks` last."""
        schemes = {
            scheme.name: {"weight": self.weights.cast(scheme).to_dict(), "input": scheme.inputs.to_dict()}
            for scheme in self.schemes.values()
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
