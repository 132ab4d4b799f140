"""metrics.jsonl, TensorBoard's events, and the line on the terminal."""

import errno
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from patience import HANG, wait_for
from ranks import run_ranks
from rich.console import Console
from tiny_models import MODELS, SIZES, built
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.checkpoint.files import ArtifactError, model_tensors
from octavo.checkpoint.folder import RunFolder, WriteError
from octavo.rates.measured import known_gpus, peak_flops
from octavo.train.processes import LastingStream, LiveConsole, print_line, show, training_console
from octavo.train.run_records import read_records
from octavo.train.step_metrics import Metrics, flops_per_token, largest_weights, mfu, observed_dtypes, show_progress
from octavo.watching import read_watch

WHOLE = "".join(f'{{"step": {step}, "loss": 0.5}}\n{{"step": {step}, "evaluation_loss": 0.5}}\n' for step in (1, 2, 3))


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("precision", "linear"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_a_run_writes_all_that_was_promised(begin, records, recipe, precision, linear):
    every = {"steps": 6, "log_every": 2, "evaluate_every": 3, "sample": 5}
    trainer = begin(**every, recipe=recipe, precision=precision, skip=("*.down_proj",))
    trainer.run()
    run = trainer.run_folder.path
    keys = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds", "peak_memory", "largest_weight")
    assert [list(records(run, key)) for key in keys] == [[2, 4, 6]] * len(keys)
    assert records(run, "tokens") == {2: 128, 4: 256, 6: 384}
    assert [list(records(run, key)) for key in ("evaluation_loss", "sample")] == [[3, 6]] * 2
    assert all(speed > 0 for speed in records(run, "tokens_per_second").values())
    speeds = zip(records(run, "seconds").values(), records(run, "tokens_per_second").values(), strict=True)
    assert all(seconds * speed == pytest.approx(128, rel=1e-3) for seconds, speed in speeds)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert all(1 << 26 < peak < machine for peak in records(run, "peak_memory").values())
    largest = max(t.abs().max().item() for t in model_tensors(trainer.model).values())
    assert records(run, "largest_weight")[6] == largest

    block = "model.layers.*."
    kept = ["model.embed_tokens", "model.norm", f"{block}input_layernorm", f"{block}post_attention_layernorm"]
    linears = [f"{block}self_attn.{p}_proj" for p in "qkvo"] + [f"{block}mlp.{p}_proj" for p in ("gate", "up", "down")]
    expected = dict.fromkeys([*kept, "loss"], "float32") | dict.fromkeys([*linears, "lm_head"], linear)
    assert records(run, "dtypes") == {0: expected}

    [found] = records(run, "precision").values()
    (layers,) = [entry["layers"] for entry in found["recipes"].values()]
    assert list(found["recipes"]) == [recipe]
    assert len(layers) == 12
    assert not [name for name in layers if "down_proj" in name or "lm_head" in name]
    backends = {found["recipes"][recipe][gemm] for gemm in ("y", "dx", "dw")}
    assert backends == ({"bf16"} if recipe == "bf16" else {"emulated"})
    sizes = {name: p.numel() for name, p in trainer.model.named_parameters()}
    in_fp8 = sum(size for name, size in sizes.items() if name.removesuffix(".weight") in layers and recipe != "bf16")
    assert found["fp8_share"] == pytest.approx(in_fp8 / sum(sizes.values()), abs=1e-6)
    assert found["fp8_share"] + sum(found["high_precision"].values()) == pytest.approx(1, abs=1e-5)
    assert "model.layers.*.mlp.down_proj.weight" in found["high_precision"]


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ('{"step": "x"}', "step must be a whole number, got 'x'"),
        ('{"step": true}', "step must be a whole number, got True"),
        ('{"step": 1, "loss": []}', "loss must be a number or null, got []"),
        *((damage, "") for damage in ("{}", "[]", "{", "")),
    ],
)
def test_a_damaged_line_is_named_and_nothing_after_it_is_lost(tmp_path, damage, message):
    path = tmp_path / "metrics.jsonl"
    first, *rest = WHOLE.splitlines(keepends=True)
    path.write_text(first + damage + "\n" + "".join(rest))
    before = path.read_text()
    for read in (lambda: Metrics(path, resumed_at=3), lambda: read_records(path)):
        with pytest.raises(ArtifactError, match=rf"metrics.jsonl, line 2.*{re.escape(message)}"):
            read()
    assert path.read_text() == before


