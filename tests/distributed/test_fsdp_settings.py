"""The FP8 all-gather with the settings of FSDP2 and of training: bit for bit what one rank computes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_examples import backward, batch, blocks, converted, equal, gathered, sharded, train, whole
from linear_examples import converted_model
from operation_counts import Traffic
from ranks import run_ranks, use_gpus
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import octavo
from octavo.distributed import fp8_all_gather, send_bf16_gradients
from octavo.distributed.shards import ShardGroup
from octavo.models import LlamaConfig, build
from octavo.nn.parallel_weights import GatheredWeight


def accumulate(model: Any, seed: int) -> Tensor:
    """Two micro-batches, the first without a reduction over the ranks."""
    for i in range(2):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(i == 1)
        loss = backward(model, 2 * seed + i)
    return loss


def under_autocast(model: nn.Module, seed: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return backward(model, seed)


def in_cast_once(model: nn.Module, seed: int) -> Tensor:
    with octavo.scales.cast_once(model):
        return backward(model, seed) + backward(model, seed + 10)


def with_evaluation(model: nn.Module, seed: int) -> Tensor:
    with torch.no_grad():
        model.eval()(batch(7))
    return backward(model.train(), seed)


def with_empty_input(model: nn.Module, seed: int) -> Tensor:
    model(batch(rows=0)).sum().backward()
    return backward(model, seed)


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.octavo.quantize.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module, context_fn=partial(create_selective_checkpoint_contexts, keep_products))


def settings(rank: int, recipe: str) -> None:
    """Training equals that of one rank in every setting, and after other weights were loaded."""
    make = partial(converted, recipe)
    for step in (backward, accumulate, under_autocast, in_cast_once, with_evaluation, with_empty_input):
        assert equal(train(make(), step), train(gathered(make()), step)), step
    for rows in (33, 1):  # uneven rows; one row a rank, or none
        assert equal(train(make(rows)), train(gathered(make(rows)))), rows
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    for options in ({"reshard_after_forward": False}, {"mesh": alone}):
        assert equal(train(make(), accumulate), train(gathered(make(), **options), accumulate)), options
    for wrap in (checkpoint_wrapper, selective):
        assert equal(train(make()), train(gathered(nn.Sequential(*map(wrap, make()))))), wrap
    layer, two = make(), gathered(make())
    train(two, steps=1)
    two.load_state_dict({name: p.clone().zero_() for name, p in two.state_dict().items()})
    for p in layer.parameters():
        p.data.zero_()
    assert torch.equal(layer(batch()), two(batch()))


def language_model(rank: int) -> None:
    """A tied Llama made on the meta device; clipping."""
    config = LlamaConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=16, tied=True)
    torch.manual_seed(0)
    whole = build(config)
    with torch.device("meta"):
        model = build(config)
    octavo.convert(whole)
    octavo.convert(model)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    report = fp8_all_gather(model)
    assert (len(report.gathered), report.wide) == (14, {})
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        full = whole.get_parameter(name).detach()
        p.data.copy_(torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements))

    def step(model: nn.Module, seed: int) -> Tensor:
        loss = model(torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        return loss

    assert equal(train(whole, step), train(model, step))
    clipped = []
    for other in (sharded(converted()), gathered(converted())):
        backward(other, 0)
        clipped.append([nn.utils.clip_grad_norm_(other.parameters(), 0.1).full_tensor()])
        clipped[-1] += [p.grad.full_tensor() for p in other.parameters()]
    assert equal(*clipped)


def four_ranks(rank: int) -> None:
    """Two dimensions; fewer rows than ranks; shards of two ranks after the forward pass."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert equal(train(converted()), train(gathered(converted(), mesh=mesh)))
    assert equal(train(converted(rows=5)), train(gathered(converted(rows=5))))
    reduced = sharded(converted(), reshard_after_forward=2)
    assert all("reshard_after_forward=int" in reason for reason in fp8_all_gather(reduced).wide.values())
    assert equal(train(converted()), train(reduced))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "check"), [(2, language_model), (4, four_ranks)])
def test_training_equals_one_rank(world: int, check: Callable[[int], None]) -> None:
    run_ranks(world, check)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8", "groupwise", "tensorwise_rotated"])  # y and dx of three differ
def test_training_equals_one_rank_in_every_setting(recipe: str) -> None:
    run_ranks(2, settings, recipe)


