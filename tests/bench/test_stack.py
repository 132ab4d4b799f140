"""The modes of bench/gpu/stack.py that need Transformer Engine, with a stand-in in its place."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu import stack
from bench.gpu.llama import Engine, Fused, Plain
from bench.gpu.modes import BASE, FUSED, FUSED_EAGER
from bench.gpu.peers import RECIPES, EngineBlock, use_transformer_engine
from bench.report.plots import OWNERS, owner
from octavo.models.llama import LlamaConfig, rope_tables

CONFIG = LlamaConfig(vocabulary=8, layers=2, width=256, heads=2, kv_heads=1, mlp_width=384, context=16)


class LayerNormLinear(nn.Linear):
    """As Transformer Engine's: the weight of the norm beside the layer's."""

    def __init__(
        self, k: int, n: int, *, eps: float, normalization: str, params_dtype: torch.dtype, **how: Any
    ) -> None:
        super().__init__(k, n, dtype=params_dtype, **how)
        assert normalization == "RMSNorm"
        self.eps, self.layer_norm_weight = eps, nn.Parameter(torch.zeros(k, dtype=params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


def Linear(k: int, n: int, *, params_dtype: torch.dtype, **how: Any) -> nn.Linear:
    return nn.Linear(k, n, dtype=params_dtype, **how)


class LayerNormMLP(nn.Module):
    """As Transformer Engine's: the first half of what the first layer gives is the gate."""

    def __init__(
        self, k: int, f: int, *, activation: str, eps: float, normalization: str, bias: bool,
        params_dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (activation, normalization, bias) == ("swiglu", "RMSNorm", False)
        self.eps = eps
        for name, shape in (("layer_norm_weight", (k,)), ("fc1_weight", (2 * f, k)), ("fc2_weight", (k, f))):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=params_dtype, device=device)))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps), self.fc1_weight).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.fc2_weight)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The recipes that were entered, with the stand-in installed."""
    found: list[object] = []

    @contextmanager
    def autocast(*, enabled: bool, recipe: object) -> Iterator[None]:
        assert enabled
        found.append(recipe)
        yield

    engine, recipes = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common.recipe")
    parts = (LayerNormLinear, Linear, LayerNormMLP, autocast)
    engine.__dict__.update({part.__name__: part for part in parts})
    recipes.__dict__.update({name: type(name, (), {}) for name in RECIPES.values()})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_of_transformer_engine_compute_what_the_plain_ones_do(entered: list[object], recipe: str) -> None:
    torch.manual_seed(0)
    model = Engine(CONFIG)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1, mean=float(p.ndim == 1))
    x, tables = torch.randn(1, 16, CONFIG.width), rope_tables(CONFIG, torch.arange(16))
    expected = Plain.forward(model, x, *tables)
    use_transformer_engine(model, recipe)
    torch.testing.assert_close(model(x, *tables), expected)
    assert [type(each).__name__ for each in entered] == [RECIPES[recipe]]
    assert {type(block) for block in model.layers} == {EngineBlock}


def test_plain_and_fused_blocks_compute_the_same() -> None:
    plain, fused = Plain(CONFIG), Fused(CONFIG)
    matrices = [[p for p in model.parameters() if p.ndim == 2] for model in (plain, fused)]
    for p, q in zip(*matrices, strict=True):
        q.data.copy_(p.data)
    x, tables = torch.randn(1, 16, CONFIG.width), rope_tables(CONFIG, torch.arange(16))
    torch.testing.assert_close(fused(x, *tables), plain(x, *tables))


def test_a_mode_in_fp8_is_near_bf16_and_its_step_leaves_no_gradient() -> None:
    modes = {BASE: "bf16, eager", FUSED: FUSED_EAGER, "plain": "ours plain: rowwise, eager"}
    runners = {name: stack.Runner(mode, CONFIG, 16, "cpu") for name, mode in modes.items()}
    found = stack.check(runners)
    assert found.keys() == {FUSED, "plain"}
    assert all(40 < db < 50 for each in found.values() for db in each)
    for runner in runners.values():
        runner.step()
        assert runner.x.grad is None
        assert all(p.grad is None for p in runner.model.parameters())


def test_every_mode_has_a_colour() -> None:
    assert {owner(mode) for mode in stack.MODES} == set(OWNERS)


def test_modes_need_what_they_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def build(names: list[str]) -> Any:
        asked.append(names)
        raise InterruptedError

    monkeypatch.setattr(stack, "build", build)
    for there in ((), ("torchao",), ("torchao", "transformer-engine")):
        monkeypatch.setattr(stack.record, "installed", lambda name, there=there: "1.0" if name in there else "")
        with pytest.raises(InterruptedError):
            stack.main()
    counts = [len(names) for names in asked]
    assert counts == [len(stack.MODES) - 6, len(stack.MODES) - 3, len(stack.MODES)]
