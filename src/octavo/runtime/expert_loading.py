"""Reading the packed experts of a folder: the files hold each matrix by itself, and the model takes stacks of them."""

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.packed.layouts import EXPERT_DTYPE, Packing
from octavo.artifact.packed.scales import INPUT_SCALE_NAME, SCALE_NAME
from octavo.artifact.packed.scheme import Scheme
from octavo.artifact.safetensors_files import ShardReader
from octavo.hf.meta_model import MetaModel
from octavo.nn.expert_conversion import find_experts
from octavo.nn.experts import Experts
from octavo.runtime.packed_experts import PackedExperts, PackedGroupedLinear, expert_input_cast
from octavo.runtime.scheme_speeds import slower_experts_note
from octavo.runtime.widening import widen_layers
from octavo.words import plural


class ExpertLoading:
    """The packed experts of a folder, on their way into a model.

    A layer of experts runs in FP8 if all its matrices are packed, those of a stack by one scheme. The matrices of other
    layers are widened to BF16, with a warning.

    Args:
        meta_model: the model, which `swap` changes.
        reader: of the folder.
        device: on which the model will run.

    Attributes:
        names: of the matrices in eight bits, as in the files.
    """

    def __init__(self, meta_model: MetaModel, reader: ShardReader, device: torch.device) -> None:
        self._model, self._files, self._device = meta_model.model, meta_model.experts, device
        parts = {} if self._files is None else self._files.parts_of_stacks
        self._parts = {stack: [name.removesuffix(".weight") for name in names] for stack, names in parts.items()}
        specs = {name: reader.specs.get(f"{name}.weight") for names in self._parts.values() for name in names}
        self.names = [name for name, spec in specs.items() if spec is not None and spec.dtype == EXPERT_DTYPE]
        self._schemes: dict[str, Scheme] = {}  # of the matrices
        self._stacks: dict[str, Scheme] = {}  # of the stacks that run in FP8, by their names in the model
        self._reasons: list[str] = []  # why others do not
        self._weight_only: list[str] = []  # the modules whose inputs are not quantized although their schemes do so

    def swap(self, packing: Packing) -> None:
        """Replace each module of experts that runs in FP8 by an empty `PackedExperts`."""
        self._schemes = {name: packing.schemes[name] for name in self.names if name in packing.schemes}
        for name, module in find_experts(self._model).items() if self._schemes else ():
            stacks: dict[str, Any] = {f"{name}.{leaf}": getattr(module, leaf, None) for leaf in Experts.matrices}
            reasons = [reason for stack, weight in stacks.items() if (reason := self._reason(stack, weight))]
            self._reasons += reasons
            if not reasons:
                found = {stack: self._schemes[self._parts[stack][0]] for stack in stacks}
                layers = [PackedGroupedLinear(stacks[stack], scheme) for stack, scheme in found.items()]
                casts = [expert_input_cast(scheme, stacks[stack], self._device) for stack, scheme in found.items()]
                if casts != [scheme.inputs for scheme in found.values()]:
                    self._weight_only.append(name)
                self._model.set_submodule(name, PackedExperts(*layers))
                self._stacks |= found

    def _reason(self, stack: str, weight: Any) -> str:
        """Why a stack [E, N, K] does not run in FP8, or ""."""
        parts = self._parts.get(stack, [])
        schemes = {scheme.name: scheme for name in parts if (scheme := self._schemes.get(name)) is not None}
        if not schemes or any(name not in self._schemes for name in parts):
            return "other matrices of its stack are in BF16"
        if len(schemes) > 1:
            return f"the matrices of its stack have several schemes ({', '.join(schemes)})"
        ((name, scheme),) = schemes.items()
        if self._rows(stack, weight) % (scheme.weight.granularity.rows or 1):
            return f"its rows do not divide into the blocks of the scheme {name}"
        return ""

    def _rows(self, stack: str, weight: Tensor) -> int:
        """The rows of one matrix in the files: a stack may hold two for each expert."""
        return weight.shape[0] * weight.shape[1] // len(self._parts[stack])

    @cached_property
    def required(self) -> dict[str, Tensor]:
        """The tensors that the files must have for the stacks that run in FP8, on the meta device."""
        found: dict[str, Tensor] = {}
        for stack, scheme in self._stacks.items():
            weight: Any = self._model.get_submodule(stack).weight
            n, k = self._rows(stack, weight), weight.shape[2]
            for name in self._parts[stack]:
                found[f"{name}.weight"] = torch.empty(n, k, dtype=EXPERT_DTYPE)
                found[f"{name}.{SCALE_NAME}"] = scheme.empty_scale(n, k)
                if scheme.static:
                    found[f"{name}.{INPUT_SCALE_NAME}"] = torch.empty(1)
        return {name: t.to("meta") for name, t in found.items()}

    def is_packed(self, name: str) -> bool:
        """Whether `name` is a tensor of the model that belongs to a `PackedExperts`."""
        return name.rpartition(".")[0] in self._stacks

    def widen(self, tensors: dict[str, Tensor]) -> None:
        """Widen the matrices that do not run in FP8 to BF16, in place, and warn of what runs in another way."""
        if self._weight_only:
            count = plural(len(self._weight_only), "such layer")
            warnings.warn(
                f"{self._weight_only[0]} ({count}) computes with inputs that are not quantized: {self._device} has no "
                "FP8 GEMM for its experts",
                stacklevel=3,
            )
        wide = [name for name in self.names if f"{name}.weight" not in self.required]
        widen_layers(tensors, wide, self._schemes)  # `check_tensors` reports what is missing
        if wide:
            reason = self._reasons[0] if self._reasons else "Octavo does not know the class of its module"
            warnings.warn(
                f"{wide[0]} ({len(wide)} such layers) is an expert in FP8: its weight is widened to BF16, since "
                f"{reason}",
                stacklevel=3,
            )

    def slower_note(self) -> str:
        """That experts were measured to be slower than BF16 on the device; "" if not, or if nothing is known."""
        for stack, scheme in self._stacks.items():  # the first of a module is that of gate and up
            weight: Any = self._model.get_submodule(stack).weight
            if note := slower_experts_note(scheme, (weight.shape[1], weight.shape[2]), self._device):
                return note
        return ""

    def stack(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of each `PackedExperts`, from the matrices in `tensors`, which are removed there."""
        found: dict[str, Tensor] = {}
        for stack, scheme in self._stacks.items():
            found |= self._buffers(stack, scheme, tensors)
        for name in self.required:
            del tensors[name]
        return found

    def _buffers(self, stack: str, scheme: Scheme, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        def stacked(get: Callable[[str], Tensor]) -> Tensor:
            assert self._files is not None
            return self._files.stack(stack, lambda part: get(part.removesuffix(".weight")))

        def scale_of(name: str) -> Tensor:
            """By row, where the scheme has one scale for a matrix."""
            scale = tensors[f"{name}.{SCALE_NAME}"]
            return scale.view(1, 1).expand(len(tensors[f"{name}.weight"]), 1) if scale.ndim == 1 else scale

        # as bytes: torch.cat lacks float8 dtypes on some devices
        data = stacked(lambda name: tensors[f"{name}.weight"].view(torch.uint8)).view(EXPERT_DTYPE)
        found = {f"{stack}.weight": data, f"{stack}.weight_scale": stacked(scale_of)}
        if scheme.static:  # gate and up read one input
            scales = stacked(lambda name: tensors[f"{name}.{INPUT_SCALE_NAME}"].view(1, 1))
            found[f"{stack}.input_scale"] = scales.amax((1, 2))
        return found
