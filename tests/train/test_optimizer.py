"""AdamW and what it reads: decay, gradients of BF16 weights, clipping, moments in eight bits, the learning rate."""

import functools
import math
import sys

import pytest
import torch
from patience import HANG
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import RunFolder
from octavo.train import optimizer as optimizers
from octavo.train.config import Config
from octavo.train.optimizer import accumulate_in_fp32, clip_gradients, learning_rate, make_optimizer, optimizer_state
from octavo.train.processes import Degrees, make_mesh
from octavo.train.saving import CheckpointWriter, TrainState, load_checkpoint

pytestmark = pytest.mark.usefixtures("eager")


def test_matrices_decay_and_nothing_else_does(begin):
    trainer = begin(model="gpt2", weight_decay=0.3)
    names = {p: name for name, p in trainer.model.named_parameters()}
    decayed, plain = trainer.state.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {names[p] for p in plain["params"]} == {n for n in names.values() if n.endswith("bias") or "layer_norm" in n}
    assert sorted([names[p] for p in decayed["params"] + plain["params"]]) == sorted(names.values())


def test_steps_are_those_of_adamw(settings):
    """Loshchilov and Hutter, algorithm 2, in float64, on gradients given."""
    config = settings(learning_rate=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9)
    model = nn.Linear(3, 5)
    optimizer = make_optimizer(model, config)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for t in range(1, 4):
        for name, p in model.named_parameters():
            p.grad = torch.randn_like(p)
            m, v = (old * beta for old, beta in zip(moments[name], (0.8, 0.9), strict=True))
            m, v = m + 0.2 * p.grad.double(), v + 0.1 * p.grad.double() ** 2
            moments[name] = m, v
            decay = 0.01 * 0.1 * expected[name] if name == "weight" else 0
            expected[name] = expected[name] - decay - 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8)
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-6, atol=1e-7)


def test_the_state_by_name_is_that_of_what_is_trained(settings):
    """Also before the first step. Runs that are resumed show that it goes back."""
    model = nn.ModuleDict({"trained": nn.Linear(3, 3), "frozen": nn.Linear(3, 3).requires_grad_(False)})
    found = optimizer_state(model, make_optimizer(model, settings()))
    entries = [f"trained.{p}.{entry}" for p in ("weight", "bias") for entry in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(found) == sorted(entries)


RATES = {"learning_rate": 1.0, "min_learning_rate": 0.1, "warmup": 10}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RATES | {"steps": 110}, {n: (n + 1) / 10 for n in range(10)} | {10: 1.0, 60: 0.55, 110: 0.1, 10_000: 0.1}),
        (RATES | {"schedule": "wsd", "steps": 100}, {0: 0.1, 9: 1, 10: 1, 80: 1, 90: 0.55, 99: 0.145, 100: 0.1}),
        ({"warmup": 0, "steps": 300, "learning_rate": 2.0, "min_learning_rate": 1.0}, {0: 2.0, 100: 1.75}),  # cos 60°
        ({"warmup": 0, "steps": 50, "schedule": "wsd", "decay": 0.0}, dict.fromkeys(range(50), 1e-3)),
        (RATES | {"warmup": 0, "steps": 50, "schedule": "wsd", "decay": 1.0}, {0: 1.0, 25: 0.55, 49: 0.118}),
        (RATES | {"steps": 100, "decay_steps": 40}, {0: 0.1, 10: 1.0, 25: 0.55, 40: 0.1, 99: 0.1}),  # lr_decay_iters
        (RATES | {"steps": 20, "decay_steps": 40}, {0: 0.1, 10: 1.0, 15: 0.1 + 0.45 * (1 + math.sqrt(3) / 2)}),
    ],
)
def test_corners_of_the_learning_rate(settings, expected):
    config = Config(**settings)
    assert {step: learning_rate(step, config) for step in expected} == pytest.approx(expected)


# ---- Gradients: the sum of many in BF16 and the norm of all, against float64; and clipping


def make_layer():
    torch.manual_seed(0)
    return nn.Linear(8, 12, bias=False).bfloat16()


