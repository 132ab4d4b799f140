"""Models to watch; layers, records and events that are made up; and the numbers of a watch in float64 and ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from codec_oracle import ML_DTYPES
from linear_examples import converted_model
from quantize_oracle import expanded, oracle_scale
from torch import nn

from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.watching.storage import FULL_SHARE, LAYER, OPERAND, Event, GemmRun, WatchedLayer

Array = np.ndarray
BY_OPERAND = ("amax", "rms", "scale", "smallest_scale", "saturated", "flushed", "sqnr", "kurtosis", "crest")


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
    torch.manual_seed(0)
    configs = {
        "llama": LlamaConfig(64, layers, 32, 4, 2, 48, 16), "gpt2": GPT2Config(64, layers, 32, 4, 16),
        "mixture": MixtureConfig(64, layers, 32, 4, 2, 48, 16, experts=4, top_k=2),
    }  # fmt: skip
    return converted_model(build(configs[name]), recipe)


def backward(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.detach()


# ---- The oracle


def describe(x: Array, cast=None, scale: Array | None = None) -> dict[str, float]:
    """The fields of a record of a finite matrix x, float32, which `cast` quantizes, by its own scale or a known one."""
    wide = x.astype(np.float64)
    amax, rms = np.abs(wide).max(), math.sqrt((wide**2).mean())
    central = wide - wide.mean()
    found = {
        "amax": amax, "rms": rms, "crest": amax / rms, "kurtosis": (central**4).mean() / (central**2).mean() ** 2,
        "zero_rows": (~wide.any(1)).mean(),
    }  # fmt: skip
    if cast is None:
        return found
    blocks = oracle_scale(x, cast) if scale is None else scale
    each = expanded(blocks, cast, x.shape).astype(np.float64)
    kind = ML_DTYPES[cast.format]
    largest = float(ml_dtypes.finfo(kind).max)
    numbers = np.clip(x * (1 / each.astype(np.float32)), -largest, largest).astype(kind).astype(np.float64)
    return found | {
        "scale": blocks.max(), "smallest_scale": blocks[blocks > 2.0**-126].min(),
        "saturated": (np.abs(wide) > each * largest * (1 + 1e-6)).mean(),
        "flushed": ((numbers == 0) & (wide != 0)).mean(),
        "sqnr": 10 * math.log10((wide**2).sum() / ((wide - numbers * each) ** 2).sum()),
    }  # fmt: skip


def check(found, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-6, abs=1e-7), name


def binades(x: Array) -> list[float]:
    """The share of elements in each of the 40 binades from that of amax down."""
    exponents = [math.floor(math.log2(abs(v))) for v in x.astype(np.float64).flat if v]
    top = max(exponents)
    below = [min(top - e, 39) for e in exponents]
    return [below.count(k) / x.size for k in range(40)]


def matrix(rows: int = 48, columns: int = 80, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    """Numbers of many sizes: rows of different size, outliers, zeros, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randn(rows, 1, generator=generator) * spread)
    x[torch.rand(x.shape, generator=generator) < 0.02] *= 200
    x[torch.rand(x.shape, generator=generator) < 0.02] *= 1e-6
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0
    x[3] = 0
    return x