@pytest.mark.slow
def test_a_gathered_weight_refuses_numbers_and_can_be_dequantized() -> None:
    scale = torch.full((3, 1), 0.5)
    w = GatheredWeight(torch.ones(3, 4).to(torch.float8_e4m3fn), scale, torch.bfloat16, "row").requires_grad_()
    with pytest.raises(NotImplementedError, match=r"gathered in eight bits.*dequantize"):
        w + 1
    wide = w.dequantize()
    assert torch.equal(wide, torch.full((3, 4), 0.5, dtype=torch.bfloat16))
    wide.sum().backward()
    assert torch.equal(w.grad, torch.ones(3, 4, dtype=torch.bfloat16))
    assert "GatheredWeight([3, 4], torch.bfloat16, by row)" in repr(w)


# ---- Gradients that travel in BF16: the sums are those of FSDP2's reduction in FP32, and of float64


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDE = MixedPrecisionPolicy(reduce_dtype=torch.float32)
ROUNDED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def made() -> nn.Sequential:
    """Rows that neither two nor four ranks share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 37), nn.GELU(), nn.Linear(37, 5))


def backward_of(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()


def gradients(model: Any, rank: int, accumulated: bool) -> list[Tensor]:
    """After one micro-batch, or after two, the first without a reduction."""
    for step in range(2) if accumulated else [1]:
        model.set_requires_gradient_sync(not accumulated or step == 1)
        backward_of(model, rank, step)
    return whole(p.grad for p in model.parameters())


def exact(world: int) -> list[Tensor]:
    """The mean over the ranks, in float64, of the gradients that each computes in BF16."""
    sums: list[Tensor] = []
    for rank in range(world):
        model = made().bfloat16()
        backward_of(model, rank, 1)
        grads = [p.grad.double() / world for p in model.parameters()]
        sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
    return sums


def reduced(
    rank: int, shape: tuple[int, ...], policy: MixedPrecisionPolicy = BF16, accumulated: bool = False
) -> tuple[list[Tensor], list[int]]:
    """The gradients, which are those of FSDP2's own reduction, and the bytes of BF16 that a rank gave away."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    own, ours = (sharded(made(), mesh=mesh, mp_policy=policy) for _ in range(2))
    assert send_bf16_gradients(ours) == 2  # the model has no parameters of its own
    with Traffic() as sent:
        found = gradients(ours, rank, accumulated)
    assert equal(found, gradients(own, rank, accumulated))
    return found, sent.of("alltoall")


