"""FSDP2 gathers stacks of experts as bytes: those of one rank, and with them the training of one rank."""

from typing import Any

import pytest
from fsdp_examples import batch, counted, equal, sharded, train
from fsdp_expert_examples import gathered_equal, model_of, stacks_of
from ranks import run_ranks

from octavo.dist import fp8_all_gather


def trained(rank: int) -> dict[str, Any]:
    """For 4 experts, and 3 that two ranks cannot share evenly: the report, and whether training equals one rank's."""
    found: dict[str, Any] = {}
    for experts in (4, 3):
        whole = model_of(experts)
        model = sharded(whole)
        found[f"gathered {experts}"] = set(fp8_all_gather(model).gathered) == set(stacks_of(whole))
        found[f"equal {experts}"] = equal(train(whole), train(model))
    return found


def compiled(rank: int) -> bool:
    whole = model_of(4)
    model = sharded(whole)
    fp8_all_gather(model)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    return equal(train(whole), train(model))


def bytes_of_experts(rank: int) -> list[bool]:
    whole = model_of(3, count=1)
    model = sharded(whole)
    fp8_all_gather(model)
    same: list[bool] = []
    model[0].register_forward_pre_hook(lambda block, *_: same.extend(gathered_equal(block, whole[0])))
    model(batch())
    model(batch()[:0])  # no token: the weights are widened
    return same


def traffic(rank: int) -> dict[str, Any]:
    """The bytes of the all-gathers of a step, wide and in eight bits."""
    sent = {}
    for kind in ("wide", "fp8"):
        model = sharded(model_of(4, count=1).bfloat16())
        if kind == "fp8":
            fp8_all_gather(model)
        x = batch(rows=8).bfloat16()
        with counted() as now:
            model(x).sum().backward()
        sent[kind] = sum(now["gather"])
    return sent


def both(rank: int) -> dict[str, Any]:
    return {
        "trained": trained(rank),
        "compiled": compiled(rank),
        "bytes": bytes_of_experts(rank),
        "traffic": traffic(rank),
    }


@pytest.mark.slow
def test_experts_are_gathered_as_bytes() -> None:
    for found in run_ranks(2, both):
        assert all(found["trained"].values()), found
        assert found["compiled"]
        assert len(found["bytes"]) == 2 * 12
        assert all(found["bytes"])
        assert found["traffic"]["fp8"] < 0.6 * found["traffic"]["wide"]
