"""Small readable reference models, whose checkpoints open in transformers.

| model | in transformers | its parts |
|---|---|---|
| `Llama` | `LlamaForCausalLM` | RMSNorm, rotary positions, grouped-query attention, SwiGLU |
| `Mixture` | `MixtralForCausalLM`, `Qwen2MoeForCausalLM` | a Llama with experts, and a shared one |
| `GPT2` | `OPTForCausalLM` | LayerNorm, learned positions, GELU, biases |

The names of their parameters are those of transformers, so a state_dict travels both ways unchanged.

Two models of images have no counterpart there: `octavo.models.vision.VisionTransformer`, which classifies, and
`octavo.models.vision.DiffusionTransformer`, which makes images of a class.
"""

from collections.abc import Mapping
from typing import Any

from octavo.models import gpt2, llama
from octavo.models.gpt2 import GPT2, GPT2Config
from octavo.models.llama import Llama, LlamaConfig
from octavo.models.mixture import Mixture, MixtureConfig

__all__ = [
    "GPT2", "Config", "GPT2Config", "Llama", "LlamaConfig", "Mixture", "MixtureConfig", "build", "from_hf_config",
]  # fmt: skip

Config = LlamaConfig | GPT2Config | MixtureConfig


def build(config: Config) -> Llama | GPT2 | Mixture:
    """The model of this configuration, initialized. Under `torch.device("meta")` it takes no memory."""
    if isinstance(config, MixtureConfig):
        return Mixture(config)
    return Llama(config) if isinstance(config, LlamaConfig) else GPT2(config)


def from_hf_config(hf: Mapping[str, Any]) -> Config | None:
    """The configuration in a parsed config.json, or None if its architecture is not one of this package.

    A mixture is opened by transformers, whose files have other names for the experts. Raises a ValueError for features
    that the implementation of an architecture lacks.
    """
    architectures = hf.get("architectures") or []
    if llama.ARCHITECTURE in architectures:
        return LlamaConfig.from_hf(hf)
    return GPT2Config.from_hf(hf) if gpt2.ARCHITECTURE in architectures else None
