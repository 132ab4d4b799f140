"""bench/gpu/loss, the model small and on the CPU: branches, their files, the processes and the result."""

import json
import logging.config
import math
import statistics
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file
from torch import nn

from bench.gpu.loss import __main__ as command
from bench.gpu.loss import result, training
from bench.gpu.loss.model import CONFIGS, METHODS, MODES, make_model, round_operands
from bench.report import loss
from bench.report.filler import HELPERS, Fields, fill
from octavo.packing.scale_search import FACTORS

pytestmark = pytest.mark.slow

CONFIG = CONFIGS["tiny"].change(warmup=1)  # as `study_of` has it
STUDY = training.Study("tiny", CONFIG)
CPU = torch.device("cpu")
TEMPLATE = Path(loss.__file__).with_name("loss.template.md")
FROZEN = "bf16,rowwise,rowwise without k_proj,x of all,w of v_proj,xw of all,xw of all by smoothing without k_proj"
PLAN = (
    "trunk; rates; branch bf16:7,8; branch twin:7; branch rowwise:7,8; branch rowwise without k_proj,x of all:7; "
    f"frozen {FROZEN}:7"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole study, of one module of Python's library as text, by `all`."""
    folder = tmp_path_factory.mktemp("loss")
    command.study_of(folder, size="tiny")
    training.prepare_text(folder, CONFIG, [logging.config.__file__])
    with pytest.raises(SystemExit) as ended:
        command.main(["all", str(folder), "--processes", "2", "--plan", PLAN])
    assert ended.value.code == 0
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return result.merge(folder, STUDY)


# --- Text ------------------------------------------------------------------------------------------------------


def test_a_file_of_which_half_the_lines_came_before_is_left_out() -> None:
    lines = [f"line {i} that is long enough to count" for i in range(8)]
    whole, half, less = (f"{chr(10).join(part)}\n" for part in (lines[:4], lines[2:6], [*lines[3:4], *lines[6:8]]))
    assert list(training.without_copies([whole, whole.upper(), whole, half, less])) == [whole, whole.upper(), less]


def test_no_order_reads_a_sequence_twice_and_all_begin_as_the_trunk() -> None:
    trunk, one, two = (training.reading_order(100, 6, 8, order) for order in (None, 7, 8))
    for rows in (trunk, one, two):
        assert sorted(rows.tolist()) == list(range(100))
        assert torch.equal(rows[:48], trunk[:48])
    assert not torch.equal(one[48:], two[48:])


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"4000 steps without a repetition take [\d,]+ tokens; the text has"):
        training.prepare_text(tmp_path, CONFIG.change(steps=4000), [__file__])


# --- Training --------------------------------------------------------------------------------------------------


def test_every_mode_takes_the_weights_of_the_trunk() -> None:
    names = {mode: [name for name, _ in make_model(mode, CONFIG, CPU)[0].named_parameters()] for mode in MODES}
    assert all(each == names["bf16"] for each in names.values())


def test_a_branch_of_bf16_without_a_change_of_order_goes_on_as_the_trunk_would(folder: Path) -> None:
    """The state of a branch is whole: the steps after it are bit for bit those of a run without a stop."""
    training_text, _ = training.texts(folder, CONFIG, CPU)
    first, last = STUDY.first, STUDY.first + 2
    order = training.reading_order(len(training_text), first, CONFIG.batch, None)
    losses = list(training.steps(training.Learner("bf16", CONFIG, CPU), training_text, order, 0, last))
    branch = training.Learner("bf16", CONFIG, CPU)
    branch.restart(load_file(folder / "trunk.safetensors"))
    assert list(training.steps(branch, training_text, order, first, last)) == losses[first:]
    assert training.rounded(losses[:first]) == json.loads((folder / "trunk.json").read_text())["losses"]


def test_a_finished_run_is_not_trained_again(folder: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in folder.glob("*.*")}
    for words in PLAN.split("; "):
        name, _, runs = words.partition(" ")
        command.main([name, str(folder), *([runs] if runs else [])])
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.*")} == files


