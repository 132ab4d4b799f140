"""AdamW with moments in eight bits and with BF16 weights, on torchao's optimizers, run eagerly."""

import sys

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from octavo.artifact.files import ArtifactError
from octavo.artifact.run import RunFolder
from octavo.train.checkpoint import TrainState, load_checkpoint
from octavo.train.checkpoint_writer import CheckpointWriter
from octavo.train.config import Config, ConfigError
from octavo.train.optimizer import make_optimizer, optimizer_state, set_learning_rate

EIGHT_BITS = ["8bit", "fp8"]


@pytest.fixture(autouse=True)
def eager():
    """Compiling torchao's step takes half a minute."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


def make_model(dtype=torch.float32):
    """The moments of a.weight, whose rows 2 ranks share unevenly, and of b.weight are quantized."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(256, 17), "b": nn.Linear(512, 8, bias=False), "c": nn.Linear(24, 200)}
    return nn.ModuleDict(layers).to(dtype)


def config_of(**optimizer):
    return Config.from_dict({"optimizer": optimizer, "learning_rate": 1e-2, "weight_decay": 0.1})


def take_steps(model, optimizer, count):
    """Steps whose gradients follow from the weights element by element, so that shards have the same."""
    for _ in range(count):
        for p in model.parameters():
            p.grad = (50 * p.detach().float()).sin().to(p.dtype)
        optimizer.step()


def trained(steps, dtype=torch.float32, **optimizer):
    model = make_model(dtype)
    adamw = make_optimizer(model, config_of(**optimizer))
    take_steps(model, adamw, steps)
    return model, adamw


