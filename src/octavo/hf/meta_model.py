"""A model without its numbers: the modules that a config.json describes, on the meta device, and their names on disk.

Packing needs it to know which tensors are weights of linear layers, loading to know which tensors must be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.artifact.files import ArtifactError, read_json
from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE
from octavo.extras import import_extra, open_local
from octavo.hf.experts import ExpertFiles, expert_files
from octavo.hf.gpt2_as_opt import describe_model, is_gpt2
from octavo.models import Config, build, from_hf_config


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A model in BF16 on the meta device.

    `config` is ours for an architecture of `octavo.models`, and None for a model of transformers, which has on disk the
    names that it has in memory, but for those that `experts` knows. `context`: the tokens that the model can see.
    """

    model: nn.Module
    config: Config | None
    context: int
    experts: ExpertFiles | None = None

    def on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file that hold `tensors`, which are named as in the model."""
        return dict(tensors) if self.experts is None else self.experts.split(tensors)

    def in_model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `on_disk`, for a whole file."""
        return dict(tensors) if self.experts is None else self.experts.merge(tensors)

    def file_name(self, layer: str) -> str:
        """The name that a linear layer of the model has in files."""
        return layer if self.experts is None else self.experts.file_name(f"{layer}.weight").removesuffix(".weight")

    def linears(self) -> list[str]:
        """The linear layers, by their names in files."""
        return [self.file_name(name) for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]


def read_skeleton(folder: Path) -> MetaModel:
    """The model that `folder`/config.json describes: of `octavo.models` if it is there, else of transformers.

    Raises:
        FileNotFoundError: there is no config.json.
        ArtifactError: it is not JSON, or says nothing of a context.
        ImportError: transformers is needed and not installed.
    """
    hf = read_json(folder / "config.json")
    try:
        found = from_hf_config(hf)
    except ValueError:  # the architecture is ours, a feature of it is not
        found = None
    return transformers_meta_model(folder) if found is None else our_meta_model(found[1])


def our_meta_model(config: Config) -> MetaModel:
    """The meta model of a model of `octavo.models`."""
    with torch.device("meta"):
        return MetaModel(build(config).to(UNQUANTIZED_DTYPE).eval(), config, config.context)


def transformers_meta_model(folder: Path) -> MetaModel:
    """The model of transformers that `folder`/config.json describes, on the meta device. Its class is the one in
    `architectures`, or a causal language model if it names none. A GPT-2 is OPT (`octavo.hf.gpt2_as_opt`)."""
    purpose = f"{folder / 'config.json'} describes a model that runs through transformers"
    transformers = import_extra("transformers", "hf", purpose)
    if is_gpt2(folder):
        config = transformers.AutoConfig.for_model(**describe_model(folder))
    else:
        config = open_local(transformers.AutoConfig, folder)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ArtifactError(f"{folder / 'config.json'} must state max_position_embeddings, got {context!r}")
    with torch.device("meta"):
        if named and named[0] is not None:
            model = named[0]._from_config(config, dtype=UNQUANTIZED_DTYPE)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=UNQUANTIZED_DTYPE)
    return MetaModel(model.eval(), None, context, expert_files(model))


def compute_buffers(model: Any, device: torch.device | str) -> None:
    """Let transformers compute, on `device`, what no file holds (rotary frequencies), by the rule that its own loading
    follows. That rule initializes the parameters of the same module too, so call this before any of them is filled.

    Raises:
        ArtifactError: it does not compute one of them.
    """
    for module in model.modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        names = [name for name in names if name in module._non_persistent_buffers_set]
        for name in names:
            poison = torch.nan if module._buffers[name].is_floating_point() else 0
            module._buffers[name] = torch.full_like(module._buffers[name], poison, device=device)
        if names:
            if not all(parameter.is_meta for parameter in module.parameters()):
                raise RuntimeError(f"{type(module).__name__} would be initialized again: compute its buffers first")
            model._init_weights(module)
        if left := [name for name in names if module._buffers[name].isnan().any()]:
            raise ArtifactError(
                f"transformers does not compute {left[0]} of {type(module).__name__}: this model cannot run here"
            )


def fill_model(meta_model: MetaModel, tensors: Mapping[str, Tensor]) -> Any:
    """The meta model with `tensors`, named as in it, themselves and not copies, on the CPU; nothing asks for gradients.

    Raises:
        ArtifactError: a tensor of the model is in no file, and transformers does not compute it.
    """
    model: Any = meta_model.model
    if meta_model.config is None:
        compute_buffers(model, "cpu")
    model.load_state_dict(tensors, strict=False, assign=True)  # strict: a tied head is not stored
    model.tie_weights()
    if left := [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]:
        raise ArtifactError(f"{left[0]} of {type(model).__name__} is in no file: this model cannot run here")
    return model.requires_grad_(False)
