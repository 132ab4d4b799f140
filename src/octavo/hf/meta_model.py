"""The model that a config.json describes, on the meta device: its modules, without memory for its weights.

Packing learns from it which tensors are weights of linear layers, and loading which tensors the files must have.
"""

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.artifact.files import ArtifactError, model_tensors
from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE
from octavo.extras import import_extra
from octavo.hf.experts import ExpertFiles, expert_files
from octavo.hf.gpt2_as_opt import config_as_opt, is_gpt2
from octavo.hf.inputs import KINDS, TOKENS, main_input, token_embedding
from octavo.hf.outputs import is_language_model
from octavo.models import build, from_hf_config

UNLIMITED = sys.maxsize  # the context of a model that states none, such as T5, whose positions are relative
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # what families call the number of experts


@dataclass(frozen=True, eq=False)
class MetaModel:
    """A model in BF16 on the meta device.

    Attributes:
        model: of `octavo.models`, or of transformers. The tensors that transformers keeps in float32 are float32.
        config: the parsed config.json; that of a GPT-2 of transformers as OPT's (`octavo.hf.gpt2_as_opt`).
        positions: the number of tokens that the model can see; `UNLIMITED` if it does not state one.
        experts: the names of its tensors in files, where experts are stacked; None for other models, whose tensors have
            one name.
    """

    model: nn.Module
    config: Mapping[str, Any]
    positions: int
    experts: ExpertFiles | None = None

    def split_experts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn tensors of the model into those of its files: unchanged, unless experts are stacked."""
        return dict(tensors) if self.experts is None else self.experts.split(tensors)

    def stack_experts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `split_experts`, for all tensors of the files."""
        return dict(tensors) if self.experts is None else self.experts.merge(tensors)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes that the tensors of the unpacked model have, by name."""
        return {name: tensor.dtype for name, tensor in model_tensors(self.model).items()}

    @property
    def takes_text(self) -> bool:
        """Whether the main input of the model is token ids."""
        return main_input(self.model) == TOKENS

    @property
    def context(self) -> int:
        """The number of tokens that the model can see. Raises an ArtifactError if it takes no text."""
        self.require_text()
        return self.positions

    @property
    def vocabulary(self) -> int:
        """The number of rows of the token embedding. Raises an ArtifactError if there is none."""
        return self.require_text().num_embeddings

    def require_text(self) -> nn.Embedding:
        """The token embedding. Raises an ArtifactError, which says what to do, if the model takes images."""
        embedding, kind = token_embedding(self.model), KINDS[main_input(self.model) or TOKENS]
        if embedding is None or not self.takes_text:
            raise ArtifactError(
                f"a {type(self.model).__name__} takes {kind}, and octavo calibrate, --freeze, --budget and --data run "
                "a model on text: leave them out. For the scheme static, octavo.freeze_scales(octavo.load(FOLDER), "
                f"batches) finds scales on batches of {kind}, and octavo.packing.pack(..., input_scales=scales) stores "
                "them"
            )
        return embedding

    def kept_wide(self, names: Iterable[str]) -> list[str]:
        """Those of the linear layers `names` that every quantizer of transformers leaves out, because the class keeps
        them in float32 where a model runs in float16: `wo` of T5, whose code reads the dtype of its weight."""
        keys = getattr(self.model, "_keep_in_fp32_modules", None) or ()
        return [name for name in names if any(re.search(rf"(^|\.){key}(\.|$)", name) for key in keys)]

    def file_name(self, layer: str) -> str:
        """The name that a linear layer of the model has in files."""
        return layer if self.experts is None else self.experts.file_name(f"{layer}.weight").removesuffix(".weight")

    def linears(self) -> list[str]:
        """The linear layers, by their names in files."""
        return [self.file_name(name) for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]


def read_meta_model(config: Mapping[str, Any], folder: Path) -> MetaModel:
    """The model of `octavo.models` that `our_meta_model` finds, else that of `transformers_meta_model`."""
    try:
        ours = our_meta_model(config)
    except ValueError:  # the architecture is ours, a feature of it is not
        ours = None
    return ours or transformers_meta_model(config, folder)


def our_meta_model(config: Mapping[str, Any]) -> MetaModel | None:
    """The model of `octavo.models` that a parsed config.json describes; None if its architecture is not there.

    Raises a ValueError if the architecture is there, and a feature of it is not.
    """
    found = from_hf_config(config)
    if found is None:
        return None
    with torch.device("meta"):
        return MetaModel(build(found).to(UNQUANTIZED_DTYPE).eval(), config, found.context)


def transformers_meta_model(config: Mapping[str, Any], folder: Path) -> MetaModel:
    """The model of transformers that the parsed config.json of `folder` describes.

    Its class is the one in `architectures`, or a causal language model if that names none. A GPT-2 is read as OPT
    (`octavo.hf.gpt2_as_opt`).

    Raises:
        ArtifactError: transformers does not implement the model, its main input is unknown (`octavo.hf.inputs`), a
            language model does not state its context, or tokens run through more experts than there are.
        ImportError: transformers is not installed.
    """
    where = folder / "config.json"
    transformers = import_extra("transformers", "hf", f"{where} describes a model that runs through transformers")
    config = config_as_opt(config, where) if is_gpt2(config) else config
    if (kind := config.get("model_type")) not in transformers.CONFIG_MAPPING:
        raise ArtifactError(
            f"{where} has the model_type {kind!r}, which transformers {transformers.__version__} does not implement, "
            "and octavo runs no code of a model folder (auto_map): upgrade transformers, or use another model"
        )
    check_expert_counts(config, str(where))
    settings: Any = copy.deepcopy(dict(config)) | {"name_or_path": str(folder)}  # transformers edits what it is given
    described = transformers.AutoConfig.for_model(**settings)
    model = _model(transformers, described)
    if model is None:
        named = next(iter(described.architectures or ()), None)
        if named is None:
            raise ArtifactError(f"{where} must state architectures, the class of a model that is not causal: add it")
        raise ArtifactError(
            f"{where} describes a {named}, whose inputs Octavo does not know: it packs and loads language models, "
            "models with an encoder and a decoder, and encoders of text or images (Llama, T5, Whisper, BERT, ViT, "
            "...). octavo.convert trains other models, which are saved in BF16"
        )
    return MetaModel(model.eval(), config, _positions(model, where), expert_files(model))


def _positions(model: Any, where: Path) -> int:
    """The tokens that a model can see; `UNLIMITED` if none is stated, which a language model must do to generate."""
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(stated, int):
        return stated - _reserved_positions(model)
    if is_language_model(model):
        raise ArtifactError(
            f"{where} must state max_position_embeddings, got {stated!r}: add the most tokens that the model is to see"
        )
    return UNLIMITED


def _reserved_positions(model: nn.Module) -> int:
    """The positions that no token takes: in RoBERTa the first token is behind that of the padding."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return next((t.padding_idx + 1 for t in tables if isinstance(t, nn.Embedding) and t.padding_idx is not None), 0)


