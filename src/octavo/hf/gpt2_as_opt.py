"""A GPT-2 of transformers, read as OPT.

    Conv1D: y = x @ W[K,N] + b          nn.Linear: y = x @ W[N,K]^T + b

transformers keeps the weights of GPT-2 in `Conv1D`, the transpose of what FP8 loaders take, and q, k and v in one
layer, c_attn. OPT with GPT-2's activation computes the same function with linear layers. So a folder of GPT-2 is
described and read here as one of OPT: c_attn is split into q, k and v, and the position table gets the two rows that
OPT skips. Every other folder is read unchanged.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError
from octavo.artifact.safetensors_files import ShardReader, Spec
from octavo.models.gpt2 import ARCHITECTURE, POSITION_OFFSET

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
