"""Tensors that files hold in another form than modules: experts one by one, and GPT-2 as OPT."""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.files import ArtifactError, ShardReader, Spec
from octavo.checkpoint.layouts import Layout
from octavo.models.gpt2 import ARCHITECTURE, POSITION_OFFSET

# ---- Mixtures of experts: their files hold a matrix for each expert, their modules stack these matrices.
#
# transformers keeps the experts of a layer as two parameters of three dimensions (Mixtral, Qwen3-MoE, DeepSeek and
# others), and writes one matrix for each projection of each expert:
#
#     in the model   model.layers.0.mlp.experts.gate_up_proj   [experts, 2F, K]
#     in the files   model.layers.0.mlp.experts.0.gate_proj.weight   [F, K], and so on
#
# transformers' own mapping (`transformers.conversion_mapping`), by which it loads and saves, says which tensors of the
# files make which stack, and which other tensors have another name there.


class ExpertFiles:
    """The names of a model's tensors in its files, for a model whose experts are stacked.

    Attributes:
        shapes: of each tensor of the model.
        parts: the file tensors of each tensor of the model, in order: several for a stack, one for any other.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        named = (*model.named_parameters(), *model.named_buffers())
        self.shapes = {name: tuple(t.shape) for name, t in named}
        meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in named}
        self.parts = {name: list(self._revert(name, tensor)) for name, tensor in meta.items()}
        self._stack_of = {part: name for name in self.stacks for part in self.parts[name]}
        self._name_of = {parts[0]: name for name, parts in self.parts.items() if len(parts) == 1}

    @property
    def stacks(self) -> list[str]:
        """The stacks: tensors of the model that are several tensors in the files."""
        return [name for name, parts in self.parts.items() if len(parts) > 1]

    @property
    def parts_of_stacks(self) -> dict[str, list[str]]:
        return {name: self.parts[name] for name in self.stacks}

    @property
    def experts(self) -> list[str]:
        """Each projection of each expert, by its name in the files."""
        return [part.removesuffix(".weight") for part in self._stack_of]

    @property
    def modules(self) -> list[str]:
        """The modules that hold the experts of a layer, by their names in the files."""
        firsts = (self.parts[name][0] for name in self.stacks)
        return list(dict.fromkeys(re.sub(r"\.\d+\.[^.]*(\.weight)?$", "", first) for first in firsts))

    @property
    def routers(self) -> list[str]:
        """The modules that hold a matrix and are neither linear layers nor embeddings, by their names in the files.
        Other programs take them for linear layers."""
        modules = dict(self._model.named_modules())
        weights = {name: p for name, p in self._model.named_parameters() if name.endswith(".weight") and p.ndim == 2}
        owners = {name: modules[name.removesuffix(".weight")] for name in weights}
        others = [name for name, owner in owners.items() if not isinstance(owner, nn.Linear | nn.Embedding)]
        return [self.parts[name][0].removesuffix(".weight") for name in others if name in self.parts]

    def unpacked(self, layout: Layout, packed: Collection[str]) -> list[str]:
        """The experts and routers in BF16, as a `quantization_config` must name its unpacked layers.

        A layout has one entry for all experts, or matches the names of the modules above. Where some experts are
        `packed`, the others are named one by one.
        """
        if packed:
            return [*(name for name in self.experts if name not in packed), *self.routers]
        names = [layout.experts] if layout.experts else self.modules
        return [*names, *self.routers]

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the files that hold these tensors of the model."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            is_stack = len(self.parts.get(name, ())) > 1
            found |= self._revert(name, tensor) if is_stack else {self.file_name(name): tensor}
        return found

    def merge(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the model from all tensors of its files. The parts of an incomplete stack keep their names."""
        whole = [name for name in self.stacks if all(part in tensors for part in self.parts[name])]
        found = {name: self.stack(name, tensors.__getitem__) for name in whole}
        used = {part for name in whole for part in self.parts[name]}
        return found | {self._model_name(name): t for name, t in tensors.items() if name not in used}

    def part(self, name: str, get: Callable[[str], Tensor]) -> Tensor:
        """One tensor of the files, from the tensors of the model, which `get` reads."""
        whole = self._stack_of.get(name) or self._model_name(name)
        return self.split({whole: get(whole)})[name]

    def stack(self, name: str, get: Callable[[str], Tensor]) -> Tensor:
        """One stack, made of its parts, which `get` reads."""
        loading, mapping = transformers_names()
        rules = mapping.get_model_conversion_mapping(self._model)
        converters = [rule for rule in rules if hasattr(rule, "operations")]
        renamings = [rule for rule in rules if not hasattr(rule, "operations")]
        converter: Any = None
        for part in self.parts[name]:
            renamed, pattern = loading.rename_source_key(part, renamings, converters)
            if converter is None:
                converter = copy.deepcopy(next(c for c in converters if pattern in c.source_patterns))
            converter.add_tensor(renamed, part, pattern, get(part))
        ((_, stacked),) = converter.convert(name, model=self._model, config=self._model.config).items()
        found: Tensor = stacked[0] if isinstance(stacked, list) else stacked
        return found

    def by_model_names(
        self, get: Callable[[str], Tensor], names: Iterable[str]
    ) -> tuple[Callable[[str], Tensor], list[str]]:
        """Turn a reader of files into one that takes the names of the model; also returns these names.

        Args:
            get: reads a tensor by its name in the files.
            names: of the tensors in the files.
        """
        there = dict.fromkeys(names)
        whole = {name for name in self.stacks if all(part in there for part in self.parts[name])}
        files = {self._model_name(name): name for name in there if self._stack_of.get(name) not in whole}

        def read(name: str) -> Tensor:
            return self.stack(name, get) if name in whole else get(files[name])

        return read, [*(name for name in self.stacks if name in whole), *files]

    def _revert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        loading, _ = transformers_names()
        found: dict[str, Tensor] = loading.revert_weight_conversion(self._model, {name: tensor})
        return found

    def file_name(self, name: str) -> str:
        """The name in the files of a tensor of the model that is no stack, or of a layer's scale."""
        if name in self.parts or "." not in name:
            return self.parts.get(name, [name])[0]
        module, _, leaf = name.rpartition(".")  # a scale, whose layer is known by its weight
        weight = self.parts.get(f"{module}.weight", [f"{module}.weight"])[0]
        return f"{weight.removesuffix('.weight')}.{leaf}"

    def _model_name(self, name: str) -> str:
        if name in self._name_of or "." not in name:
            return self._name_of.get(name, name)
        module, _, leaf = name.rpartition(".")
        weight = self._name_of.get(f"{module}.weight", f"{module}.weight")
        return f"{weight.removesuffix('.weight')}.{leaf}"