def inputs():
    """300 micro-batches: a small gradient with the same sign each time, so that a BF16 sum stops growing."""
    draw = torch.Generator().manual_seed(1)
    return [1 + torch.rand(4, 8, generator=draw).bfloat16() / 8 for _ in range(300)]


def summed(model):
    for x in inputs():
        model(x).sum().backward()
    [grad] = [p.grad for p in model.parameters()]
    return grad


@functools.cache
def expected():
    total = torch.zeros(12, 8, dtype=torch.float64)
    for x in inputs():
        layer = make_layer()
        layer(x).sum().backward()
        total += layer.weight.grad.double()
    return total


def error(grad):
    return float(((grad.double() - expected()) / expected()).abs().max())


def test_in_fp32_nothing_is_lost():
    layer = make_layer()
    assert error(summed(layer)) > 0.05  # without
    layer = make_layer()
    accumulate_in_fp32(layer.parameters())
    grad = summed(layer)
    assert grad.dtype == torch.float32
    assert error(grad) < 1e-6


def test_a_new_step_begins_at_zero_and_other_parameters_stay_as_they_are():
    model = nn.Sequential(make_layer(), nn.Linear(12, 3, dtype=torch.bfloat16), nn.LayerNorm(3)).requires_grad_()
    model[2].requires_grad_(False)
    accumulate_in_fp32(p for p in model.parameters() if p.requires_grad)
    for _ in range(2):
        model(inputs()[0]).square().sum().backward()
        found = {name: None if p.grad is None else p.grad.dtype for name, p in model.named_parameters()}
        summed = dict.fromkeys(("0.weight", "1.weight", "1.bias"), torch.float32)
        assert found == summed | {"2.weight": None, "2.bias": None}
        model.zero_grad()


def sharded(rank):
    """Under FSDP2 that reduces each micro-batch, or the last alone, rounded once; and under tensor parallelism."""
    for layout, most in (("each", 1e-6), ("last", 1e-2), ("tensor parallel", 1e-6)):
        layer, mesh = make_layer(), init_device_mesh("cpu", (2,))
        if layout == "tensor parallel":
            layer = parallelize_module(layer, mesh, ColwiseParallel())
        else:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        accumulate_in_fp32(layer.parameters())
        if layout == "last":
            layer.set_requires_gradient_sync(False)
            summed(layer)
            layer.set_requires_gradient_sync(True)
            layer(torch.zeros(4, 8, dtype=torch.bfloat16)).sum().backward()
            grad = layer.weight.grad
        else:
            grad = summed(layer)
        assert grad.to_local().dtype == torch.float32
        assert error(grad.full_tensor()) < most, layout


class Clipped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = nn.Linear(8, 12), nn.Linear(12, 6), nn.Linear(6, 6)

    def forward(self, x):
        return 2 * self.second(self.first(x.to(self.first.weight.dtype)).relu().to(self.second.weight.dtype))


def backward(model):
    torch.manual_seed(1)
    model(torch.randn(4, 8)).square().sum().backward()


def exact_norm(model):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


@pytest.mark.parametrize("limit", [0.25, 1e4, math.inf])
def test_clipping_divides_by_the_norm_where_it_is_above_the_limit(limit):
    model = Clipped()
    backward(model)
    norm = exact_norm(model)
    factor = min(limit / norm, 1)
    expected = {name: p.grad.double() * factor for name, p in model.named_parameters() if p.grad is not None}
    found = clip_gradients(model.parameters(), limit)
    assert found.shape == ()
    assert float(found) == pytest.approx(norm, rel=1e-6)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert sorted(grads) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    for name, grad in grads.items():
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-5, atol=0)


def test_clipping_takes_gradients_of_two_dtypes():
    model = Clipped()
    model.first.bfloat16()
    backward(model)
    norm = exact_norm(model)
    found = clip_gradients(model.parameters(), 0.5)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(norm, rel=1e-2)  # the norm of BF16 gradients is BF16
    assert exact_norm(model) == pytest.approx(0.5, rel=1e-2)