@pytest.mark.parametrize(
    ("option", "value", "begun"), [("steps", "30", "20"), ("share", "0.1", "0.6"), ("rate", "2", "1.0")]
)
def test_another_study_than_the_folder_began_with_is_refused(folder: Path, option: str, value: str, begun: str) -> None:
    with pytest.raises(SystemExit, match=f"was begun with {begun} {option}"):
        command.main(["trunk", str(folder), f"--{option}", value])


def test_branches_leave_early_and_learn_at_a_rate_of_their_own(folder: Path, tmp_path: Path) -> None:
    """At twice the rate from the step at which they leave; the losses before it are the trunk's."""
    assert command.study_of(tmp_path, size="tiny", share=0.1, rate=2.0).first == 2
    (tmp_path / "tokens.npz").write_bytes((folder / "tokens.npz").read_bytes())
    for words in ("trunk", "branch bf16:7"):
        name, _, runs = words.partition(" ")
        command.main([name, str(tmp_path), *([runs] if runs else [])])
    trunk, whole = (json.loads((path / "trunk.json").read_text())["losses"] for path in (tmp_path, folder))
    branch = json.loads((tmp_path / "branch-bf16-7.json").read_text())
    assert trunk == whole[:2]
    assert branch["first"] == 2
    assert len(branch["losses"]) == 18
    learner = training.Learner("bf16", CONFIG, CPU)
    learner.restart(load_file(tmp_path / "trunk.safetensors"))
    rows, _ = training.texts(tmp_path, CONFIG, CPU)
    order = training.reading_order(len(rows), 2, CONFIG.batch, 7)
    assert training.rounded(list(training.steps(learner, rows, order, 2, 4, 2.0))) == branch["losses"][:2]


