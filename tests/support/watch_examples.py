"""Models to watch, and layers, records and events of a watched run, made up."""

import numpy as np
import torch
from linear_examples import converted_model
from torch import nn

from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.watching.storage import FULL_SHARE, LAYER, OPERAND, Event, GemmRun, WatchedLayer


def watched_layers(count: int = 2) -> list[WatchedLayer]:
    formats, rows = dict.fromkeys(("x", "w", "dy"), "e4m3"), dict.fromkeys(("x", "w", "dy"), "row")
    gemms = {"y": GemmRun("fp8", "cublaslt"), "dx": GemmRun("fp8", "cublaslt"), "dw": GemmRun("bf16", "bf16", "recipe")}
    return [WatchedLayer(f"blocks.{i}.up", "Linear", (64, 32), "rowwise", formats, rows, gemms) for i in range(count)]


def sample(step: int, layers: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Records of one step: three operands of each layer, and the layers."""
    operands, by_layer = np.zeros(3 * layers, OPERAND), np.zeros(layers, LAYER)
    operands["step"] = by_layer["step"] = step
    operands["layer"], by_layer["layer"] = np.repeat(np.arange(layers), 3), np.arange(layers)
    operands["operand"] = np.tile(np.arange(3), layers)
    operands["amax"], operands["gap"] = step + np.arange(3 * layers) / 8, np.nan
    operands["binades"][:, 0] = FULL_SHARE
    by_layer["gradient_norm"] = step
    return operands, by_layer


def event(step: int, value: float | None = 0.5) -> Event:
    return Event(step, "saturation_spike", "blocks.0.up", "x", value, 0.01, f"at step {step} many numbers saturated")


def one_layer(recipe="rowwise") -> nn.Sequential:
    torch.manual_seed(0)
    return converted_model(nn.Sequential(nn.Linear(80, 64, bias=False)), recipe)


def tiny_model(name: str, recipe: str = "rowwise", layers: int = 1) -> nn.Module:
    """A converted "llama", "gpt2" or "mixture"."""
    torch.manual_seed(0)
    configs = {
        "llama": LlamaConfig(64, layers, 32, 4, 2, 48, 16), "gpt2": GPT2Config(64, layers, 32, 4, 16),
        "mixture": MixtureConfig(64, layers, 32, 4, 2, 48, 16, experts=4, top_k=2),
    }  # fmt: skip
    return converted_model(build(configs[name]), recipe)


def backward(model: nn.Module) -> torch.Tensor:
    """The loss of a pass over 32 tokens, forward and backward."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.detach()