def sharded_clipping(rank):
    """The norm and the gradients are those of one process, by one all-reduce for all gradients of a mesh."""
    whole = Clipped()
    backward(whole)
    norm = exact_norm(whole)
    clip_gradients(whole.parameters(), 0.25)
    degrees = {"FSDP2": Degrees(1, 4), "HSDP": Degrees(2, 2), "with tensor parallelism": Degrees(1, 2, 2)}
    for layout, each in degrees.items():
        mesh, model = make_mesh(each, torch.device("cpu"), timeout=HANG), Clipped()
        if each.tp > 1:
            parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"] if each.dp_replicate > 1 else mesh["dp_shard"])
        backward(model)
        with CommDebugMode() as collectives:
            found = clip_gradients(model.parameters(), 0.25)
        assert float(found) == pytest.approx(norm, rel=1e-6), layout
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
        assert grads.keys() == {"first.weight", "first.bias", "second.weight", "second.bias"}
        for name, grad in grads.items():
            torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=1e-5, atol=1e-8)
        assert collectives.get_total_counts() == 1 or each.tp > 1


@pytest.mark.slow
@pytest.mark.parametrize(("world", "check"), [(2, sharded), (4, sharded_clipping)])
def test_sharded_gradients_too(world, check):
    run_ranks(world, check)


# ---- AdamW with moments in eight bits and with BF16 weights, on torchao's optimizers, run eagerly


EIGHT_BITS = ["8bit", "fp8"]


def make_model():
    """The moments of a.weight, whose rows 2 ranks share unevenly, and of b.weight are quantized."""
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(256, 17), "b": nn.Linear(512, 8, bias=False), "c": nn.Linear(24, 200)})


def config_of(**optimizer):
    return Config.from_dict({"optimizer": optimizer, "learning_rate": 1e-2, "weight_decay": 0.1})


def take_steps(model, optimizer, count):
    """Steps whose gradients follow from the weights element by element, so that shards have the same."""
    for _ in range(count):
        for p in model.parameters():
            p.grad = (50 * p.detach().float()).sin().to(p.dtype)
        optimizer.step()


def trained(steps, **optimizer):
    model = make_model()
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


@pytest.mark.parametrize("how", [{"weights": "bf16"}, {"state": "8bit"}, {"state": "fp8", "weights": "bf16"}], ids=str)
def test_a_step_is_torchaos_and_wraps_nothing_for_compilation(how, monkeypatch):
    def trained_in_dtype(compile):
        model = make_model().to(torch.bfloat16 if "weights" in how else torch.float32)
        optimizer = make_optimizer(model, config_of(**how))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", compile)
            take_steps(model, optimizer, 3)
        return list(model.parameters())

    found = trained_in_dtype(lambda *args, **options: pytest.fail("wrapped"))
    monkeypatch.setattr(optimizers, "_compiled_once", lambda base: base)
    assert all(torch.equal(*pair) for pair in zip(found, trained_in_dtype(torch.compile), strict=True))


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
    settings = {"learning_rate": update, "min_learning_rate": 0.0, "weight_decay": 0.0, "beta1": 0.0, "seed": seed}
    adamw = make_optimizer(model, Config.from_dict(settings | {"optimizer": {"weights": "bf16"}}))
    for _ in range(steps):
        model[0].grad = torch.ones_like(model[0])
        adamw.step()
    return model[0].detach().double()


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


def test_the_learning_rate_is_set_of_all_parameters():
    model = make_model()
    adamw = make_optimizer(model, config_of(state="8bit"))
    optimizers.set_learning_rate(adamw, 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    take_steps(model, adamw, 1)
    assert all(map(torch.equal, model.parameters(), before))


def test_another_state_than_the_checkpoints_is_an_error(begin, go_on, tmp_path):
    begin(width=256, layers=1, steps=4).run()
    with pytest.raises(ArtifactError, match=r"model, optimizer\.state or parallel\.tp: .*exp_avg\.codes is missing"):
        go_on(tmp_path / "run", "--optimizer.state", "8bit")


def train_state(model, adamw, step=0):
    return TrainState(model, adamw, torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu"), "", step=step)


def state_bytes(model, adamw):
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