def _model(transformers: Any, config: Any) -> Any:
    """The model of transformers on the meta device; None if its main input is unknown."""
    named = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if named is None and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    make = transformers.AutoModelForCausalLM.from_config if named is None else named._from_config
    with torch.device("meta"):
        model: Any = make(config, dtype=UNQUANTIZED_DTYPE)
    if main_input(model) is None:
        return None
    # Such as the biases of DeepSeek's routers.
    wide = "|".join(model._keep_in_fp32_modules_strict or ()).replace("*", ".*")
    for name, tensor in model_tensors(model).items() if wide else ():
        if re.search(wide, name):
            tensor.data = tensor.data.float()
    return model


def check_expert_counts(config: Mapping[str, Any], where: str) -> None:
    """Raise an ArtifactError, which begins with `where`, if a token runs through more experts than there are."""
    count = next((n for key in EXPERT_COUNTS if isinstance(n := config.get(key), int)), None)
    used = config.get("num_experts_per_tok")
    if count is not None and isinstance(used, int) and used > max(count, 1):
        raise ArtifactError(
            f"{where}: num_experts_per_tok must be at most the number of experts, got {used} of {count}"
        )


def compute_buffers(model: Any, device: torch.device | str) -> None:
    """Let transformers compute, on `device`, the buffers that no file holds (rotary frequencies), as its own loading
    does. It initializes the parameters of the same module too, so call this before any of them is filled.

    Raises:
        ArtifactError: transformers does not compute one of the buffers.
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
    """The model with `tensors`, by their names in it. They are not copied, and none requires a gradient.

    The buffers that no file holds are on the CPU.

    Raises:
        ArtifactError: `tensors` lacks a tensor of the model, and transformers does not compute it.
    """
    model: Any = meta_model.model
    compute_buffers(model, "cpu")
    model.load_state_dict(tensors, strict=False, assign=True)  # strict: a tied head is not stored
    model.tie_weights()
    if left := [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]:
        raise ArtifactError(f"{left[0]} of {type(model).__name__} is in no file: this model cannot run here")
    return model.requires_grad_(False)