@pytest.mark.parametrize("state", EIGHT_BITS)
def test_a_step_is_adamws_but_for_the_rounding_of_its_moments(state):
    for steps, limit in ((1, 1e-5), (10, 0.05)):  # the first step reads no quantized moment
        begin, (exact, _), (found, adamw) = make_model(), trained(steps), trained(steps, state=state)
        for name, p in found.named_parameters():
            way = exact.get_parameter(name).detach() - begin.get_parameter(name).detach()
            difference = p.detach() - exact.get_parameter(name).detach()
            assert float(difference.norm() / way.norm()) < limit, name
            if name in ("a.bias", "c.weight", "c.bias"):  # too small, or rows that are no whole blocks: float32
                assert float(difference.abs().max()) < 1e-6
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("state", EIGHT_BITS)
def test_the_state_by_name_is_two_bytes_an_element_and_two_scales_a_block(state):
    model, adamw = trained(2, state=state)
    found = {name: t for name, t in optimizer_state(model, adamw).items() if name.startswith(("a.weight", "b.weight"))}
    shapes = {"a.weight": (17, 256), "b.weight": (8, 512)}
    expected = {}
    for name, (rows, columns) in shapes.items():
        expected[f"{name}.step"] = (), torch.float32
        for moment in ("exp_avg", "exp_avg_sq"):
            expected[f"{name}.{moment}.codes"] = (rows, columns), torch.uint8
            expected[f"{name}.{moment}.scale"] = (rows, columns // 256), torch.float32
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == expected
    largest = optimizer_state(*trained(2))["b.weight.exp_avg"].view(8, 2, 256).abs().amax(-1)
    top = {"8bit": 1, "fp8": 448}[state]  # the largest value of a byte
    torch.testing.assert_close(found["b.weight.exp_avg.scale"] * top, largest, rtol=0.02, atol=0)


def rounded(steps, update, seed=0):
    """4,096 BF16 weights of 1 after steps of `update` each, without momentum."""
    model = nn.ParameterList([torch.ones(16, 256, dtype=torch.bfloat16)])
    config = Config.from_dict(
        {"optimizer": {"weights": "bf16"}, "learning_rate": update, "min_learning_rate": 0.0, "weight_decay": 0.0,
         "beta1": 0.0, "seed": seed}
    )  # fmt: skip
    adamw = make_optimizer(model, config)
    for _ in range(steps):
        model[0].grad = torch.ones_like(model[0])
        adamw.step()
    return model[0].detach().double()


def test_updates_below_the_spacing_of_bf16_arrive_on_average():
    """The spacing below 1 is 1/256: rounding to nearest would leave all weights where they are."""
    steps, update = 40, 2.0**-11
    found = 1 - rounded(steps, update)
    deviation = np.sqrt(steps * update * 2.0**-8 / 4096)  # of the mean: each step is a draw of 0 or 1/256
    assert abs(float(found.mean()) - steps * update) < 5 * deviation
    assert float(found.std()) > 0


def test_rounding_depends_on_the_seed_and_the_step_and_leaves_the_random_state_alone():
    """So that ranks with the same part of a weight round it alike, and a resumed run rounds as the first."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = rounded(3, 2.0**-11)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(rounded(3, 2.0**-11), first)
    assert not torch.equal(rounded(3, 2.0**-11, seed=1), first)
    early, late = (1 - rounded(n, 2.0**-11) for n in (1, 2))
    assert not torch.equal(late, 2 * early)  # the second step draws anew


@pytest.mark.parametrize("optimizer", [{}, {"state": "8bit"}])
def test_the_learning_rate_is_set_of_all_parameters(optimizer):
    model = make_model()
    adamw = make_optimizer(model, config_of(**optimizer))
    set_learning_rate(adamw, 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    take_steps(model, adamw, 1)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [{"state": "8bit"}, {"state": "fp8", "weights": "bf16"}], ids=lambda o: "-".join(o.values())
)
def test_a_run_resumes_bit_for_bit(begin, go_on, records, tmp_path, optimizer):
    wide = {"width": 256, "mlp_width": 64, "layers": 1, "accumulate": 2, "optimizer": optimizer}
    begin(out=str(tmp_path / "whole"), **wide).run()
    begin(out=str(tmp_path / "short"), steps=4, decay_steps=8, **wide).run()
    trainer = go_on(tmp_path / "short", "--steps", "8")
    dtype = torch.bfloat16 if "weights" in optimizer else torch.float32
    assert {p.dtype for p in trainer.model.parameters()} == {dtype}
    trainer.run()
    assert records(tmp_path / "short") == records(tmp_path / "whole")


def test_another_state_than_the_checkpoints_is_an_error(begin, go_on, tmp_path):
    begin(width=256, layers=1, steps=4).run()
    with pytest.raises(ArtifactError, match=r"of another model or optimizer\.state: .*exp_avg\.codes is missing"):
        go_on(tmp_path / "run", "--optimizer.state", "8bit")


def train_state(model, adamw, step=0):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, adamw, scaler, torch.device("cpu"), "", step=step)


def state_bytes(model, adamw):
    """The bytes of each tensor of the state, by name."""
    found = optimizer_state(model, adamw)
    plain = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}
    return {name: t.reshape(-1).view(torch.uint8).tolist() for name, t in plain.items()}


def sharded_runs(rank, folder):
    """The state of two ranks after 3 steps, and a checkpoint of it, for each kind of moments."""
    found = {}
    for kind in EIGHT_BITS:
        with torch.compiler.set_stance("force_eager"):
            model = make_model()
            for module in model.values():
                fully_shard(module)
            adamw = make_optimizer(model, config_of(state=kind))
            take_steps(model, adamw, 3)
        with CheckpointWriter(RunFolder(folder / kind), keep=1) as writer:
            writer.save(train_state(model, adamw, step=3))
        found[kind] = state_bytes(model, adamw)
    return found


def test_two_ranks_hold_the_bytes_of_one_and_one_process_loads_them(tmp_path):
    by_rank = run_ranks(2, sharded_runs, tmp_path)
    for kind in EIGHT_BITS:
        expected = state_bytes(*trained(3, state=kind))
        for found in by_rank:
            assert found[kind] == expected
        model, adamw = trained(0, state=kind)
        load_checkpoint(RunFolder(tmp_path / kind).checkpoint(3), train_state(model, adamw))
        assert state_bytes(model, adamw) == expected


def test_without_torchao_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ImportError, match=r"weights in BF16 .* need .* torchao.* pip install \"\.\[optim\]\""):
        make_optimizer(make_model(), config_of(state="8bit"))


@pytest.mark.parametrize("optimizer", [{"weights": "bf16"}, {"offload": True}], ids=str)
def test_fp16_and_its_loss_scale_are_refused(optimizer):
    with pytest.raises(ConfigError, match=r"optimizer\..* requires precision bf16 or fp32, got fp16"):
        Config.from_dict({"precision": "fp16", "optimizer": optimizer})
