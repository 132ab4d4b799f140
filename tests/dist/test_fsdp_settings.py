"""The FP8 all-gather with the settings of FSDP2 and of training: bit for bit what one rank computes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fsdp_examples import backward, batch, blocks, equal, sharded, train
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import octavo
from octavo.dist import fp8_all_gather
from octavo.models import LlamaConfig, build
from octavo.nn.gathered_weight import GatheredWeight

pytestmark = pytest.mark.slow

Step = Callable[[nn.Module, int], Tensor]


def converted(rows: int = 32, wrap: Callable[[nn.Module], nn.Module] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = blocks(rows)
    octavo.convert(model)
    return model if wrap is None else nn.Sequential(*map(wrap, model))


def gathered(model: nn.Module, **options: Any) -> nn.Module:
    model = sharded(model, **options)
    report = fp8_all_gather(model)
    assert report.gathered
    assert not report.wide
    return model


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
    with octavo.cast_once(model):
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


def settings(rank: int) -> dict[str, bool]:
    same: dict[str, bool] = {}
    steps: dict[str, Step] = {
        "plain": backward,
        "accumulation": accumulate,
        "autocast": under_autocast,
        "cast_once": in_cast_once,
        "evaluation": with_evaluation,
        "empty input": with_empty_input,
    }
    for name, step in steps.items():
        same[name] = equal(train(converted(), step), train(gathered(converted()), step))
    kept = gathered(converted(), reshard_after_forward=False)
    same["unsharded until backward"] = equal(train(converted(), accumulate), train(kept, accumulate))
    same["uneven rows"] = equal(train(converted(33)), train(gathered(converted(33))))
    same["one row a rank, or none"] = equal(train(converted(1)), train(gathered(converted(1))))
    for name, wrap in (("full", checkpoint_wrapper), ("selective", selective)):
        same[f"{name} checkpointing"] = equal(train(converted()), train(gathered(converted(wrap=wrap))))
    return same


def test_training_equals_one_rank_in_every_setting() -> None:
    for same in run_ranks(2, settings):
        assert all(same.values()), same


def language_model(rank: int) -> dict[str, bool]:
    """A tied Llama made on the meta device; clipping; the hooks on a mesh of one."""
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
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        full = whole.get_parameter(name).detach()
        p.data.copy_(torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements))

    def step(model: nn.Module, seed: int) -> Tensor:
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))
        loss = model(tokens).square().mean()
        loss.backward()
        return loss

    wide = sharded(converted())
    clipped = []
    for other in (wide, gathered(converted())):
        backward(other, 0)
        clipped.append([nn.utils.clip_grad_norm_(other.parameters(), 0.1).full_tensor()])
        clipped[-1] += [p.grad.full_tensor() for p in other.parameters()]
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    return {
        "all gathered": len(report.gathered) == 14 and not report.wide,
        "tied, from the meta device": equal(train(whole, step), train(model, step)),
        "clipping": equal(*clipped),
        "a mesh of one": equal(train(converted()), train(gathered(converted(), mesh=alone))),
    }


def test_a_tied_model_from_the_meta_device_clipping_and_a_mesh_of_one() -> None:
    for same in run_ranks(2, language_model):
        assert all(same.values()), same


def four_ranks(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reduced = sharded(converted(), reshard_after_forward=2)
    report = fp8_all_gather(reduced)
    return {
        "HSDP": equal(train(converted()), train(gathered(converted(), mesh=mesh))),
        "uneven rows": equal(train(converted(5)), train(gathered(converted(5)))),
        "resharded to two": equal(train(converted()), train(reduced)),
        "wide": set(report.wide.values()),
    }


def test_four_ranks_in_two_dimensions_and_fewer_rows_than_ranks() -> None:
    for same in run_ranks(4, four_ranks):
        (reason,) = same.pop("wide")
        assert "reshard_after_forward=int" in reason
        assert all(same.values()), same


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
