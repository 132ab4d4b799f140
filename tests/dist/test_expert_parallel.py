"""Experts on several ranks: the outputs and gradients of one process that has all experts and all tokens."""

from typing import Any

import pytest
import torch
from metrics import sqnr
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM

import octavo
from octavo.dist import expert_parallel
from octavo.nn import Experts

E, K, HIDDEN, TOKENS, TOP_K = 8, 32, 48, 12, 2


def layer(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Experts(E, K, HIDDEN).bfloat16()})
    octavo.convert(model, recipe)
    return model


def given(world: int) -> list[Tensor]:
    """x, experts, weights and the gradient of the output for the tokens of all ranks; experts 2 and 3 see no token."""
    torch.manual_seed(1)
    score = torch.rand(world * TOKENS, E)
    score[:, 2:4] = -1
    x, dy = (torch.randn(world * TOKENS, K).bfloat16() for _ in range(2))
    return [x, score.topk(TOP_K).indices, torch.rand(world * TOKENS, TOP_K), dy]


def computed(model: nn.Module, x: Tensor, index: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = model["experts"](x, index, weight)  # type: ignore[index]
    y.backward(dy)
    gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {"y": y.detach(), "dx": x.grad, "dweight": weight.grad, **whole}  # type: ignore[dict-item]


def on_a_rank(rank: int, world: int, recipe: str) -> dict[str, Any]:
    model = layer(recipe)
    mesh = init_device_mesh("cpu", (world,))
    assert expert_parallel(model, mesh) == ["experts"]
    experts: Any = model["experts"]
    assert experts.down_proj.to_local().shape == (E // world, K, HIDDEN)
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
        assert sqnr(expected[name], together) > (least if name == "dx" else 44), name
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert all(torch.equal(each[name], found[0][name]) for each in found)
        assert sqnr(expected[name], found[0][name].float() * world) > least
        assert not found[0][name][2:4].any()


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(vocab_size=40, num_hidden_layers=2, num_local_experts=4, initializer_range=0.2, **sizes)
    return MixtralForCausalLM(config)


def trained(rank: int) -> tuple[list[float], list[str]]:
    model = mixtral()
    names = expert_parallel(model, init_device_mesh("cpu", (2,)))
    tokens = torch.arange(32).view(2, 16)[rank : rank + 1]
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    octavo.convert(model)  # after the experts are shared
    after = model(tokens, labels=tokens).loss
    after.backward()
    octavo.restore(model)
    assert torch.equal(model(tokens, labels=tokens).loss, loss)
    return torch.stack([loss, after]).tolist(), names


@pytest.mark.slow
def test_a_model_of_transformers():
    tokens = torch.arange(32).view(2, 16)
    expected = [mixtral()(row[None], labels=row[None]).loss.item() for row in tokens]
    for (found, names), loss in zip(run_ranks(2, trained), expected, strict=True):
        assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        assert found[0] == pytest.approx(loss, rel=1e-5)
        assert found[1] == pytest.approx(loss, rel=0.1)


def refused(rank: int) -> list[str]:
    messages = []
    for model, shape in ((nn.Linear(4, 4), (3,)), (layer("bf16"), (3,)), (layer("bf16"), (3, 1))):
        with pytest.raises(ValueError) as error:  # noqa: PT011, the caller compares the message
            expert_parallel(model, init_device_mesh("cpu", shape))
        messages.append(str(error.value))
    return messages


def test_bad_input_is_named():
    for none, uneven, mesh in run_ranks(3, refused):
        assert none.startswith("Linear has no experts that octavo.convert knows")
        assert uneven.startswith("experts has 8 experts, which 3 ranks cannot share evenly")
        assert mesh.startswith("expert parallelism needs a mesh of one dimension")