def in_bf16(rank: int, *shape: int) -> None:
    """The sums are exact but for float32, of two bytes an element."""
    found, sent = reduced(rank, shape)
    for grad, sums in zip(found, exact(dist.get_world_size()), strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad.double(), sums, rtol=1e-6, atol=1e-9)
    padded = [16 * -(-37 // shape[-1]) + -(-37 // shape[-1]), 37 * -(-5 // shape[-1]) + -(-5 // shape[-1])]
    assert sorted(sent) == sorted(2 * shape[-1] * part for part in padded)


def in_fp32(rank: int, policy: MixedPrecisionPolicy, accumulated: bool) -> None:
    """Gradients that are FP32 already are not rounded."""
    found, sent = reduced(rank, (2,), policy, accumulated)
    assert not sent
    assert any((grad.view(torch.int32) & 0xFFFF).any() for grad in found)  # more digits than BF16 has


def trained(rank: int) -> None:
    """Three AdamW steps of a converted model, gathered in eight bits, end alike in both ways."""
    results = []
    for ours in (False, True):
        shards = gathered(converted(), mp_policy=BF16)
        if ours:
            assert send_bf16_gradients(shards) == 2
        results.append(train(shards))
    assert equal(*results)


def unchanged(rank: int) -> None:
    """Units that send nothing in FP32 stay as they are: those of one rank, and those with sums in BF16."""
    policy = BF16 if dist.get_world_size() == 1 else ROUNDED
    assert send_bf16_gradients(sharded(made(), mp_policy=policy)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "check", "options"),
    [
        (2, in_bf16, (2,)), (4, in_bf16, (4,)), (4, in_bf16, (2, 2)), (2, in_fp32, (WIDE, False)),
        (2, in_fp32, (BF16, True)), (2, trained, ()), (1, unchanged, ()), (2, unchanged, ()),
    ],
)  # fmt: skip
def test_ranks_that_send_bf16_gradients(world: int, check: Callable[..., None], options: tuple[Any, ...]) -> None:
    run_ranks(world, check, *options)


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(ValueError, match="call fully_shard"):
        send_bf16_gradients(made())
    with pytest.raises(TypeError, match="send_bf16_gradients"):
        send_bf16_gradients("model")


# ---- The order of quantizing, all-gathers and the all-reduce of a step, in the host's calls and in a GPU's streams:
# streams of the CPU remember what has surely run before what, as streams of a GPU would enforce it


class Event:
    """What had run in a stream when the event was recorded."""

    def __init__(self) -> None:
        self.before: frozenset[str] = frozenset()

    def record(self, stream: Any = None) -> None:
        self.before = frozenset((stream or torch.cpu.current_stream()).before)


class Stream:
    """Work in a stream runs after the earlier work there, and after what the stream waited for; nothing else."""

    def __init__(self, priority: int = 0) -> None:
        self.before: set[str] = set()

    def wait_stream(self, stream: Any) -> None:
        self.before |= stream.before

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


WORK = "update", "measure", "finish"  # what is done with all weights once a step; the last has the all-reduce

Events = list[tuple[str, tuple[str, ...]]]  # what is called, and the work of this step that it surely runs after


def note(events: Events, name: str) -> None:
    """Note that this work runs in the current stream, and after what."""
    step, before = sum(name == "update" for name, _ in events), torch.cpu.current_stream().before
    events.append((name, tuple(work for work in WORK if f"{work} {step}" in before)))
    before.add(f"{name} {step + (name == 'update')}")


def noted(events: Events, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        note(events, name)
        return function(*args, **kwargs)

    return call


class NotedAllGather(DefaultAllGather):
    def __init__(self, events: Events, unit: str) -> None:
        self.events, self.unit = events, unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note(self.events, self.unit)
        return super().__call__(*args, **kwargs)


def two_steps(rank: int) -> Events:
    events: Events = []
    for name in ("measure", "finish"):  # of the one group of weights
        setattr(ShardGroup, name, noted(events, name, getattr(ShardGroup, name)))
    model: Any = nn.Sequential(*converted(), nn.RMSNorm(32))
    default = Stream()
    names = {"Stream": Stream, "Event": Event, "_default_cpu_stream": default, "_current_stream": default}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(torch.cpu, name, value)
        for block in model[:2]:
            fully_shard(block)
        fully_shard(model)
        fp8_all_gather(model)
        for name, unit in model.named_modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_all_gather(NotedAllGather(events, f"gather {name}".strip()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step = noted(events, "update", optimizer.step)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return events


def test_the_gather_of_the_root_waits_for_no_weight_to_be_quantized() -> None:
    for events in run_ranks(2, two_steps):
        begin = events.index(("update", ("measure", "finish")))  # which writes what these read
        assert events[begin + 1 :] == [
            ("measure", ("update",)),
            ("gather", ("update",)),
            ("finish", ("update", "measure")),
            *((f"gather {block}", WORK) for block in (0, 1, 1, 0)),
            ("update", WORK),
            ("measure", ("update",)),
        ]


# ---- FSDP2 with an FP8 all-gather on two GPUs and NCCL: the streams, and Inductor's code


RECIPES = ("rowwise", "tensorwise", "delayed")


def step(model: nn.Module, seed: int) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return backward(model, seed, rows=128)


def made_gpu(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    return converted_model(blocks(256, count=6, width=256).cuda(), recipe)


def compiled(recipe: str, *, gather: bool) -> nn.Module:
    model: Any = made_gpu(recipe)
    for block in model:
        block.compile(fullgraph=True)
        fully_shard(block)
    fully_shard(model)
    if gather:
        fp8_all_gather(model)
    return model


def on_two_gpus(rank: int) -> dict[str, Any]:
    use_gpus(rank)
    results: dict[str, Any] = {}
    for recipe in RECIPES:
        model = sharded(made_gpu(recipe))
        report = fp8_all_gather(model)
        with Traffic() as sent:
            trained = train(model, step)
        results[recipe] = bool(report.gathered) and equal(train(made_gpu(recipe), step), trained)
        results[f"{recipe}: all-reduces"] = len(sent.of("allreduce"))
    torch._dynamo.reset()
    wide, narrow = (train(compiled("rowwise", gather=gather), step) for gather in (False, True))
    results["compiled"] = equal(wide, narrow)
    return results


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_compute_what_one_does() -> None:
    for results in run_ranks(2, on_two_gpus):
        assert all(results[recipe] for recipe in RECIPES), results
        assert results["compiled"]
        # One in each forward pass; for delayed, one in the first, and that of `update_scales` after each step.
        assert [results[f"{recipe}: all-reduces"] for recipe in RECIPES] == [3, 3, 4]
