"""The layer with the first number that is not finite, in each way to compute a step."""

import math

import pytest
import torch
from ranks import run_ranks
from torch import nn

from octavo.train.nonfinite import find_nonfinite

MODES = {
    "plain": {},
    "delayed": {"recipe": "delayed"},
    "checkpointing": {"activation_checkpointing": {"mode": "full"}},
    "compiled": {"compile": {"blocks": True, "backend": "eager"}},
    "gpt2": {"model": "gpt2"},
}


def found(trainer):
    return find_nonfinite(trainer.model, trainer.state.device, lambda: trainer.passes(trainer.state.step))


@pytest.fixture(params=MODES)
def trainer(begin, request):
    torch._dynamo.reset()  # other tests compile the same code, up to Dynamo's limit
    made = begin(**MODES[request.param])
    made.step()
    yield made
    made.lock.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo, which hides it
def test_the_layer_is_named_wherever_it_is(trainer):
    assert found(trainer) is None
    model = trainer.model.model
    decoder = getattr(model, "decoder", model)
    layer = decoder.layers[1].self_attn.k_proj
    name = next(name for name, module in trainer.model.named_modules() if module is layer)
    weight = layer.weight.detach().clone()
    nn.init.constant_(layer.weight, math.nan)
    assert str(found(trainer)) == f"w of {name}"
    layer.weight.data.copy_(weight)
    plants = {
        "y": lambda: layer.register_forward_hook(lambda module, args, y: y * math.inf),
        "x": lambda: layer.register_forward_pre_hook(lambda module, args: (args[0] * math.inf,)),
        "dx": lambda: layer.register_full_backward_hook(lambda module, dx, dy: (dx[0] * math.inf,)),
        "dy": lambda: layer.register_full_backward_pre_hook(lambda module, dy: (dy[0] * math.inf,)),
        "dw": lambda: layer.weight.register_hook(lambda dw: dw * math.inf),
    }
    for tensor, plant in plants.items():
        handle = plant()
        assert str(found(trainer)) == f"{tensor} of {name}", tensor
        handle.remove()
    assert found(trainer) is None
    assert all(p.grad is None for p in trainer.model.parameters())


def test_looking_leaves_the_run_as_it_was(begin, tmp_path):
    seen = []
    for look in (False, True):
        trainer = begin(recipe="delayed", dropout=0.5, out=str(tmp_path / str(look)))
        trainer.step()
        if look:
            found(trainer)
        seen.append(torch.stack([trainer.step()[0] for _ in range(2)]))
        trainer.lock.close()
    assert torch.equal(*seen)


def of_one_rank(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.full((2, 4), math.nan if rank == 1 else 1.0)
    return str(find_nonfinite(model, torch.device("cpu"), lambda: model(x).sum().backward()))


def test_all_ranks_are_told_what_one_has_found():
    assert run_ranks(2, of_one_rank) == ["x of 0"] * 2
