"""FSDP2 gathers stacks of experts as bytes: those of one rank, and with them the training of one rank."""

from typing import Any

import torch
from fsdp_examples import batch, counted, equal, sharded, train
from ranks import run_ranks
from torch import Tensor, nn

import octavo
from octavo.dist import fp8_all_gather
from octavo.nn import Experts, GroupedLinear
from octavo.nn.gathered_weight import GatheredWeight
from octavo.ops import quantize_matrices

WIDTH = 32


class Block(nn.Module):
    """A router, experts, and a grouped linear layer on halves of the rows. Nobody chooses expert 1."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = Experts(experts, WIDTH, 16)
        self.halves = GroupedLinear(2, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).softmax(-1)
        weight, index = torch.topk(torch.cat([score[:, :1], 0 * score[:, 1:2], score[:, 2:]], 1), 2, -1)
        offsets = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device=x.device)
        return x + self.halves(self.experts(x, index, weight), offsets)


def model_of(experts: int, count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(experts) for _ in range(count)))
    with torch.no_grad():
        model[0].experts.down_proj[0, 3] = 0
        model[0].experts.gate_up_proj[2] *= 1e-6
    octavo.convert(model, "rowwise", skip=("*gate",))
    return model


def trained(rank: int) -> dict[str, Any]:
    """For 4 experts, and 3 that two ranks cannot share evenly: the report, and whether training equals one rank's."""
    found: dict[str, Any] = {}
    for experts in (4, 3):
        whole = model_of(experts)
        model = sharded(whole)
        found[f"gathered {experts}"] = fp8_all_gather(model).gathered
        found[f"equal {experts}"] = equal(train(whole), train(model))
    return found


def compiled(rank: int) -> bool:
    whole = model_of(4)
    model = sharded(whole)
    fp8_all_gather(model)
    for block in model:
        block.compile(backend="aot_eager")
    return equal(train(whole), train(model))


def bytes_of_experts(rank: int) -> list[bool]:
    whole = model_of(3, count=1)
    model = sharded(whole)
    fp8_all_gather(model)
    same: list[bool] = []

    def compare(block: Any, *_: Any) -> None:
        for module, leaf in ((block.experts, "gate_up_proj"), (block.experts, "down_proj"), (block.halves, "weight")):
            w: Any = getattr(module, leaf)
            assert isinstance(w, GatheredWeight)
            source: Any = whole[0].halves if module is block.halves else whole[0].experts
            expected = quantize_matrices(getattr(source, leaf).detach(), module.recipe.w)
            same.append(torch.equal(w.data_bytes.view(torch.uint8), expected.data.view(torch.uint8)))
            same.append(torch.equal(w.scale, expected.scale))
            same.append(torch.equal(w.dequantize(), expected.dequantize(w.dtype)))

    model[0].register_forward_pre_hook(compare)
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


def test_experts_are_gathered_as_bytes() -> None:
    for found in run_ranks(2, both):
        for experts in (4, 3):
            names = [f"{i}.experts.{leaf}" for i in range(2) for leaf in ("gate_up_proj", "down_proj")]
            assert {*names, "0.halves.weight", "1.halves.weight"} == set(found["trained"][f"gathered {experts}"])
            assert found["trained"][f"equal {experts}"]
        assert found["compiled"]
        assert len(found["bytes"]) == 2 * 9
        assert all(found["bytes"])
        assert found["traffic"]["fp8"] < 0.6 * found["traffic"]["wide"]
