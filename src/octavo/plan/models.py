"""The model that a person names: a preset, a Hugging Face folder or config.json, or the settings of a training run."""

import difflib
import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from octavo.artifact.run import RUN_OR_MODEL, check_config
from octavo.extras import hub_hint
from octavo.models import BUILT_IN_MODELS
from octavo.plan.architecture import Architecture
from octavo.plan.families import describe_architecture, positive_sizes
from octavo.train.config import Config
from octavo.train.settings import PRESETS
from octavo.train.vocabulary import known_vocabulary


@functools.cache
def model_presets() -> dict[str, dict[str, Any]]:
    """The fields of each preset, by its name, as in a config.json; "source" is where they come from."""
    presets: dict[str, dict[str, Any]] = json.loads((files("octavo.plan") / "models.json").read_text())
    return presets


def find_architecture(model: str, config: Config) -> Architecture:
    """The architecture of `model`.

    Args:
        model: a preset, "" for Octavo's own model of the sizes in `config`, a Hugging Face folder, or a config.json.
        config: the settings of training.

    Raises:
        ValueError: none of these; the message names the nearest preset.
    """
    if model == "":
        return _built_in(config)
    if model.lower() in model_presets():
        return describe_architecture(model.lower(), model_presets()[model.lower()])
    path = Path(model)
    if path.is_dir():
        check_config(path, RUN_OR_MODEL)
        path = path / "config.json"
    if not path.is_file():
        presets = sorted(model_presets().keys() | PRESETS.keys())
        near = difflib.get_close_matches(model.lower(), presets, n=3, cutoff=0.5)
        advice = f"the nearest presets are {', '.join(near)}; " if near else ""
        if model in BUILT_IN_MODELS:
            advice = f'for a {model} of octavo train give a .toml file with model = "{model}" and its sizes; '
        raise ValueError(
            f"MODEL must be a preset, a run or a .toml file of octavo train, a Hugging Face folder, a config.json or a "
            f"number of parameters such as 7B; got {model!r}: {advice}all presets: {', '.join(presets)}"
            f"{hub_hint(model)}"
        )
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, and cannot be read ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must be a JSON object of the sizes of a model; got {type(fields).__name__}")
    return positive_sizes(describe_architecture(str(path), fields))


def _built_in(config: Config) -> Architecture:
    """Octavo's own model of the sizes in `config`. The settings of its tokenizer say how many tokens that has."""
    vocabulary = known_vocabulary(config)
    if vocabulary is None:
        raise ValueError(
            f"the settings do not say how many tokens the tokenizer {config.tokenizer} has: plan with --tokenizer bpe "
            "--vocabulary NUMBER"
        )
    sizes = {
        "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "vocab_size": vocabulary, "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied, "enable_bias": config.bias,
    }  # fmt: skip
    if config.model == "gpt2":
        return describe_architecture("gpt2", sizes | {"model_type": "opt", "ffn_dim": 4 * config.width})
    if config.model == "mixture":
        experts = {
            "model_type": "qwen2_moe", "intermediate_size": config.mlp_width, "num_experts": config.experts.count,
            "moe_intermediate_size": config.mlp_width, "num_experts_per_tok": config.experts.top_k,
            "shared_expert_intermediate_size": config.experts.shared_width, "qkv_bias": False,
        }  # fmt: skip
        return describe_architecture("mixture", sizes | experts)
    return describe_architecture("llama", sizes | {"model_type": "llama", "intermediate_size": config.mlp_width})
