"""Brief samples of experts: the numbers of each expert, against the tensors of the layer itself."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.nn import Experts, GroupedLinear
from octavo.observation.expert_samples import ROWS
from octavo.ops import quantize
from octavo.recipe import rowwise
from octavo.telemetry.rules import SampleRules
from octavo.telemetry.schema import FULL_SHARE

E, K, HIDDEN, TOKENS = 4, 32, 48, 6 * ROWS
INNER = 1 + 2  # the layers: a plain one, and two stacks; then the experts of the first stack, and of the second


class Layer(nn.Module):
    """A plain layer and experts: of E experts, expert 1 gets no token, expert 3 fewer than are sampled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts = nn.Linear(K, K), Experts(E, K, HIDDEN)
        index = torch.zeros(TOKENS, 1, dtype=torch.int64)
        index[-ROWS // 2 :] = 3
        index[: 2 * ROWS] = 2
        self.index, self.weight = index[torch.randperm(TOKENS)], torch.rand(TOKENS, 1) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, self.index, self.weight)
        return y


def brief(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[np.ndarray, np.ndarray, list]:
    octavo.convert(module, "rowwise")
    with octavo.watch(module, interval=100) as watch:
        module(x).backward(dy)
        watch.step()
        [(operands, layers)] = watch.take()
        return operands, layers, list(watch.layers)


def record(operands: np.ndarray, number: int, operand: int) -> np.ndarray:
    (found,) = operands[(operands["layer"] == number) & (operands["operand"] == operand)]
    return found


def test_the_numbers_are_those_of_each_expert():
    module = Layer()
    x, dy = torch.randn(TOKENS, K), torch.randn(TOKENS, K)
    x[:, 0] *= 30
    mine = (module.index == 2).squeeze(1)
    x[mine, ::4] *= 1e-6  # a quarter of the elements
    operands, layers, watched = brief(module, x.clone().requires_grad_(), dy)
    assert [layer.experts for layer in watched] == [0, E, E]
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


def test_an_expert_with_few_tokens_has_numbers_of_its_matrices_alone():
    operands, _, _ = brief(Layer(), torch.randn(TOKENS, K, requires_grad=True), torch.randn(TOKENS, K))
    known = {(int(r["layer"]) - INNER, int(r["operand"])) for r in operands if r["layer"] >= INNER}
    expected = {(s * E + e, o) for s in range(2) for e in range(E) for o in range(3) if o == 1 or e in (0, 2)}
    assert known == expected
    assert not len(operands[np.isin(operands["layer"], (1, 2))])  # the stacks as a whole


def test_a_kurtosis_is_that_of_the_rows():
    module, x = Layer(), torch.randn(TOKENS, K)
    x[:] = x[0]  # every row is the same, so any sample has its numbers
    operands, _, _ = brief(module, x.requires_grad_(), torch.randn(TOKENS, K))
    row = x[0].detach().double()
    expected = float(row.pow(4).mean() / row.square().mean() ** 2)
    assert record(operands, INNER, 0)["kurtosis"] == pytest.approx(expected, rel=1e-3)


def test_what_is_not_finite_is_seen_in_any_row():
    module, x = Layer(), torch.randn(TOKENS, K)
    x[(module.index == 0).squeeze(1).nonzero()[5]] = torch.nan
    operands, layers, watched = brief(module, x.requires_grad_(), torch.randn(TOKENS, K))
    assert record(operands, INNER, 0)["nonfinite"] > 0
    assert record(operands, INNER + 2, 0)["nonfinite"] == 0
    events = SampleRules(watched).check(operands, layers)
    assert ("non_finite", "experts.gate_up_proj", "x", 0) in {(e.rule, e.layer, e.operand, e.expert) for e in events}


def test_two_micro_batches_are_one_sample():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = GroupedLinear(2, K, K)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x, torch.tensor([TOKENS // 2, TOKENS], dtype=torch.int32))
            return y

    module, small, large = Halves(), torch.ones(TOKENS, K), torch.full((TOKENS, K), 5.0)
    octavo.convert(module, "rowwise")
    with octavo.watch(module, interval=100) as watch:
        for x in (large, small):
            module(x.requires_grad_()).sum().backward()
        watch.step()
        [(operands, _)] = watch.take()
    found = record(operands, 1, 0)
    assert (found["amax"], found["rms"]) == (5, pytest.approx(13**0.5))


def test_the_worst_expert_is_named_once():
    module = Layer()
    octavo.convert(module, "rowwise")
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
    assert event.describe().startswith("underflow: experts.down_proj: expert 2: 50.0% of w underflows")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_code_records_the_same():
    samples = []
    for compiled in (False, True):
        module, x = Layer(), torch.randn(TOKENS, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if compiled:
            module.compile(backend="aot_eager", fullgraph=True)
        samples.append(brief(module, x, torch.ones(TOKENS, K))[0])
    assert (samples[0]["layer"] == samples[1]["layer"]).all()
    for name in ("amax", "kurtosis", "flushed", "shift_lost"):
        assert samples[1][name] == pytest.approx(samples[0][name], rel=1e-3, nan_ok=True), name