@pytest.mark.parametrize("batch", [2, 4])
def test_micro_batches_are_the_sequences_of_a_step(folder: Path, batch: int) -> None:
    learner = training.Learner("bf16", CONFIG.change(batch=batch, accumulate=4 // batch), CPU)
    rows, _ = training.texts(folder, CONFIG, CPU)
    found = list(training.steps(learner, rows, training.reading_order(len(rows), 0, 4, None), 0, 2))
    assert training.rounded(found) == pytest.approx(json.loads((folder / "trunk.json").read_text())["losses"][:2], 1e-3)


@pytest.mark.parametrize("model", ["gpt2", "mixture"])
def test_other_models_learn_in_fp8(model: str) -> None:
    learner = training.Learner("rowwise", CONFIG.change(model=model, mlp_width=256), CPU)
    tokens = torch.randint(CONFIG.vocabulary, (CONFIG.batch, CONFIG.context + 1), dtype=torch.int32)
    learner.gradients(tokens)  # leaves no balance of experts to the first step
    losses = [float(learner.step(index, tokens)) for index in range(5)]
    assert learner.converted > 0
    assert losses[-1] < losses[0]


def in_e4m3(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (x * (1 / scale)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@pytest.mark.parametrize("method", METHODS)
def test_operands_are_rounded_as_another_library_rounds_them(method: str) -> None:
    """The gradients of the method that trains pass straight through."""
    layer = nn.Linear(48, 32, bias=False).bfloat16().float()
    round_operands(nn.Sequential(layer), "xw", f"all by {method}" if method else "all", [])
    x = (torch.randn(64, 48) * torch.randn(48).exp()).bfloat16().float().requires_grad_()
    exact = x.detach().numpy(), layer.weight.detach().numpy()
    s = np.exp2(np.round(np.log2(np.divide(*(abs(t).max(0) for t in exact))) / 2)) if method == "smoothing" else 1
    (a, a_scale), (w, scale) = (
        (t, abs(t).max(1, keepdims=True) / np.float32(448)) for t in (exact[0] / s, exact[1] * s)
    )
    w_q = in_e4m3(w, scale)
    if method == "least squares":
        tried = np.stack([in_e4m3(w, scale * np.float32(factor)) for factor in FACTORS])
        w_q = tried[np.square(tried - w, dtype=np.float64).sum(2).argmin(0), range(32)]
    for k in range(48 if method == "error feedback" else 0):
        w_q[:, [k]] = in_e4m3(w[:, [k]] + (w - w_q)[:, :k].sum(1, keepdims=True), scale)
    x_q, w_q = torch.from_numpy(in_e4m3(a, a_scale)), torch.from_numpy(w_q)
    y = layer.train(not method)(x)
    torch.testing.assert_close(y, x_q @ w_q.T)
    if method:
        with pytest.raises(AssertionError, match="for frozen models"):
            layer.train()(x)
        return
    y.backward(dy := torch.randn(64, 32))
    torch.testing.assert_close(x.grad, dy @ w_q)
    torch.testing.assert_close(layer.weight.grad, dy.T @ x_q)


def test_what_needs_a_trunk_that_fails_fails_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.study_of(tmp_path, size="tiny")
    (tmp_path / "tokens.npz").write_bytes(b"not numpy's")
    with pytest.raises(SystemExit) as ended:
        command.main(["all", str(tmp_path), "--plan", "trunk; branch bf16:7"])
    assert ended.value.code == 2
    assert "tokens.npz" in capsys.readouterr().out


# --- The result ------------------------------------------------------------------------------------------------


def loss_of(folder: Path, mode: str, order: int, form: str) -> float:
    run = json.loads((folder / f"branch-{mode}-{order}.json").read_text())
    return statistics.fmean(statistics.fmean(each[form]) for each in run["evaluations"])


def test_the_gaps_are_computed_from_the_files(folder: Path, found: dict[str, Any]) -> None:
    assert all(row["finite"] for row in found["modes"].values())
    for form in ("bf16", "fp8"):
        gaps = [loss_of(folder, "rowwise", each, form) / loss_of(folder, "bf16", each, "bf16") - 1 for each in (7, 8)]
        row = found["modes"]["rowwise"][form]
        assert row["by_order"] == pytest.approx(gaps, abs=1e-12)
        half = scipy.stats.t.interval(0.95, 1, 0, scipy.stats.sem(gaps))[1]
        assert row["half"] == pytest.approx(half, rel=1e-6)
        assert row["steps"] == pytest.approx(row["gap"] / found["slope"])
    assert found["modes"]["twin"]["bf16"]["half"] is None  # of one order
    gaps = [loss_of(folder, "bf16", each, "fp8") / loss_of(folder, "bf16", each, "bf16") - 1 for each in (7, 8)]
    assert found["modes"]["bf16"]["fp8"]["by_order"] == pytest.approx(gaps, abs=1e-12)


def test_recipes_of_few_orders_have_one_deviation() -> None:
    groups = [[1e-3, 3e-3], [5e-3, 4e-3, 9e-3]]
    rows: list[dict[str, Any]] = [{form: {"by_order": gaps} for form in ("bf16", "fp8")} for gaps in groups]
    result.add_pooled(rows)
    variances = [statistics.variance(gaps) for gaps in groups]
    deviation = math.sqrt((variances[0] + 2 * variances[1]) / 3)
    for row, gaps in zip(rows, groups, strict=True):
        half = scipy.stats.t.ppf(0.975, 3) * deviation / math.sqrt(len(gaps))
        assert row["fp8"]["half_pooled"] == pytest.approx(half, rel=1e-6)


def test_the_bias_of_a_gradient_is_told_from_its_noise() -> None:
    """Errors of a known mean and deviation, in 64 batches."""
    g, mean, deviation, batches = torch.full((256, 64), 2.0), 0.01, 0.1, 64
    errors = mean + deviation * torch.randn(batches, 256, 64)
    sums = g * batches, g.square().sum() * batches, errors.sum(0), errors.square().sum()
    found = training.error_of(*sums, batches=batches)
    assert found["bias"] == pytest.approx((mean / 2) ** 2, rel=0.2)  # the mean of the errors alone has 2.6 times that
    assert found["noise"] == pytest.approx((deviation / 2) ** 2, rel=0.02)


def test_gradients_in_fp8_have_an_error_and_bf16_has_none(folder: Path, found: dict[str, Any]) -> None:
    command.main(["gradients", str(folder), "rowwise,bf16_rounded"])
    rows = result.merge(folder, STUDY)["gradients"]
    assert rows["bf16_rounded"]["noise"]["worst"] == 0
    assert 1e-4 < rows["rowwise"]["noise"]["median"] < 1e-1  # 40 to 10 dB


def test_frozen_weights_in_fp8_have_the_loss_of_the_branch_that_is_evaluated_in_fp8(folder, found):
    branch = json.loads((folder / "branch-bf16-7.json").read_text())["evaluations"][-1]
    frozen = {mode: json.loads((folder / f"frozen-{mode}.json").read_text())["losses"] for mode in ("bf16", "rowwise")}
    assert frozen["bf16"]["final-7"] == branch["bf16"]
    assert frozen["rowwise"]["final-7"] == branch["fp8"]
    assert found["frozen"]["bf16"]["trunk"]["gap"] == 0 != found["frozen"]["rowwise"]["trunk"]["gap"]


def test_the_operands_of_all_layers_rounded_have_the_loss_of_the_converted_model(folder, found):
    rounded, converted = (json.loads((folder / f"frozen-{mode}.json").read_text()) for mode in ("xw of all", "rowwise"))
    assert rounded["losses"]["final-7"] == pytest.approx(converted["losses"]["final-7"], rel=1e-4)
    assert rounded["converted"] == converted["converted"]
    gaps = [found["frozen"][mode]["final-7"]["gap"] for mode in FROZEN.split(",")]
    assert len(set(gaps)) == len(gaps)
    assert max(map(abs, gaps)) < 1e-3  # none is of the weights of the trunk, which were evaluated before


def test_a_gap_of_a_doubling_is_worth_twice_the_tokens() -> None:
    """Losses 3.0 by BF16 and 3.3 by the other mode, where half of the length adds 0.3 nats: 10 % is one doubling."""

    def run(loss: float) -> dict[str, Any]:
        return {"evaluations": [{"step": 9, "bf16": [loss, loss]}, {"step": 10, "bf16": [loss, loss]}]}

    gap = result.gap([(run(3.3), run(3.0))], "bf16", "bf16", {"slope": 0.01, "per_doubling": 0.3, "loss": 3.0})
    assert gap["gap"] == pytest.approx(0.1)
    assert gap["tokens"] == pytest.approx(1.0)
    assert gap["steps"] == pytest.approx(10)
    assert math.isclose(gap["text_half"], 0, abs_tol=1e-12)


def test_runs_without_bf16_have_nothing_to_be_compared_with(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must have a branch of bf16"):
        result.merge(tmp_path, STUDY)


# --- The page --------------------------------------------------------------------------------------------------


def test_every_figure_of_the_page_is_recomputed_from_the_runs(folder: Path, found: dict[str, Any]) -> None:
    """The page's tables of the models and their gaps, of this small study; each of their cells is in the runs."""
    study = found | {"machine": found["machine"] | {"gpu": "a GPU"}}
    results = {"gpu_loss_tiny": json.loads(json.dumps(study), object_hook=Fields)}
    tables = TEMPLATE.read_text().partition("## The models\n")[2].partition("## What the gaps say")[0]
    page = fill(tables, {**vars(loss), **HELPERS, **results, "results": results})
    for mode, name, orders in (("rowwise", "`rowwise`", (7, 8)), ("twin", loss.NAMES["twin"], (7,))):
        line = next(line for line in page.splitlines() if f"| {name} | {len(orders)} |" in line)
        for form, cell in zip(("bf16", "fp8"), line.split(" | ")[3:5], strict=True):
            gaps = [loss_of(folder, mode, each, form) / loss_of(folder, "bf16", each, "bf16") - 1 for each in orders]
            own = scipy.stats.t.interval(0.95, 1, 0, scipy.stats.sem(gaps))[1] if gaps[1:] else None
            half = "(one order)" if own is None else f"± {own:.3%}"  # the deviation of one recipe is its own
            assert cell == f"{statistics.fmean(gaps):+.3%} {half}"
    base = statistics.fmean(loss_of(folder, "bf16", order, "bf16") for order in (7, 8))
    assert f"| {base:.4f} |" in page
    assert all(f"| {name} | 1 |" in page for name in ("`rowwise`, `k_proj` in BF16", "`x of all`"))
