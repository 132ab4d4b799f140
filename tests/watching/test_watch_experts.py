"""Experts in a watch: operands, the worst expert and the load, against the tensors of the layer itself."""

import numpy as np
import pytest
import torch
from linear_examples import converted_model
from metrics import sqnr
from torch import Tensor, nn
from watch_examples import backward, tiny_model

import octavo
from octavo.nn import Experts, GroupedLinear
from octavo.observation.operands import EXPERT_ROWS
from octavo.ops import quantize, quantize_matrices
from octavo.recipe import Recipe, blockwise, mxfp8, rowwise
from octavo.watching import read_watch
from octavo.watching.rules import SampleRules
from octavo.watching.storage import FULL_SHARE

E, K, HIDDEN, TOKENS = 4, 32, 48, 64


TWO = torch.full((TOKENS, 2), 3)  # expert 1 gets no token, and expert 2 three quarters of the first slots
TWO[: 3 * TOKENS // 4, 0], TWO[3 * TOKENS // 4 :, 0] = 2, 0
ONE = torch.zeros(TOKENS, 1, dtype=torch.int64)  # expert 1 gets no token, expert 3 fewer than a brief sample reads
ONE[-EXPERT_ROWS // 2 :], ONE[:EXPERT_ROWS] = 3, 2  # of expert 2 it reads all
ONE = ONE[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))]


class Layer(nn.Module):
    """A plain layer, and experts that tokens reach by `index`."""

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts = nn.Linear(K, K), Experts(E, K, HIDDEN)
        self.index, self.weight = index, torch.rand(index.shape) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.index, self.weight)


