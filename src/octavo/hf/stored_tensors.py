"""Tensors that files hold in another form than modules: experts one by one, and GPT-2 as OPT."""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.files import ArtifactError, ShardReader, check_match, read_json
from octavo.checkpoint.folder import ADAPTER_CONFIG, ADAPTERS, PEFT_PREFIX
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.checkpoint.scheme import Layout
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
    """The names of a model's tensors in its files. Where no experts are stacked, all tensors have one name, and nothing
    is changed here.

    `parts` has the tensors of the files that hold a tensor of the model, in order: several for a stack, one for any
    other. `stacks` has the layers of the files in each stack: one projection of each expert, or two. `experts` are
    those layers that are matrices; a convolution can be several tensors in the files, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        named = (*model.named_parameters(), *model.named_buffers())
        split: dict[str, dict[str, Tensor]] = {}
        if any(parameter.ndim == 3 for parameter in model.parameters()):
            from transformers.conversion_mapping import get_model_conversion_mapping

            self._rules = get_model_conversion_mapping(model)
            # transformers makes this list for each tensor that it renames, of a model without the attribute.
            saved = get_model_conversion_mapping(model, add_legacy=False)
            vars(model)["_weight_conversions"] = [r for r in saved if type(r).__name__ != "PrefixChange"] or None
            meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in named}
            split = {name: self._revert(name, tensor) for name, tensor in meta.items()}
        stacked = {name: parts for name, parts in split.items() if len(parts) > 1}
        self.parts = {name: list(parts) for name, parts in split.items()} if stacked else {}
        self.stacks = {name: [part.removesuffix(".weight") for part in parts] for name, parts in stacked.items()}
        self._stack_of = {part: name for name, parts in stacked.items() for part in parts}
        matrices = {part for parts in stacked.values() for part, tensor in parts.items() if tensor.ndim == 2}
        self.experts = [part.removesuffix(".weight") for part in self._stack_of if part in matrices]
        self._in_files = {name: parts[0] for name, parts in self.parts.items()}
        self._in_model = {parts[0]: name for name, parts in self.parts.items() if len(parts) == 1}
        self._read: dict[str, dict[str, Tensor]] = {}  # the parts of the stacks that `part` read last

    def unpacked(self, layout: Layout, packed: Collection[str]) -> list[str]:
        """The experts and routers in BF16, as a `quantization_config` must name its unpacked layers.

        A layout has one entry for all experts, or matches the names of the modules above. Where some experts are
        `packed`, the others are named one by one. Routers are the modules that hold a matrix and are neither linear
        layers nor embeddings, and that other programs take for linear layers.
        """
        names = [layout.experts] if layout.experts and self.experts else []
        if packed:
            names = [name for name in self.experts if name not in packed]
        elif not names:
            names = list(dict.fromkeys(re.sub(r"\.\d+\.[^.]*$", "", name) for name in self.experts))
        owners = {f"{name}.weight": module for name, module in self._model.named_modules()}
        weights = [name for name, p in self._model.named_parameters() if name in owners and p.ndim == 2]
        others = [name for name in weights if not isinstance(owners[name], nn.Linear | nn.Embedding)]
        return [*names, *(self.parts[name][0].removesuffix(".weight") for name in others if name in self.parts)]

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the files that hold these tensors of the model."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found |= self._revert(name, tensor) if name in self.stacks else {self.file_name(name): tensor}
        return found

    def part(self, name: str, get: Callable[[str], Tensor]) -> Tensor:
        """One tensor of the files, from the tensors of the model, which `get` reads. The two stacks read last, those
        of one layer, stay in memory, in parts."""
        if (whole := self._stack_of.get(name)) is None:
            return get(_renamed(name, self._in_model))
        if whole not in self._read:
            self._read = dict([*self._read.items()][-1:]) | {whole: self._revert(whole, get(whole))}
        return self._read[whole][name]

    def stack(self, name: str, get: Callable[[str], Tensor]) -> Tensor:
        """One stack, made of its parts, which `get` reads."""
        from transformers.core_model_loading import rename_source_key

        converters = [rule for rule in self._rules if hasattr(rule, "operations")]
        renamings = [rule for rule in self._rules if not hasattr(rule, "operations")]
        converter: Any = None
        for part in self.parts[name]:
            renamed, pattern = rename_source_key(part, renamings, converters)
            if converter is None:
                converter = copy.deepcopy(next(c for c in converters if pattern in c.source_patterns))
            converter.add_tensor(renamed, part, pattern, get(part))
        ((_, stacked),) = converter.convert(name, model=self._model, config=self._model.config).items()
        return stacked[0] if isinstance(stacked, list) else stacked

    def by_model_names(
        self, get: Callable[[str], Tensor], names: Iterable[str]
    ) -> tuple[Callable[[str], Tensor], list[str]]:
        """Turn `get`, which reads a tensor by its name in the files, into a reader by the names of the model; also
        return these names. The files have the tensors `names`."""
        there = dict.fromkeys(names)
        whole = {name for name in self.stacks if all(part in there for part in self.parts[name])}
        files = {_renamed(name, self._in_model): name for name in there if self._stack_of.get(name) not in whole}

        def read(name: str) -> Tensor:
            return self.stack(name, get) if name in whole else get(files[name])

        return read, [*(name for name in self.stacks if name in whole), *files]

    def _revert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, {name: tensor})

    def file_name(self, name: str) -> str:
        """The name in the files of a tensor of the model that is no stack, or of a layer's scale."""
        return _renamed(name, self._in_files)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """The other name of a tensor among `names`, or of a scale, whose layer is known by its weight."""
    if name in names or "." not in name:
        return names.get(name, name)
    module, _, leaf = name.rpartition(".")
    weight = names.get(f"{module}.weight", f"{module}.weight")
    return f"{weight.removesuffix('.weight')}.{leaf}"


