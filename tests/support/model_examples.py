"""Small configurations of our models, and models of them with large random weights."""

import pytest
import torch

from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig, build

GQA = LlamaConfig(vocabulary=97, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=24, rope_theta=500.0)
MHA = LlamaConfig(
    vocabulary=97, layers=2, width=32, heads=4, kv_heads=4, mlp_width=48, context=24, tied=False, norm_eps=1e-3
)
GPT = GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=20)
UNTIED = GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=20, tied=False)
WITHOUT_BIAS = GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=20, bias=False)
CONFIGS = {"llama": GQA, "llama untied": MHA, "gpt2": GPT, "gpt2 untied": UNTIED, "gpt2 without bias": WITHOUT_BIAS}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
BOTH = pytest.mark.parametrize("config", [GQA, GPT], ids=["llama", "gpt2"])


def tokens(batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(1))


def lively(config: LlamaConfig | GPT2Config, size: float = 0.2) -> Llama | GPT2:
    """A model whose biases, norms and logits are far from trivial, so that a mistake anywhere moves the logits."""
    torch.manual_seed(0)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)
    return model
