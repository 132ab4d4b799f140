"""FSDP2 gathers stacks of experts as bytes: those of one rank, and with them the training of one rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_examples import backward, batch, equal, sharded, train
from gpus import ONLY_HOPPER, poison
from grouped_examples import exact_experts
from linear_examples import converted_model
from metrics import sqnr
from operation_counts import Traffic
from ranks import run_ranks, use_gpus
from tensor_parallel_examples import mesh_of
from tiny_models import built
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.distributed import expert_parallel, fp8_all_gather
from octavo.nn import Experts, GroupedLinear
from octavo.nn.parallel_weights import first_indices
from octavo.nn.selection import promote
from octavo.ops import quantize_matrices

# ---- Small models with stacks of experts' matrices that FSDP2 shards


class Block(nn.Module):
    """A router, experts, and two grouped linear layers: on halves of the rows, and on all rows. Nobody chooses expert
    1. Of the one matrix of the last layer, the second of two ranks has nothing."""

    stacks = (("experts", "gate_up_proj"), ("experts", "down_proj"), ("halves", "weight"), ("all", "weight"))

    def __init__(self, experts: int, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, mlp_width)
        self.halves, self.all = GroupedLinear(2, width, width), GroupedLinear(1, width, width)

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).sigmoid()
        weight, index = torch.topk(torch.cat([score[:, :1], 0 * score[:, 1:2], score[:, 2:]], 1), 2, -1)
        offsets = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device=x.device)
        return x + self.all(self.halves(self.experts(x, index, weight), offsets), offsets[1:])


def model_of(experts, count=2, width=32, mlp_width=16, recipe="rowwise"):
    """Converted blocks. Rows are zero or tiny, so that the relative floor decides their scales."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(experts, width, mlp_width) for _ in range(count)))
    with torch.no_grad():
        model[0].experts.down_proj[0, 3] = 0
        model[0].experts.gate_up_proj[2, -3:] *= 1e-6
    return converted_model(model, recipe, skip=("*gate",))


def stacks_of(model: nn.Sequential) -> list[str]:
    return [f"{name}.{module}.{leaf}" for name, _ in model.named_children() for module, leaf in Block.stacks]


def gathered_equal(block: Any, whole: nn.Module) -> list[bool]:
    """True if the bytes, the scales and the numbers of each stack of `block`, between its all-gather and its reshard,
    are those of the `whole` block's matrices on the CPU."""
    same: list[bool] = []
    for name, leaf in Block.stacks:
        module = block.get_submodule(name)
        w: Any = getattr(module, leaf)
        expected = quantize_matrices(getattr(whole.get_submodule(name), leaf).detach().cpu(), module.recipe.w)
        same.append(torch.equal(w.data_bytes.view(torch.uint8).cpu(), expected.data.view(torch.uint8)))
        same.append(torch.equal(w.scale.cpu(), expected.scale))
        same.append(torch.equal(w.dequantize().cpu(), expected.dequantize(w.dtype)))
    return same


def trained(rank: int) -> None:
    """With 4 experts, and 3 that two ranks cannot share evenly, training equals one rank's; so in compiled code, and
    with blocks of whole matrices. MX, which quantizes a weight twice, is gathered wide."""
    given = (4, "rowwise", False), (3, "rowwise", False), (4, "rowwise", True), (3, "blockwise", False)
    for experts, recipe, compiled in given:
        whole = model_of(experts, recipe=recipe)
        model = sharded(whole)
        assert set(fp8_all_gather(model).gathered) == set(stacks_of(whole))
        for block in model if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        assert equal(train(whole), train(model)), (experts, recipe, compiled)
    reasons = fp8_all_gather(sharded(model_of(3, recipe="mxfp8"))).wide
    assert set(reasons) == set(stacks_of(whole))
    assert all("reads other bytes of experts for dx" in reason for reason in reasons.values())


def bytes_of_experts(rank: int, recipe: str = "rowwise") -> None:
    """The gathered bytes and scales are those of one rank."""
    whole = model_of(3, count=1, recipe=recipe)
    model = sharded(whole)
    fp8_all_gather(model)
    same: list[bool] = []
    model[0].register_forward_pre_hook(lambda block, *_: same.extend(gathered_equal(block, whole[0])))
    model(batch())
    model(batch()[:0])  # no token: the weights are widened
    assert len(same) == 2 * 12
    assert all(same)


def traffic(rank: int) -> None:
    """The all-gathers of a step send little more than half the bytes of BF16."""
    sent = []
    for gathers in (False, True):
        model = sharded(model_of(4, count=1).bfloat16())
        if gathers:
            fp8_all_gather(model)
        with Traffic() as now:
            model(batch(rows=8).bfloat16()).sum().backward()
        sent.append(sum(now.of("allgather")))
    assert sent[1] < 0.6 * sent[0]


