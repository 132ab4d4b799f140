"""Small readable reference models, whose checkpoints open in transformers.

| here | on disk | what it is |
|---|---|---|
| `Llama` | `LlamaForCausalLM` | RMSNorm, rotary positions, grouped-query attention, SwiGLU |
| `GPT2` | `OPTForCausalLM` | LayerNorm, learned positions, fused q/k/v, GELU, biases |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from octavo.models import gpt2, llama
from octavo.models.gpt2 import GPT2, GPT2Config
from octavo.models.llama import Llama, LlamaConfig

__all__ = [
    "BUILT_IN_MODELS",
    "GPT2",
    "Config",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "build",
    "from_hf_config",
    "hf_mapping",
]

Config = LlamaConfig | GPT2Config
BUILT_IN_MODELS = ("llama", "gpt2")  # what a training run calls them
Split = Callable[[str, Tensor], dict[str, Tensor]]
Merge = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def build(config: Config) -> Llama | GPT2:
    """The model of this configuration, initialised; under `torch.device("meta")` it takes no memory."""
    return Llama(config) if isinstance(config, LlamaConfig) else GPT2(config)


def from_hf_config(hf: Mapping[str, Any]) -> tuple[type[Llama] | type[GPT2], Config] | None:
    """The model class and configuration that a config.json names, or None if its architecture is not one of ours.

    Raises ValueError if the architecture is ours, but with features that our implementation does not have.
    """
    architectures = hf.get("architectures") or []
    if llama.ARCHITECTURE in architectures:
        return Llama, LlamaConfig.from_hf(hf)
    if gpt2.ARCHITECTURE in architectures:
        return GPT2, GPT2Config.from_hf(hf)
    return None


def hf_mapping(config: Config) -> tuple[Split, Merge]:
    """`split_for_hf` and `merge_from_hf` of the model of this configuration."""
    module = llama if isinstance(config, LlamaConfig) else gpt2
    return module.split_for_hf, module.merge_from_hf