class ExpertReader(ShardReader):
    """The tensors of `reader` under the names of the model. A stack is made of its parts when it is read."""

    def __init__(self, reader: ShardReader, files: ExpertFiles) -> None:
        self.folder, self.in_file = reader.folder, reader.get  # one tensor by its name in the files
        self._get, names = files.by_model_names(reader.get, reader.specs)
        described, _ = files.by_model_names(reader.specs.__getitem__, reader.specs)
        self.specs = {name: described(name) for name in names}

    def get(self, name: str) -> Tensor:
        return self._get(name)


class DequantizedReader(ShardReader):
    """The tensors of a packed folder, its packed weights as numbers in `dtype`, rounded once."""

    def __init__(self, packed: PackedTensors, dtype: torch.dtype = torch.float32) -> None:
        self.folder, self._packed, self._dtype, specs = packed.folder, packed, dtype, packed.reader.specs
        self.specs = {name: specs[name] for name in packed.others}
        self.specs |= {f"{name}.weight": specs[f"{name}.weight"].to(dtype) for name in packed.packing.schemes}

    def get(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        packed = layer in self._packed.packing.schemes
        return self._packed.weight(layer).dequantize(self._dtype) if packed else self._packed.other(name)


class AdaptedReader(ShardReader):
    """The tensors of a model with the adapters of the folder `adapters`, by PEFT, merged: W + B A alpha / r, in
    float32. `base` has W. An ArtifactError if adapters do not fit it."""

    def __init__(self, base: ShardReader, adapters: Path) -> None:
        described = read_json(adapters / ADAPTER_CONFIG)
        self.folder, self.base, self._factor = adapters, base, described["lora_alpha"] / described["r"]
        self._adapters = ShardReader(adapters, ADAPTERS)
        specs, of_a, of_b = self._adapters.specs, ".lora_A.weight", ".lora_B.weight"
        layers = [name.removesuffix(of_a) for name in specs if name.endswith(of_a)]
        self._pairs = {f"{n.removeprefix(PEFT_PREFIX)}.weight": (f"{n}{of_b}", f"{n}{of_a}") for n in layers}
        merged = {name: (specs[b] @ specs[a]).float() for name, (b, a) in self._pairs.items()}
        found = {name: base.specs[name] for name in merged if name in base.specs}
        check_match(found, merged, f"{base.folder} is not the model of the adapters {adapters}")
        self.specs = base.specs | merged

    def get(self, name: str) -> Tensor:
        base, update = self.base.get(name), self.update(name)
        return base if update is None else base.float() + update

    def update(self, name: str) -> Tensor | None:
        """B A alpha / r, float32 [N, K], of the weight `name`; None for a tensor without adapters."""
        if name not in self._pairs:
            return None
        b, a = (self._adapters.get(each).float() for each in self._pairs[name])
        return b @ a * self._factor  # [N,r] @ [r,K]


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


def open_tensors(folder: Path, config: Mapping[str, Any]) -> ShardReader:
    """The tensors in `folder`, those of a GPT-2 under OPT's names. `config` is its config.json, as it is stored."""
    return Conv1DReader(folder) if config.get("model_type") == "gpt2" else ShardReader(folder)


def config_as_opt(config: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """The config.json of the OPT that computes the same as a GPT-2; that of another model as it is. An ArtifactError,
    which names the setting and the file `where`, if no OPT does."""
    if config.get("model_type") != "gpt2":
        return config
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
            for opt, tensor in _convert(name, spec).items():
                self.specs[opt], self._from[opt] = tensor, name

    def trained_names(self) -> dict[str, str]:
        """The layer of GPT-2 that holds each layer of OPT, by OPT's name."""
        named = {opt.rpartition(".")[0]: name.rpartition(".")[0] for opt, name in self._from.items()}
        return {opt: name if name.startswith("transformer.") else f"transformer.{name}" for opt, name in named.items()}

    def get(self, name: str) -> Tensor:
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