@pytest.mark.slow
@pytest.mark.parametrize("check", [trained, bytes_of_experts, partial(bytes_of_experts, recipe="blockwise"), traffic])
def test_experts_are_gathered_as_bytes(check: Callable[[int], None]) -> None:
    run_ranks(2, check)


# ---- Experts that FSDP2 shards in a watch, and promoted: what one rank with the same tokens finds


W = 1  # the operand


def brief(model: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """The records of a brief sample, those of operands in order."""
    with octavo.watch(model, interval=100) as watch:
        backward(model, 0, 96)
        watch.step()
        [(operands, layers)] = watch.take()
    return np.sort(operands, order=("layer", "operand")), layers


def of_ranks(rank: int) -> dict[str, Any]:
    whole = model_of(3)  # two ranks cannot share 3 evenly
    wide, gathered = sharded(whole), sharded(whole)
    fp8_all_gather(gathered)
    found: dict[str, Any] = {"one": brief(whole), "wide": brief(wide), "gathered": brief(gathered)}
    for block in (*whole, *gathered):
        promote(block.experts, "bf16")
    ours, theirs = train(gathered, steps=2), train(whole, steps=2)
    found["promoted"] = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
    return found


@pytest.mark.slow
def test_two_ranks_find_what_one_does() -> None:
    first, second = run_ranks(2, of_ranks)
    operands, layers = first["one"]
    assert len(operands) > 2 * 3 * 2
    for kind in ("wide", "gathered"):
        found, aligned = first[kind]
        for a, b in zip(first[kind], second[kind], strict=True):
            assert np.array_equal(a.view(np.uint8), b.view(np.uint8))
        assert np.array_equal(found[["layer", "operand"]], operands[["layer", "operand"]])
        for name in ("amax", "scale", "kurtosis", "nonfinite", "shift_lost"):
            known = operands["operand"] != W if kind == "gathered" and name in ("amax", "kurtosis") else slice(None)
            assert np.allclose(found[name][known], operands[name][known], rtol=1e-4, equal_nan=True), (kind, name)
        assert np.isnan(found["flushed"][found["operand"] == W]).all() == (kind == "gathered")
        assert np.allclose(aligned["alignment"], layers["alignment"], rtol=1e-5)
    assert first["promoted"] < 0.05  # the ranks read the numbers that bytes stand for


def first_of_two_dimensions(rank: int) -> tuple[int, list[int]]:
    """By `first_indices`, and the numbers of the matrices where expert parallelism and FSDP2 divide the experts."""
    mesh, model = mesh_of(2, 2), nn.Sequential(Experts(6, 16, 16))
    with torch.no_grad():
        model[0].down_proj.copy_(torch.arange(6.0).reshape(6, 1, 1))
    octavo.convert(model)
    expert_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    weight: Any = model[0].down_proj
    return first_indices(weight)[0], weight.to_local()[:, 0, 0].tolist()


def test_the_first_matrix_under_expert_parallelism_and_fsdp() -> None:
    found = run_ranks(4, first_of_two_dimensions)
    assert [numbers for _, numbers in found] == [[0, 1], [3, 4], [2], [5]]
    assert all(first == numbers[0] for first, numbers in found)


# ---- Experts that FSDP2 gathers in eight bits, on two GPUs and NCCL: bytes, numbers, training, and Inductor's code


SIZES = {"width": 256, "mlp_width": 128}
ROWS_GPU = 256


def step(model: nn.Module, seed: int) -> Tensor:
    poison()
    with torch.autocast("cuda", torch.bfloat16):
        return backward(model, seed, ROWS_GPU)


def gathered(whole: nn.Sequential) -> dict[str, Any]:
    """The bytes of the first block's stacks against the reference on the CPU, and its experts' output in dB."""
    model, same, decibels = sharded(whole), [], []

    def compare(module: Any, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        x, index, weight = inputs
        leaves = (t.double() for t in (x, weight, whole[0].experts.gate_up_proj, whole[0].experts.down_proj))
        decibels.append(sqnr(exact_experts(*leaves, index), y))

    fp8_all_gather(model)
    model[0].register_forward_pre_hook(lambda block, *_: same.extend(gathered_equal(block, whole[0])))
    model[0].experts.register_forward_hook(compare)
    poison()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for rows in (ROWS_GPU, 0):  # without tokens, the weights are widened
            model(batch(rows=rows, width=SIZES["width"]).cuda())
    return {"bytes": len(same) == 2 * 12 and all(same), "dB": decibels[0]}


def compiled_gpu(whole: nn.Sequential, *, gather: bool) -> list[Tensor]:
    torch._dynamo.reset()
    model: Any = sharded(whole)
    if gather:
        fp8_all_gather(model)
    for block in model:
        block.compile(fullgraph=True)
    return train(model, step)


def on_two_gpus(rank: int) -> dict[str, Any]:
    use_gpus(rank)
    found: dict[str, Any] = {}
    for experts in (4, 3):  # two ranks cannot share 3 evenly
        whole = model_of(experts, **SIZES).cuda()
        model = sharded(whole)
        found[f"all {experts}"] = set(fp8_all_gather(model).gathered) == set(stacks_of(whole))
        found[f"trained {experts}"] = equal(train(whole, step), train(model, step))
    found |= gathered(model_of(3, **SIZES).cuda())
    whole = model_of(3, **SIZES).cuda()
    found["compiled"] = equal(compiled_gpu(whole, gather=False), compiled_gpu(whole, gather=True))
    return found


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_compute_what_one_does() -> None:
    for found in run_ranks(2, on_two_gpus):
        assert found.pop("dB") > 22
        assert all(found.values()), found


# ---- Experts on several ranks: the outputs and gradients of one process that has all experts and all tokens


E, K, HIDDEN, TOKENS, TOP_K = 8, 32, 48, 12, 2


def layer(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return converted_model(nn.ModuleDict({"experts": Experts(E, K, HIDDEN).bfloat16()}), recipe)


def given(world: int) -> list[Tensor]:
    """x, experts, weights and the gradient of the output for the tokens of all ranks; experts 2 and 3 see no token."""
    torch.manual_seed(1)
    score = torch.rand(world * TOKENS, E)
    score[:, 2:4] = -1
    x, dy = (torch.randn(world * TOKENS, K).bfloat16() for _ in range(2))
    return [x, score.topk(TOP_K).indices, torch.rand(world * TOKENS, TOP_K), dy]


def computed(model: nn.Module, x: Tensor, index: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = model["experts"](x, index, weight)
    y.backward(dy)
    gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {"y": y.detach(), "dx": x.grad, "dweight": weight.grad, **whole}


def on_a_rank(rank: int, world: int, recipe: str) -> dict[str, Any]:
    model = layer(recipe)
    assert expert_parallel(model, init_device_mesh("cpu", (world,))) == ["experts"]
    assert model["experts"].down_proj.to_local().shape == (E // world, K, HIDDEN)
    own = slice(rank * TOKENS, (rank + 1) * TOKENS)
    found = computed(model, *(t[own] for t in given(world)))
    return {name: t.float().numpy() for name, t in found.items()}  # a tensor would be shared memory of this process


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "least"), [("bf16", 44), ("rowwise", 26)])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_compute_what_one_process_computes(world, recipe, least):
    expected = computed(layer(recipe), *given(world))
    arrays = run_ranks(world, on_a_rank, world, recipe)
    found = [{name: torch.from_numpy(array) for name, array in each.items()} for each in arrays]
    for name in ("y", "dx", "dweight"):
        together = torch.cat([each[name] for each in found])
        assert sqnr(expected[name], together) > (44 if name == "y" else least), name  # dweight is of y here, not of dh
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert all(torch.equal(each[name], found[0][name]) for each in found)
        assert sqnr(expected[name], found[0][name].float() * world) > least
        assert not found[0][name][2:4].any()


def model_of_transformers(rank: int) -> None:
    """Each of two ranks has the loss of one process, before the conversion, nearly after it, and restored."""
    tokens = torch.arange(32).view(2, 16)[rank : rank + 1]
    expected = built("mixtral")(tokens, labels=tokens).loss.item()
    model = built("mixtral")
    names = expert_parallel(model, init_device_mesh("cpu", (2,)))
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    octavo.convert(model)  # after the experts are shared
    after = model(tokens, labels=tokens).loss
    after.backward()
    assert after.item() == pytest.approx(expected, rel=0.1)
    octavo.restore(model)
    assert torch.equal(model(tokens, labels=tokens).loss, loss)


@pytest.mark.slow
def test_a_model_of_transformers():
    run_ranks(2, model_of_transformers)


def refused(rank: int) -> None:
    for model, shape, words in (
        (nn.Linear(4, 4), (3,), "Linear has no experts that octavo.convert knows"),
        (layer("bf16"), (3,), "experts has 8 experts, which 3 ranks cannot share evenly"),
        (layer("bf16"), (3, 1), "expert_parallel takes a mesh of one dimension"),
    ):
        with pytest.raises(ValueError, match=words):
            expert_parallel(model, init_device_mesh("cpu", shape))


def test_bad_input_is_named():
    run_ranks(3, refused)