def test_a_terminal_has_a_live_line_and_a_file_has_lines():
    record = {"loss": 2.34567, "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens_per_second": 1234.5}
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    live, file = LiveConsole(terminal), Console(file=io.StringIO())
    for console in (live, file):
        with live.bar:
            show(console, "training", 6, 1000)
            show_progress(console, 7, 1000, record, 60)
            live.bar.refresh()
    assert all(part in live.file.getvalue() for part in ("7/1000", "loss 2.3457", "1,234 tokens/s"))
    assert file.file.getvalue().count("\n") == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_a_resumed_run_is_watched_and_tensorboard_reads_the_events(begin, go_on, records):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = begin(tensorboard=True, steps=6, recipe="delayed", watch={"interval": 2})
    trainer.run()
    run = trainer.run_folder.path
    shutil.rmtree(trainer.run_folder.checkpoint(6))  # as if it had been killed before it saved that
    go_on(run).run()
    watched = read_watch(run)
    assert np.unique(watched.operands["step"]).tolist() == [1, 2, 4, 5, 6]
    assert trainer.watch is None
    gemms = next(layer for layer in watched.layers if layer.recipe).gemms
    assert {name: gemm.precision for name, gemm in gemms.items()} == dict.fromkeys(("y", "dx", "dw"), "fp8")
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
    name = "watch/model.layers.0.mlp.down_proj"
    assert [event.step for event in events.Scalars(f"{name}/x/sqnr")] == [1, 2, 4, 5, 6]
    assert events.Scalars(f"{name}/gradient_norm")[0].value > 0
    assert events.Histograms(f"{name}/gradient/log2")[0].histogram_value.num == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(("board", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_without_a_board_the_error_names_the_extra_and_nothing_is_written(begin, monkeypatch, tmp_path, board, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'pip install "\.\[{board}\]"'):
        begin(**{board: True})
    assert list(tmp_path.iterdir()) == []


class Refusing(io.StringIO):
    name = "run/metrics.jsonl"

    def __init__(self, number):
        super().__init__()
        self.number = number

    def flush(self):
        raise OSError(self.number, os.strerror(self.number))


def test_a_record_that_cannot_be_written_says_why(tmp_path, monkeypatch):
    with Metrics(tmp_path / "metrics.jsonl", resumed_at=0) as metrics:
        with monkeypatch.context() as patch:
            patch.setattr(metrics, "_file", Refusing(errno.ENOSPC))
            with pytest.raises(WriteError, match=r"could not write run/metrics.jsonl: the disk is full .*: make room"):
                metrics.write(1, loss=1.0)
        metrics.write(1, loss=0.5)
    assert steps(tmp_path / "metrics.jsonl") == [1]


@pytest.mark.parametrize("name", ["llama", "deepseekv3"])
def test_flops_agree_with_those_that_torch_counts(name):
    """Of the matrices: forward 2 N, backward 4 N. Of the products of queries, keys and values: in a DeepSeek without
    experts too, whose heads have two widths."""
    architecture, settings = MODELS[name]
    cls = getattr(transformers, architecture)
    sizes = {"first_k_dense_replace": 2, "attn_implementation": "eager", "tie_word_embeddings": name == "llama"}
    model = cls(cls.config_class(**SIZES | settings | sizes))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    assert flops_per_token(model, 0) * tokens.numel() == counted[torch.ops.aten.mm]
    assert (flops_per_token(model, 16) - flops_per_token(model, 0)) * tokens.numel() == counted[torch.ops.aten.bmm]


@pytest.mark.parametrize("scheme", ["channel", "mx"])
def test_the_scales_of_a_packed_model_are_no_weights_and_stacked_experts_have_no_known_flops(made, scheme):
    """Those of MX have one byte too. Frozen weights have no gradient: 4 FLOPs each in place of 6."""
    model = built("llama").requires_grad_(False)
    assert flops_per_token(octavo.load(made("llama", scheme=scheme)), 16) == flops_per_token(model, 16)
    model.experts = nn.Parameter(torch.zeros(4, 8, 8))
    assert flops_per_token(model, 16) is None


def test_utilization_and_peaks_by_the_names_that_torch_gives(monkeypatch):
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4")
    assert [peak_flops(name) / 1e12 for name in names] == [989.4, 756.5, 989.4, 312, 121]
    assert peak_flops("NVIDIA L40S") == 362.05e12
    assert peak_flops("Tesla T4") is None
    for key, gpu in known_gpus().items():
        assert peak_flops({"h100": "NVIDIA H100 80GB HBM3"}.get(key, gpu.name)) == gpu.bf16
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = torch.device("cuda")
    assert mfu(6e9, 10_000, gpu) == pytest.approx(6e13 / 989.4e12)
    assert mfu(None, 10_000, gpu) is None
    assert mfu(6e9, 10_000, torch.device("cpu")) is None


# --- A run goes on, and saves, when nobody reads its output any more


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_stream_that_cannot_be_written_is_said_once(number, capsys):
    console = Console(file=LastingStream(Refusing(number)))
    for _ in range(3):
        console.print("a line")
    (notice,) = capsys.readouterr().err.splitlines()
    assert os.strerror(number) in notice
    assert "metrics.jsonl" in notice


def test_a_stream_gets_every_line_with_nothing_that_a_terminal_obeys_and_none_gets_nothing(capsys, monkeypatch):
    for text in ("one", "two"):
        training_console().print(text)
    assert capsys.readouterr() == ("one\ntwo\n", "")
    print_line(training_console(), "a\x1b[2J\rb\nc")
    assert capsys.readouterr().out == "a\ufffd[2J\ufffdb\nc\n"
    monkeypatch.setattr("sys.stdout", None)
    training_console().print("a line")


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
def test_a_run_whose_reader_ends_goes_on_and_a_signal_still_saves(spawn, tmp_path):
    """As `octavo train 2>&1 | head -1` does, and ssh when its connection ends."""
    run = RunFolder(tmp_path / "run")
    settings = {"recipe": "bf16", "steps": 100_000, "evaluate_every": 100_000, "save_every": 100_000}
    process = spawn(**settings, stderr=subprocess.STDOUT)
    assert process.stdout.readline()
    process.stdout.close()
    wait_for(process, lambda: run.metrics.exists() and run.metrics.read_bytes().count(b'"loss"') > 20)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=HANG) == 0
    assert len(run.checkpoints()) == 1


# ---- Which dtypes are met, and how far the weights reach


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16)])
        self.outputs_a_tuple = nn.GRU(2, 2)

    def forward(self, x):
        x = self.stack[1](self.stack[0](x).bfloat16()).float()
        return self.outputs_a_tuple(x)[0].sum()


def test_layers_that_differ_are_named_together():
    model = Mixed()
    found = observed_dtypes(model, lambda: model(torch.ones(1, 2)))
    assert found == {"stack.*": "bfloat16 float32", "outputs_a_tuple": "float32", "loss": "float32"}


def model_of_ranks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def look(rank):
    mesh = init_device_mesh("cpu", (2,))
    x, whole = torch.ones(3, 5), model_of_ranks()
    sharded = model_of_ranks()
    fully_shard(sharded, mesh=mesh)
    assert largest_weights(sharded) == largest_weights(whole)
    assert observed_dtypes(sharded, lambda: sharded(x).sum()) == observed_dtypes(whole, lambda: whole(x).sum())
    placed = model_of_ranks()
    for module, placement in ((placed[0], Shard(1)), (placed[2], Replicate())):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [placement]))
    assert largest_weights(placed) == largest_weights(whole)
    placed[0].weight.to_local().data.fill_(math.nan if rank else 1.0)  # which the first rank does not see
    assert math.isnan(largest_weights(placed)["0.weight"])


@pytest.mark.slow
def test_the_instruments_see_the_whole_of_a_sharded_model():
    run_ranks(2, look)