class Halves(nn.Module):
    """A grouped layer of two matrices, of which the first has so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.layer = rows, GroupedLinear(2, K, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.tensor([self.rows, TOKENS], dtype=torch.int32))


def watched(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, recipe: str | Recipe = "rowwise"):
    """The full and the brief sample of one step, of all rows, and the layers as they ran."""
    octavo.convert(module, recipe)
    with octavo.watch(module, rows=10_000) as watch:
        module(x).backward(dy)
        watch.step()
        full, [brief] = watch.latest(), watch.take()
        return full, brief, list(watch.layers)


def record(operands: np.ndarray, number: int, operand: int) -> np.ndarray:
    (found,) = operands[(operands["layer"] == number) & (operands["operand"] == operand)]
    return found


def row(sample, layers, name, operand):
    return record(sample.operands, [layer.name for layer in layers].index(name), operand)


def test_the_records_are_those_of_the_tensors():
    module, x = Layer(TWO), torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(1))
    x[:, 0] *= 30
    dy = torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(2))
    sample, _, layers = watched(module, x.clone().requires_grad_(), dy)
    rows = torch.cat([x[module.index[:, s] == e] for e in range(E) for s in range(2)])
    found = row(sample, layers, "experts.gate_up_proj", 0)
    assert found["amax"] == rows.abs().max()
    each = [x[module.index[:, 0] == 2], x[module.index[:, 0] == 0], x[module.index[:, 1] == 3]]  # which weigh alike
    squares = [(t.square().mean(), (t - quantize(t, rowwise().x).dequantize()).square().mean()) for t in each]
    total, error = map(sum, zip(*squares, strict=True))
    assert found["sqnr"] == pytest.approx(10 * float((total / error).log10()), abs=0.01)
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
    module, x = Layer(TWO), torch.randn(TOKENS, K)
    with torch.no_grad():
        x[3 * TOKENS // 4 :] = 1e-3  # the tokens of expert 0: a row of equal numbers has no error
        x[3 * TOKENS // 4 :, 0] = 1.0  # but these are beside a large one
        module.experts.down_proj[1] = torch.where(torch.arange(HIDDEN) == 0, 1.0, 1e-5)
    sample, *_ = watched(module, x.requires_grad_(), torch.randn(TOKENS, K))
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


@pytest.mark.parametrize("recipe", [rowwise(), blockwise(), mxfp8()], ids=str)
def test_a_grouped_linear_layer_is_watched(recipe):
    module = Halves(10)
    sample, brief, layers = watched(module, torch.randn(TOKENS, K, requires_grad=True), torch.randn(TOKENS, K), recipe)
    w = module.layer.weight.detach()
    found = row(sample, layers, "layer.weight", 1)
    assert found["amax"] == w.abs().max()
    assert found["scale"] == pytest.approx(float(quantize_matrices(w, recipe.w).scale.float().max()))
    each = torch.stack([quantize(matrix, recipe.w).dequantize() for matrix in w])
    assert found["sqnr"] == pytest.approx(sqnr(w, each), abs=0.01)
    assert not brief[0]["nonfinite"].any()
    assert [layer.name for layer in layers] == ["layer.weight"]
    assert sorted(sample.operands["operand"]) == [0, 1, 2]
    assert (sample.operands["sqnr"] > 25).all()
    (experts,) = sample.experts
    assert (experts["fullest"], experts["idle"]) == (1, 0)
    assert experts["load"] == pytest.approx((TOKENS - 10) / (TOKENS / 2))


def test_a_run_has_records_of_its_experts(tmp_path):
    model = tiny_model("mixture", layers=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with octavo.watch(model, folder=tmp_path, interval=1) as watch:
        backward(model)
        optimizer.step()
        watch.step()
    found = read_watch(tmp_path)
    names = [layer.name for layer in found.layers]
    stacks = [f"layers.{i}.mlp.experts.{leaf}" for i in range(2) for leaf in ("gate_up_proj", "down_proj")]
    assert [names[record["layer"]].removeprefix("model.") for record in found.experts] == stacks
    assert (found.experts["load"] >= 1).all()
    of_stacks = np.isin(found.layer_records["layer"], found.experts["layer"])
    assert of_stacks.sum() == 4
    assert (found.layer_records["gradient_norm"][of_stacks] > 0).all()
    assert (found.layer_records["update_ratio"][of_stacks] > 0).all()
    assert model.model.layers[0].mlp.experts.observers is None


def test_experts_that_ranks_share_are_not_recorded():
    module = converted_model(Layer(TWO), "rowwise")
    del module.first
    module.experts.parallel = lambda module, x, *rest: x
    with octavo.watch(module, interval=1) as watch:
        module(torch.randn(TOKENS, K))
        watch.step()
        assert not len(watch.latest().operands)


# ---- Brief samples of experts: the numbers of each expert, against the tensors of the layer itself


INNER = 1 + 2  # the layers: a plain one, and two stacks; then the experts of the first stack, and of the second


def test_the_numbers_are_those_of_each_expert():
    module = Layer(ONE)
    x, dy = torch.randn(TOKENS, K), torch.randn(TOKENS, K)
    x[:, 0] *= 30
    mine = (module.index == 2).squeeze(1)
    x[mine, ::4] *= 1e-6  # a quarter of the elements
    _, (operands, layers), described = watched(module, x.clone().requires_grad_(), dy)
    assert [layer.experts for layer in described] == [0, E, E]
    rows = x[mine]
    found = record(operands, INNER + 2, 0)
    assert found["amax"] == pytest.approx(float(rows.abs().max()), rel=1e-6)
    q = quantize(rows, rowwise().x)
    assert found["flushed"] == pytest.approx(float((q.data.float() == 0).float().mean()), abs=1e-6)
    assert found["binades"][-1] == FULL_SHARE
    assert found["scale"] == q.scale.max()
    assert found["nonfinite"] == 0
    w = module.experts.down_proj.detach()
    for e in range(E):
        assert record(operands, INNER + E + e, 1)["amax"] == pytest.approx(float(w[e].abs().max()), rel=1e-6)
    weighted = (dy * module.weight)[mine].abs()
    assert weighted.min() < record(operands, INNER + E + 2, 2)["amax"] <= weighted.max() * (1 + 1e-6)
    assert set(layers["layer"]) == {INNER + e for e in range(E)}
    gate, up = module.experts.gate_up_proj.detach().chunk(2, 1)
    cosine = nn.functional.cosine_similarity(gate, up, dim=2).abs()
    assert layers["alignment"] == pytest.approx(cosine.mean(1).numpy(), abs=0.15)
    known = {(int(r["layer"]) - INNER, int(r["operand"])) for r in operands if r["layer"] >= INNER}
    # An expert with few tokens has numbers of its matrices alone, and there are none of the stacks as a whole.
    assert known == {(s * E + e, o) for s in range(2) for e in range(E) for o in range(3) if o == 1 or e in (0, 2)}
    assert not len(operands[np.isin(operands["layer"], (1, 2))])


def test_a_kurtosis_is_that_of_the_rows():
    module, x = Layer(ONE), torch.randn(TOKENS, K)
    x[:] = x[0]  # every row is the same, so any sample has its numbers
    _, (operands, _), _ = watched(module, x.requires_grad_(), torch.randn(TOKENS, K))
    row = x[0].detach().double()
    expected = float(row.pow(4).mean() / row.square().mean() ** 2)
    assert record(operands, INNER, 0)["kurtosis"] == pytest.approx(expected, rel=1e-3)


def test_what_is_not_finite_is_seen_in_any_row():
    module, x = Layer(ONE), torch.randn(TOKENS, K)
    x[(module.index == 0).squeeze(1).nonzero()[5]] = torch.nan
    _, (operands, layers), described = watched(module, x.requires_grad_(), torch.randn(TOKENS, K))
    assert record(operands, INNER, 0)["nonfinite"] > 0
    assert record(operands, INNER + 2, 0)["nonfinite"] == 0
    events = SampleRules(described).check(operands, layers)
    assert ("non_finite", "experts.gate_up_proj", "x", 0) in {(e.rule, e.layer, e.operand, e.expert) for e in events}


def test_two_micro_batches_are_one_sample():
    module, small, large = Halves(TOKENS // 2), torch.ones(TOKENS, K), torch.full((TOKENS, K), 5.0)
    octavo.convert(module, "rowwise")
    with octavo.watch(module, interval=100) as watch:
        for x in (large, small):
            module(x.requires_grad_()).sum().backward()
        watch.step()
        [(operands, _)] = watch.take()
    found = record(operands, 1, 0)
    assert (found["amax"], found["rms"]) == (5, pytest.approx(13**0.5))


def test_the_worst_expert_is_named_once():
    module = converted_model(Layer(ONE), "rowwise")
    with octavo.watch(module, interval=100) as watch:
        rules = SampleRules(watch.layers)
        with torch.no_grad():
            module.experts.down_proj[1, :, ::3] *= 1e-8
            module.experts.down_proj[2, :, ::2] *= 1e-8
        events = []
        for _ in range(20):
            module(torch.randn(TOKENS, K, requires_grad=True)).backward(torch.randn(TOKENS, K))
            watch.step()
            events += [event for sample in watch.take() for event in rules.check(*sample)]
    (event,) = [event for event in events if event.operand == "w"]
    assert (event.rule, event.layer, event.expert) == ("underflow", "experts.down_proj", 2)
    assert event.value == pytest.approx(0.5)


@pytest.mark.slow
def test_compiled_code_records_the_same():
    samples = []
    for compiled in (False, True):
        module = Layer(ONE)
        x = torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if compiled:
            module.compile(backend="aot_eager", fullgraph=True)
        full, (brief, _), _ = watched(module, x, torch.ones(TOKENS, K))
        samples.append((full, brief))
    (plain, plain_brief), (full, brief) = samples
    assert (plain_brief["layer"] == brief["layer"]).all()
    for name in ("amax", "kurtosis", "flushed", "shift_lost"):
        assert brief[name] == pytest.approx(plain_brief[name], rel=1e-3, nan_ok=True), name
    for name in ("amax", "sqnr", "shift_lost"):
        assert full.operands[name] == pytest.approx(plain.operands[name], rel=1e-3, nan_ok=True), name
    assert (full.experts["load"] == plain.experts["load"]).all()
