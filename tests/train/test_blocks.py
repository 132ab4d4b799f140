"""The blocks of a model and what runs in them: checkpointing, FP8 attention, experts, the margin of `delayed`."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from metrics import sqnr
from tiny_models import with_slow
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from watch_examples import backward, tiny_model

import octavo
from octavo.models import LlamaConfig, build
from octavo.nn import convert
from octavo.nn.attention_layers import GradientScales
from octavo.numerics import History
from octavo.packing import pack
from octavo.recipe import PRESETS, delayed
from octavo.train.config import Config, ConfigError
from octavo.train.model import blocks_gathered_together, convert_model, find_blocks, make_model, prepare_blocks
from octavo.train.step_metrics import precision_of
from octavo.watching.storage import OPERANDS, RECOMPUTED, read_watch

LLAMA = LlamaConfig(vocabulary=64, layers=2, width=32, heads=2, kv_heads=1, mlp_width=96, context=16)
TOKENS = torch.arange(32).view(2, 16)


def saved_and_gradients(table, recipe):
    """The elements that autograd saves for the backward pass beside weights and states of generators; the gradients."""
    torch.manual_seed(0)
    model = build(LLAMA)
    convert(model, recipe)
    prepare_blocks(model, Config.from_dict(table))
    weights = {p.data_ptr() for p in model.parameters()}
    sizes = []

    def save(x):
        if x.data_ptr() not in weights and x.dtype != torch.uint8:
            sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
    loss.backward()
    return sum(sizes), [p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "delayed"])
def test_compiled_blocks_recompute(recipe):
    """In every version of PyTorch: 2.11 saved all tensors of layers that Dynamo traces, as those with histories."""
    compiled = {"compile": {"blocks": True, "backend": "aot_eager_decomp_partition"}}
    saved, expected = {}, saved_and_gradients({}, recipe)[1]
    for mode in ("none", "full", "selective"):
        torch._dynamo.reset()
        counters.clear()
        table = compiled | {"activation_checkpointing": {"mode": mode}}
        saved[mode], actual = saved_and_gradients(table, recipe)
        assert counters["stats"]["unique_graphs"] >= 1
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
    assert saved["full"] < saved["selective"] < saved["none"]
    assert saved["full"] < saved["none"] / 2


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_eager_backend_refuses_checkpointing_and_an_unknown_one_all(mode):
    """It saves the tensors of converted layers, so nothing would be gained, and the watch changes a saved buffer."""
    table = {"compile": {"blocks": True, "backend": "eager"}, "activation_checkpointing": {"mode": mode}}
    with pytest.raises(ConfigError, match=f"mode {mode} requires .*; got compile.backend eager: give --compile"):
        prepare_blocks(build(LLAMA), Config.from_dict(table))
    prepare_blocks(build(LLAMA), Config.from_dict(table | {"activation_checkpointing": {"mode": "none"}}))
    prepare_blocks(build(LLAMA), Config.from_dict(table | {"compile": {"blocks": False, "backend": "eager"}}))
    with pytest.raises(ConfigError, match="compile.backend must be one of .*inductor.*; got 'nope'"):
        prepare_blocks(build(LLAMA), Config.from_dict({"compile": {"blocks": True, "backend": "nope"}}))


def test_selective_computes_fewer_gemms_again_and_full_saves_the_inputs_of_blocks():
    counts = {}
    for mode in ("none", "full", "selective"):
        torch.manual_seed(0)
        model = build(LLAMA)
        prepare_blocks(model, Config.from_dict({"activation_checkpointing": {"mode": mode}}))
        with FlopCounterMode(display=False) as counter:
            model(TOKENS).sum().backward()
        counts[mode] = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert counts["none"] < counts["selective"] < counts["full"]
    plain, full = (saved_and_gradients({"activation_checkpointing": {"mode": m}}, "bf16")[0] for m in ("none", "full"))
    assert full < plain / 2.5


def test_selective_checkpoints_each_block_whose_mlp_is_not_fused():
    """Adapters in float16 run in no pass of an MLP."""
    for adapters in ({}, {"model": "./folder", "lora": 4, "precision": "fp16"}):
        model = build(LLAMA)
        convert(model, skip=["model.layers.0.mlp.*"])
        prepare_blocks(model, Config.from_dict(adapters | {"activation_checkpointing": {"mode": "selective"}}))
        assert [hasattr(b, "activation_checkpointing") for b in find_blocks(model)] == [True, bool(adapters)]


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("name", ["llama", "mixture"])
def test_selective_checkpointing_is_watched(name, recipe):
    """Its modes see the operations of both passes, and refuse one that the forward pass did not run."""
    samples = []
    for mode in ("none", "selective"):
        model = tiny_model(name, recipe)
        prepare_blocks(model, Config.from_dict({"activation_checkpointing": {"mode": mode}}))
        with octavo.watch(model) as watch:
            backward(model)
            watch.step()
            samples.append(watch.latest())
    none, selective = samples
    assert (selective.operands["flags"] & RECOMPUTED).any() == (recipe == "bf16")  # fused MLPs record nothing twice
    assert not (none.operands["flags"] & RECOMPUTED).any()
    for name in set(none.operands.dtype.names) - {"flags"}:
        assert none.operands[name].tobytes() == selective.operands[name].tobytes(), name
    assert none.experts.tobytes() == selective.experts.tobytes()


def test_blocks_are_the_list_with_the_most_parameters():
    model = build(LLAMA)
    assert find_blocks(model) is model.model.layers
    small = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    assert find_blocks(nn.ModuleDict({"small": small, "model": model})) is model.model.layers
    with pytest.raises(ConfigError, match="Sequential must have a list of equal blocks"):
        find_blocks(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(("width", "layers", "expected"), [(32, 5, [2, 2, 1]), (4096, 3, [1, 1, 1])])
def test_two_small_blocks_are_gathered_together(width, layers, expected):
    with torch.device("meta"):
        sizes = {"heads": 4, "kv_heads": 4, "mlp_width": 3 * width, "context": 16}
        model = build(LlamaConfig(vocabulary=64, layers=layers, width=width, **sizes))
    units = blocks_gathered_together(model)
    assert [len(unit) for unit in units] == expected
    assert [block for unit in units for block in unit] == list(model.model.layers)


# ---- Runs whose attention is in E4M3, or a small mixture in FP8: the loss falls as in BF16


FP8 = {"attention": {"precision": "fp8", "shortest": 32}}
SPARSE = {"model": "mixture", "mlp_width": 48, "steps": 24, "experts": {"count": 4, "top_k": 2, "balance": 0.01}}


@pytest.mark.parametrize(
    ("chosen", "in_fp8"),
    [({}, FP8), *with_slow([({"model": "gpt2"}, FP8), (SPARSE, {"recipe": "rowwise"})], ())],
    ids=["llama", "gpt2", "mixture"],
)
def test_the_loss_falls_as_in_bf16(begin, records, tmp_path, chosen, in_fp8):
    found = []
    for name, table in (("bf16", {}), ("fp8", in_fp8)):
        trainer = begin(**{"steps": 24, "recipe": "bf16", "out": str(tmp_path / name)} | chosen | table)
        trainer.run()
        found.append(list(records(tmp_path / name).values()))
        scales = [m.amax for m in trainer.model.modules() if isinstance(m, GradientScales)]
        assert len(scales) == (2 if table == FP8 else 0)
        assert all((amax > 0).all() for amax in scales)
    bf16, fp8 = found
    assert bf16 != fp8
    assert fp8[-1] == pytest.approx(bf16[-1], abs=0.1)
    assert max(each[-1] - each[0] for each in found) < -1.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": {"precision": "fp8"}}, "lower attention.shortest"),
        ({**FP8, "dropout": 0.1}, "attention.precision fp8 requires no dropout; got dropout 0.1"),
    ],
)
def test_a_run_in_which_no_sequence_would_attend_in_fp8_is_refused(begin, changes, words):
    with pytest.raises(ConfigError, match=words):
        begin(**changes)


def test_a_context_that_cudnn_does_not_take_is_refused_on_a_gpu(settings, monkeypatch):
    for module in ("conversion", "attention_layers"):
        monkeypatch.setattr(f"octavo.nn.{module}.choose_device", torch.device)
    config = settings(**FP8, context=200)
    model = make_model(config, 256, Path())
    with pytest.raises(ConfigError, match="a multiple of 128; got 200"):
        convert_model(model, config.change(recipe="bf16"), torch.device("cuda"))


# ---- The small mixture: other settings compute the same, and its runs are packed


@pytest.fixture
def losses(begin, records, tmp_path):
    """losses(name, **settings): those of a run of a mixture."""

    def run(name, **settings):
        begin(**SPARSE | settings, out=str(tmp_path / name)).run()
        return list(records(tmp_path / name).values())

    return run


EAGER = [
    {"activation_checkpointing": {"mode": "full"}},
    {"loss": {"logits": "chunked", "chunk": 16}},
    {"accumulate": 2, "batch": 1},
]
COMPILED = [{"compile": {"blocks": True, "backend": "aot_eager"}}]


@pytest.mark.parametrize("tables", [EAGER, pytest.param(COMPILED, marks=pytest.mark.slow)])
def test_settings_that_compute_the_same(losses, tables):
    expected = losses("plain", steps=4)
    for number, changes in enumerate(tables):
        assert losses(f"{number}", steps=4, **changes) == pytest.approx(expected, abs=0.02), changes


def test_the_loss_that_spreads_tokens_has_a_gradient_and_no_value(losses):
    one, other = (losses(str(factor), steps=3, experts={"balance": factor}) for factor in (0.0, 1.0))
    assert one[0] == other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("shared", [32, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.* is an expert in FP8")
def test_a_run_is_packed_and_opened(begin, tmp_path, shared):
    trainer = begin(**(SPARSE | {"steps": 4, "experts": {"count": 4, "shared_width": shared}}))
    trainer.run()
    found = precision_of(trainer.model, torch.device("cpu"))
    assert found["fp8_share"] > 0.5
    assert not [name for name in found["high_precision"] if "experts." in name]
    report = pack(trainer.run_folder.path, tmp_path / "packed", experts=True)
    assert sum(".experts." in name for name in report.packed) == 2 * 4 * 3
    model = octavo.load(tmp_path / "packed")
    ids = torch.randint(256, (1, 12))
    with torch.no_grad():
        exact, found = trainer.state.model.eval()(ids), model(ids).logits
    assert sqnr(exact, found) > 15
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 16)


# ---- The margin of `delayed` in a small run: x and w do not saturate, and dy hardly does (docs/decisions.md)


def saturated(trainer):
    """The mean share of the elements that saturate in a run of which each step is watched, by operand."""
    trainer.run()
    found = read_watch(trainer.run_folder.path).operands
    return {name: found["saturated"][found["operand"] == i].mean() for i, name in enumerate(OPERANDS)}


@pytest.mark.slow
def test_the_default_margin_keeps_inputs_and_weights_from_saturating(begin, monkeypatch, tmp_path):
    every = {"steps": 40, "learning_rate": 3e-3, "watch": {"interval": 1}}
    with_margin = saturated(begin(recipe="delayed", **every))
    assert (with_margin["x"], with_margin["w"]) == (0, 0)
    assert with_margin["dy"] < 1e-4
    monkeypatch.setitem(PRESETS, "no_margin", lambda: delayed(history=History(margin=0.0)))
    without = saturated(begin(recipe="no_margin", out=str(tmp_path / "other"), **every))
    assert without["w"] > 1e-5
    assert without["x"] > 1e-5
    assert without["dy"] > 5 * with_margin["dy"]
