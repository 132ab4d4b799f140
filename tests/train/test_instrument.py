"""Which dtypes are met, and how far the weights reach."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from octavo.train.instrument import observed_dtypes, weight_ranges


@pytest.mark.parametrize(("precision", "linear"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_dtypes_of_a_run(begin, records, precision, linear, recipe):
    trainer = begin(recipe=recipe, precision=precision, steps=1, warmup=0)
    trainer.run()
    dtypes = records(trainer.run_folder.path, "dtypes")[0]
    block = "model.layers.*."
    kept = ["model.embed_tokens", "model.norm", f"{block}input_layernorm", f"{block}post_attention_layernorm"]
    attention = [f"{block}self_attn.{p}_proj" for p in "qkvo"]
    mlp = [f"{block}mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert dtypes == dict.fromkeys([*kept, "loss"], "float32") | dict.fromkeys([*attention, *mlp, "lm_head"], linear)


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
    assert found == {"stack.*": "bfloat16 float32", "loss": "float32"}


def test_hooks_are_gone_afterwards_even_after_an_error():
    model = Mixed()

    def fails():
        model(torch.ones(1, 2))
        raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        observed_dtypes(model, fails)
    assert not any(module._forward_hooks for module in model.modules())


def test_weight_ranges_are_the_extremes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3).to(torch.bfloat16))
    expected = {}
    for name, p in model.named_parameters():
        numbers = [float(element) for element in p.detach().flatten()]
        expected[name] = (min(numbers), max(numbers))
    assert weight_ranges(model) == expected


def model_of_ranks():
    """A model of which one parameter has fewer rows than there are ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def look(rank, store):
    """Compare the instruments on a sharded model with those on the whole one; an exception fails the test."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(0, 60))
    mesh = init_device_mesh("cpu", (2,))
    x, whole = torch.ones(3, 5), model_of_ranks()
    sharded = model_of_ranks()
    fully_shard(sharded, mesh=mesh)
    assert weight_ranges(sharded) == weight_ranges(whole)
    assert observed_dtypes(sharded, lambda: sharded(x).sum()) == observed_dtypes(whole, lambda: whole(x).sum())
    placed = model_of_ranks()
    for module, placement in ((placed[0], Shard(1)), (placed[2], Replicate())):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [placement]))
    assert weight_ranges(placed) == weight_ranges(whole)
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_instruments_see_the_whole_of_a_sharded_model(tmp_path):
    other = mp.get_context("spawn").Process(target=look, args=(1, tmp_path / "store"))
    other.start()
    try:
        look(0, tmp_path / "store")
    finally:
        other.join(60)
    assert other.exitcode == 0