def expert_files(model: nn.Module) -> ExpertFiles | None:
    """The names of the tensors of a model of transformers in its files, if some are stacks; else None."""
    if not any(parameter.ndim == 3 for parameter in model.parameters()):
        return None
    files = ExpertFiles(model)
    return files if files.stacks else None


class ExpertReader(ShardReader):
    """The tensors of a folder under the names of the model. A stack is made of its parts when it is read."""

    def __init__(self, folder: Path, files: ExpertFiles) -> None:
        super().__init__(folder)
        in_files, self.specs = self.specs, {}
        self._get, names = files.by_model_names(super().get, in_files)
        for name in names:
            parts = [part for part in files.parts.get(name, [name]) if part in in_files]
            dtype = in_files[parts[0] if parts else name].dtype
            shape = files.shapes[name] if len(parts) > 1 else in_files[parts[0] if parts else name].shape
            self.specs[name] = Spec(dtype, shape)

    def get(self, name: str) -> Tensor:
        return self._get(name)

    def in_file(self, name: str) -> Tensor:
        """One tensor by its name in the files, on the CPU."""
        return super().get(name)


def transformers_names() -> tuple[Any, Any]:
    from transformers import conversion_mapping, core_model_loading

    return core_model_loading, conversion_mapping


# ---- A GPT-2 of transformers, read as OPT.
#
#     Conv1D: y = x @ W[K,N] + b          nn.Linear: y = x @ W[N,K]^T + b
#
# transformers keeps the weights of GPT-2 in `Conv1D`, the transpose of what FP8 loaders take, and q, k and v in one
# layer, c_attn. OPT with GPT-2's activation computes the same function with linear layers. So a folder of GPT-2 is
# described and read here as one of OPT: c_attn is split into q, k and v, and the position table gets the two rows that
# OPT skips. Every other folder is read unchanged.


