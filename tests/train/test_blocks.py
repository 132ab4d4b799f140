"""The blocks of a model: which they are, and what selective activation checkpointing saves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.nn import convert
from octavo.telemetry.schema import RECOMPUTED
from octavo.train.blocks import blocks_gathered_together, find_blocks, prepare_blocks, unit_size
from octavo.train.config import Config, ConfigError

LLAMA = LlamaConfig(vocabulary=64, layers=2, width=32, heads=2, kv_heads=1, mlp_width=96, context=16)
GPT2 = GPT2Config(vocabulary=64, layers=2, width=32, heads=2, context=16)
MIXTURE = MixtureConfig(64, 1, 32, 2, 1, 48, 16, experts=4, top_k=2)
TOKENS = torch.arange(32).view(2, 16)


def saved_and_gradients(config, table, recipe="rowwise"):
    """The elements that autograd saves for the backward pass beside weights and states of generators; the gradients."""
    torch.manual_seed(0)
    model = build(config)
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


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_each_mode_gives_the_same_gradients(config):
    none, full, selective = (
        saved_and_gradients(config, {"activation_checkpointing": {"mode": mode}})
        for mode in ("none", "full", "selective")
    )
    assert full[0] < none[0] / 2
    for _, gradients in (full, selective):
        assert all(torch.equal(a, b) for a, b in zip(gradients, none[1], strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo, which hides it
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "delayed"])
def test_compiled_blocks_recompute(recipe):
    """In every version of PyTorch: 2.11 saved all tensors of layers that Dynamo traces, as those with histories."""
    compiled = {"compile": {"blocks": True, "backend": "aot_eager_decomp_partition"}}
    saved, expected = {}, saved_and_gradients(LLAMA, {}, recipe)[1]
    for mode in ("none", "full", "selective"):
        torch._dynamo.reset()
        counters.clear()
        table = compiled | {"activation_checkpointing": {"mode": mode}}
        saved[mode], actual = saved_and_gradients(LLAMA, table, recipe)
        assert counters["stats"]["unique_graphs"] >= 1
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
    assert saved["full"] < saved["selective"] < saved["none"]
    assert saved["full"] < saved["none"] / 2


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_eager_backend_refuses_checkpointing(mode):
    """It saves the tensors of converted layers, so nothing would be gained, and the watch changes a saved buffer."""
    table = {"compile": {"blocks": True, "backend": "eager"}, "activation_checkpointing": {"mode": mode}}
    with pytest.raises(ConfigError, match=f"mode {mode} and compile.backend eager: give --compile.backend aot_eager"):
        prepare_blocks(build(LLAMA), Config.from_dict(table))
    prepare_blocks(build(LLAMA), Config.from_dict(table | {"activation_checkpointing": {"mode": "none"}}))
    prepare_blocks(build(LLAMA), Config.from_dict(table | {"compile": {"blocks": False, "backend": "eager"}}))


def test_selective_computes_fewer_gemms_again(monkeypatch):
    counts = {}
    for mode in ("none", "full", "selective"):
        torch.manual_seed(0)
        model = build(LLAMA)
        prepare_blocks(model, Config.from_dict({"activation_checkpointing": {"mode": mode}}))
        with FlopCounterMode(display=False) as counter:
            model(TOKENS).sum().backward()
        counts[mode] = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert counts["none"] < counts["selective"] < counts["full"]


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["llama", "mixture"])
def test_selective_checkpointing_is_watched(config, recipe):
    """Its modes see the operations of both passes, and refuse one that the forward pass did not run."""
    samples = []
    for mode in ("none", "selective"):
        torch.manual_seed(0)
        model = build(config)
        convert(model, recipe)
        prepare_blocks(model, Config.from_dict({"activation_checkpointing": {"mode": mode}}))
        with octavo.watch(model) as watch:
            F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
            watch.step()
            samples.append(watch.latest())
    none, selective = samples
    assert (selective.operands["flags"] & RECOMPUTED).any()
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


def test_a_pair_of_blocks_has_at_most_134_million_parameters():
    assert [unit_size(parameters) for parameters in (1, 67_108_864, 67_108_865, 10**9)] == [2, 2, 1, 1]
