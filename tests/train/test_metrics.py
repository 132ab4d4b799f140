"""metrics.jsonl, TensorBoard's events, and the line on the terminal."""

import errno
import io
import json
import math
import os
import shutil
import sys

import pytest
from rich.console import Console

from octavo.artifact.atomic_folder import WriteError
from octavo.artifact.files import model_tensors
from octavo.train.metrics import Metrics, show_progress

WHOLE = "".join(f'{{"step": {step}, "loss": 0.5}}\n{{"step": {step}, "evaluation_loss": 0.5}}\n' for step in (1, 2, 3))


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_writes_all_that_was_promised(begin, records, tmp_path):
    trainer = begin(steps=6, log_every=2, evaluate_every=3, sample=5)
    trainer.run()
    run = trainer.run_folder.path
    keys = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds", "peak_memory", "largest_weight")
    assert [list(records(run, key)) for key in keys] == [[2, 4, 6]] * len(keys)
    assert [list(records(run, key)) for key in ("precision", "dtypes")] == [[0]] * 2
    assert records(run, "tokens") == {2: 128, 4: 256, 6: 384}
    assert [list(records(run, key)) for key in ("evaluation_loss", "sample")] == [[3, 6]] * 2
    assert all(speed > 0 for speed in records(run, "tokens_per_second").values())
    speeds = zip(records(run, "seconds").values(), records(run, "tokens_per_second").values(), strict=True)
    assert all(seconds * speed == pytest.approx(128, rel=1e-3) for seconds, speed in speeds)
    assert all(1 << 26 < peak < 1 << 36 for peak in records(run, "peak_memory").values())
    largest = max(t.abs().max().item() for t in model_tensors(trainer.model).values())
    assert records(run, "largest_weight")[6] == largest


def test_a_line_of_the_log_is_short_however_many_layers_there_are(begin):
    trainer = begin(steps=3, layers=6, recipe="rowwise")
    trainer.run()
    lines = [line for line in trainer.run_folder.metrics.read_text().splitlines() if '"loss"' in line]
    assert max(map(len, lines[1:])) < 400


@pytest.mark.parametrize(("recipe", "share"), [("rowwise", 0.6), ("bf16", 0.0)])
def test_the_log_tells_an_fp8_run_from_a_bf16_run(begin, records, recipe, share):
    trainer = begin(steps=1, warmup=0, recipe=recipe, skip=("*.down_proj",))
    trainer.run()
    found = records(trainer.run_folder.path, "precision")[0]
    (layers,) = [entry["layers"] for entry in found["recipes"].values()]
    assert list(found["recipes"]) == [recipe]
    assert len(layers) == 12
    assert not [name for name in layers if "down_proj" in name or "lm_head" in name]
    backends = {found["recipes"][recipe][gemm] for gemm in ("y", "dx", "dw")}
    assert backends == ({"bf16"} if recipe == "bf16" else {"emulated"})
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    in_fp8 = sum(size for name, size in sizes.items() if name.removesuffix(".weight") in layers)
    assert found["fp8_share"] == (pytest.approx(in_fp8 / sum(sizes.values()), abs=1e-6) if share else 0)
    assert found["fp8_share"] + sum(found["high_precision"].values()) == pytest.approx(1, abs=1e-5)
    assert "model.layers.*.mlp.down_proj.weight" in found["high_precision"]


def test_gradient_norm_is_that_of_all_gradients_before_clipping(begin, records):
    trainer = begin(steps=3, clip=0.1, accumulate=2)
    squares = {}

    def note(name):
        def add(p):
            squares[name] = float(p.grad.double().square().sum())  # the last micro-batch leaves the whole

        return add

    for name, p in trainer.model.named_parameters():
        p.register_post_accumulate_grad_hook(note(name))
    required = []
    step = trainer.step
    trainer.step = lambda: (step(), required.append(math.sqrt(sum(squares.values()))))[0]
    trainer.run()
    assert list(records(trainer.run_folder.path, "gradient_norm").values()) == pytest.approx(required, rel=1e-5)
    assert min(required) > 0.2


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(WHOLE)
    with Metrics(path, resumed_at=2) as metrics:
        metrics.write(3, loss=0.25)
    assert steps(path) == [1, 1, 2, 2, 3]
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 3, "loss": 0.25}


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path, cut):
    """Wherever it was cut, just before its end of line included."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(WHOLE[:-cut])
    with Metrics(path, resumed_at=3) as metrics:
        metrics.write(4, loss=0.25)
    found = steps(path)
    assert found[-1] == 4
    assert found[:-1] == [1, 1, 2, 2, 3, 3][: WHOLE[:-cut].count("\n")]


def test_a_new_run_starts_from_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(WHOLE)
    with Metrics(path, resumed_at=0):
        pass
    assert path.read_text() == ""


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_null(tmp_path, value):
    """JSON has no word for it, and a reader other than Python's stops there."""
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, resumed_at=0) as metrics:
        metrics.write(1, gradient_norm=value, loss=1.5)
    assert path.read_text() == '{"step": 1, "gradient_norm": null, "loss": 1.5}\n'


def test_progress_is_one_line_however_narrow_the_terminal():
    out = io.StringIO()
    record = {
        "loss": 1.23456, "learning_rate": 1e-3, "gradient_norm": 0.5, "tokens_per_second": 12345.6,
        "loss_scale": 65536.0,
    }  # fmt: skip
    show_progress(Console(file=out, width=40), 7, 1000, record, 3725.4)
    line = out.getvalue()
    assert line.count("\n") == 1
    for part in (
        "step    7/1000", "loss 1.2346", "lr 1.00e-03", "grad norm 0.50", "12,346 tokens/s", "loss scale 65536",
        "1:02:05",
    ):  # fmt: skip
        assert part in line


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_reads_the_events(begin, go_on, records):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = begin(tensorboard=True, steps=6, recipe="delayed")
    trainer.run()
    run = trainer.run_folder.path
    shutil.rmtree(trainer.run_folder.checkpoint(6))  # as if it had been killed before it saved that
    go_on(run).run()
    events = event_accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("loss", "learning_rate", "gradient_norm", "evaluation_loss"):
        found, required = [(event.step, event.value) for event in events.Scalars(name)], records(run, name)
        assert [step for step, _ in found] == list(required)
        assert [value for _, value in found] == pytest.approx(list(required.values()))
    assert list(records(run)) == [1, 2, 3, 4, 5, 6]
    weight = "model.layers.0.mlp.up_proj.weight"
    found = {e.step: e.value for e in events.Scalars(f"weights/{weight}/largest")}
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found[6] == pytest.approx(trainer.model.get_parameter(weight).abs().max().item())
    scales = events.Scalars("scales/model.layers.0.mlp.up_proj.histories.w")
    assert scales[-1].step == 6
    assert 0 < scales[-1].value < 1


def test_without_tensorboard_the_error_names_the_extra_and_nothing_is_written(begin, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[tensorboard\]"'):
        begin(tensorboard=True)
    assert list(tmp_path.iterdir()) == []


class FullDisk(io.StringIO):
    name = "run/metrics.jsonl"

    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_record_that_cannot_be_written_says_why(tmp_path, monkeypatch):
    with Metrics(tmp_path / "metrics.jsonl", resumed_at=0) as metrics:
        with monkeypatch.context() as patch:
            patch.setattr(metrics, "_file", FullDisk())
            with pytest.raises(WriteError, match=r"could not write run/metrics.jsonl: the disk is full .*: make room"):
                metrics.write(1, loss=1.0)
        metrics.write(1, loss=0.5)
    assert steps(tmp_path / "metrics.jsonl") == [1]