_SIZES = {
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
}
# Settings of GPT-2 for which OPT has one value only: transformers' default.
_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "layer_norm_epsilon": 1e-5,
}
_END_OF_TEXT = 50256
# GPT-2's modules, and the modules of OPT that hold their weights.
_TRUNK = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "final_layer_norm"}
_BLOCK = {
    "ln_1": ["self_attn_layer_norm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj": ["self_attn.out_proj"],
    "ln_2": ["final_layer_norm"],
    "mlp.c_fc": ["fc1"],
    "mlp.c_proj": ["fc2"],
}
_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")  # older files hold the causal mask


def is_gpt2(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is that of a GPT-2."""
    return config.get("model_type") == "gpt2"


def open_tensors(folder: Path, config: Mapping[str, Any]) -> ShardReader:
    """The tensors in `folder`, those of a GPT-2 under OPT's names.

    Args:
        folder: with safetensors files.
        config: the parsed config.json of the model, as it is stored.

    Raises what `ShardReader` raises.
    """
    return Conv1DReader(folder) if is_gpt2(config) else ShardReader(folder)


def config_as_opt(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The config.json of the OPT that computes the same as the GPT-2 of `config`.

    Raises an ArtifactError, which names the setting and the file `where`, if no OPT does.
    """
    if (named := config.get("architectures") or ["GPT2LMHeadModel"]) != ["GPT2LMHeadModel"]:
        raise ArtifactError(f"{where}: of GPT-2's classes GPT2LMHeadModel is supported, got {', '.join(named)}")
    if missing := [key for key in _SIZES if not isinstance(config.get(key), int)]:
        raise ArtifactError(f"{where}: a GPT-2 must state {', '.join(missing)}")
    for key, value in _FIXED.items():
        if (found := config.get(key, value)) != value:
            raise ArtifactError(
                f"{where}: {key} is {found!r}. A GPT-2 is run and packed here as OPT, which has {value!r} only: such a "
                "model is not supported"
            )
    return {theirs: config[ours] for ours, theirs in _SIZES.items()} | {
        "architectures": [ARCHITECTURE],
        "model_type": "opt",
        "word_embed_proj_dim": config["n_embd"],
        "ffn_dim": config.get("n_inner") or 4 * config["n_embd"],
        "activation_function": config.get("activation_function", "gelu_new"),
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "layerdrop": 0.0,
        "init_std": config.get("initializer_range", 0.02),
        "bos_token_id": config.get("bos_token_id", _END_OF_TEXT),
        "eos_token_id": config.get("eos_token_id", _END_OF_TEXT),
        "pad_token_id": config.get("pad_token_id"),
    }


class Conv1DReader(ShardReader):
    """The tensors of a GPT-2 folder under OPT's names and in OPT's shapes. c_attn is read for each of q, k and v."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._from: dict[str, str] = {}
        found, self.specs = self.specs, {}
        for name, spec in found.items():
            if _MASK.fullmatch(name):
                continue
            for opt, tensor in _convert(name, spec.meta()).items():
                self.specs[opt], self._from[opt] = Spec.of(tensor), name

    def trained_names(self) -> dict[str, str]:
        """The layer of GPT-2 that holds each layer of OPT, by OPT's name."""
        named = {opt.rpartition(".")[0]: name.rpartition(".")[0] for opt, name in self._from.items()}
        return {opt: name if name.startswith("transformer.") else f"transformer.{name}" for opt, name in named.items()}

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        source = self._from[name]
        return _convert(source, super().get(source))[name].contiguous()


def _convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors of OPT that hold the tensor `name` of GPT-2, whose file may omit "transformer."; a tensor that GPT-2
    does not have stays as it is."""
    module, _, leaf = name.removeprefix("transformer.").rpartition(".")
    block = re.fullmatch(r"h\.(\d+)\.(.+)", module)
    if tensor.ndim not in (1, 2):
        return {name: tensor}
    if module in _TRUNK:
        if module == "wpe":
            tensor = torch.cat((tensor.new_zeros(POSITION_OFFSET, *tensor.shape[1:]), tensor))
        return {f"model.decoder.{_TRUNK[module]}.{leaf}": tensor}
    if block and block[2] in _BLOCK:
        rows = tensor.t().chunk(len(_BLOCK[block[2]]))  # a vector is its own transpose
        layer = f"model.decoder.layers.{block[1]}"
        return {f"{layer}.{part}.{leaf}": t for part, t in zip(_BLOCK[block[2]], rows, strict=False)}
    return {name: tensor}
