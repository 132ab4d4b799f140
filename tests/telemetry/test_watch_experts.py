"""Experts in a watch: operands, the worst expert and the load, against the tensors of the layer itself."""

import numpy as np
import pytest
import torch
from metrics import sqnr
from torch import nn

import octavo
from octavo.models import Mixture, MixtureConfig
from octavo.nn import Experts, GroupedLinear
from octavo.ops import quantize, quantize_matrices
from octavo.recipe import rowwise
from octavo.telemetry import read_watch

E, K, HIDDEN, TOKENS = 4, 32, 48, 64
CONFIG = MixtureConfig(64, 2, 32, 4, 2, 48, 16, experts=4, top_k=2)
NAMES = ("gate_up_proj", "down_proj")


class Layer(nn.Module):
    """Experts, of which expert 1 gets no token, and expert 2 three quarters of the first slots."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(E, K, HIDDEN)
        index = torch.full((TOKENS, 2), 3)
        index[: 3 * TOKENS // 4, 0], index[3 * TOKENS // 4 :, 0] = 2, 0
        self.index, self.weight = index, torch.rand(TOKENS, 2) + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts(x, self.index, self.weight)
        return y


def watched(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, **options):
    """The sample of one step of all rows, and the layers as they ran."""
    octavo.convert(module, "rowwise")
    with octavo.watch(module, interval=1, rows=10_000, **options) as watch:
        module(x).backward(dy)
        watch.step()
        return watch.latest(), watch.layers


def row(sample, layers, name, operand):
    number = [layer.name for layer in layers].index(name)
    records = sample.operands
    (found,) = records[(records["layer"] == number) & (records["operand"] == operand)]
    return found


def test_the_records_are_those_of_the_tensors():
    module, x = Layer(), torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(1))
    x[:, 0] *= 30
    dy = torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(2))
    sample, layers = watched(module, x.clone().requires_grad_(), dy)
    rows = torch.cat([x[module.index[:, s] == e] for e in range(E) for s in range(2)])
    found = row(sample, layers, "experts.gate_up_proj", 0)
    assert found["amax"] == rows.abs().max()
    assert found["sqnr"] == pytest.approx(sqnr(rows, quantize(rows, rowwise().x).dequantize()), abs=0.01)
    w = module.experts.down_proj.detach()
    found = row(sample, layers, "experts.down_proj", 1)
    assert found["amax"] == w.abs().max()
    assert found["sqnr"] == pytest.approx(sqnr(w, quantize_matrices(w, rowwise().w).dequantize()), abs=0.01)
    found = row(sample, layers, "experts.down_proj", 2)
    weighted = (dy[:, None] * module.weight[..., None]).flatten(0, 1)
    assert found["amax"] == pytest.approx(float(weighted.abs().max()), rel=1e-6)
    assert 25 < found["sqnr"] < 33
    assert 25 < row(sample, layers, "experts.gate_up_proj", 2)["sqnr"] < 33
    described = {layer.name: layer for layer in layers}
    assert described["experts.gate_up_proj"].shape == (E * 2 * HIDDEN, K)
    assert {run.kernel for run in described["experts.down_proj"].gemms.values()} == {"emulated"}


def test_the_load_and_the_worst_expert_are_named():
    module, x = Layer(), torch.randn(TOKENS, K)
    with torch.no_grad():
        x[3 * TOKENS // 4 :] = 1e-3  # the tokens of expert 0: a row of equal numbers has no error
        x[3 * TOKENS // 4 :, 0] = 1.0  # but these are beside a large one
        module.experts.down_proj[1] = torch.where(torch.arange(HIDDEN) == 0, 1.0, 1e-5)
    sample, _ = watched(module, x.requires_grad_(), torch.randn(TOKENS, K))
    inner, outer = sample.experts
    assert (inner["experts"], inner["fullest"], inner["idle"]) == (E, 3, 1)
    assert inner["load"] == pytest.approx(TOKENS / (2 * TOKENS / E))
    assert outer["load"] == inner["load"]
    x = x.detach()
    x_q = quantize(x, rowwise().x).dequantize()
    each = [sqnr(x[(module.index == e).any(1)], x_q[(module.index == e).any(1)]) for e in (0, 2, 3)]
    assert inner["worst"][0] == (0, 2, 3)[int(np.argmin(each))]
    assert inner["sqnr"][0] == pytest.approx(min(each), abs=0.01)
    w = module.experts.down_proj.detach()
    w_q = quantize_matrices(w, rowwise().w).dequantize()
    each = [sqnr(w[e], w_q[e]) for e in range(E)]
    assert outer["worst"][1] == int(np.argmin(each))
    assert outer["sqnr"][1] == pytest.approx(min(each), abs=0.01)


def test_a_grouped_linear_layer_is_watched():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = GroupedLinear(2, K, K)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x, torch.tensor([10, TOKENS], dtype=torch.int32))
            return y

    sample, layers = watched(Halves(), torch.randn(TOKENS, K, requires_grad=True), torch.randn(TOKENS, K))
    assert [layer.name for layer in layers] == ["layer.weight"]
    assert sorted(sample.operands["operand"]) == [0, 1, 2]
    assert (sample.operands["sqnr"] > 25).all()
    (experts,) = sample.experts
    assert (experts["fullest"], experts["idle"]) == (1, 0)
    assert experts["load"] == pytest.approx((TOKENS - 10) / (TOKENS / 2))


def step(model: Mixture) -> torch.Tensor:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.detach()


def mixture(**options) -> Mixture:
    torch.manual_seed(0)
    model = Mixture(CONFIG)
    octavo.convert(model, "rowwise")
    return model


def test_a_run_has_records_of_its_experts_and_the_same_numbers(tmp_path):
    plain, model = mixture(), mixture()
    expected = step(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with octavo.watch(model, folder=tmp_path, interval=1) as watch:
        assert torch.equal(step(model), expected)
        optimizer.step()
        watch.step()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    found = read_watch(tmp_path)
    names = [layer.name for layer in found.layers]
    stacks = [f"layers.{i}.mlp.experts.{leaf}" for i in range(2) for leaf in NAMES]
    assert [names[record["layer"]].removeprefix("model.") for record in found.experts] == stacks
    assert (found.experts["load"] >= 1).all()
    of_stacks = np.isin(found.layer_records["layer"], found.experts["layer"])
    assert of_stacks.sum() == 4
    assert (found.layer_records["gradient_norm"][of_stacks] > 0).all()
    assert (found.layer_records["update_ratio"][of_stacks] > 0).all()
    assert model.model.layers[0].mlp.experts.observers is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_record_the_same(tmp_path):
    samples = []
    for compiled in (False, True):
        model = mixture()
        with octavo.watch(model, interval=1) as watch:
            if compiled:
                for block in model.model.layers:
                    block.compile(backend="aot_eager")
            step(model)
            watch.step()
            samples.append(watch.latest())
    for name in ("amax", "sqnr", "shift_lost"):
        assert samples[1].operands[name] == pytest.approx(samples[0].operands[name], rel=1e-3, nan_ok=True), name
    assert (samples[1].experts["load"] == samples[0].experts["load"]).all()


def test_experts_that_ranks_share_are_not_recorded():
    module = Layer()
    octavo.convert(module, "rowwise")
    module.experts.parallel = lambda module, x, *rest: x
    with octavo.watch(module, interval=1) as watch:
        module(torch.randn(TOKENS, K))
        watch.step()
        assert not len(watch.latest().operands)
