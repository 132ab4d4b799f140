"""Small models and layers that tests of tensor parallelism cut over ranks, and comparisons with one rank."""

import torch
import torch.nn.functional as F
from metrics import distance
from saved_checkpoints import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import octavo
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig

Model = nn.Module
SIZES = {"width": 64, "heads": 4, "context": 32, "layers": 1}
TRANSFORMERS = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip


def make_model(kind: str) -> Model:
    """A model with the same numbers at each call; "llama", "gpt2", or a class of transformers."""
    torch.manual_seed(0)
    if kind == "llama":
        return Llama(LlamaConfig(vocabulary=61, kv_heads=2, mlp_width=96, **SIZES))
    if kind == "gpt2":
        return GPT2(GPT2Config(vocabulary=61, **SIZES))
    import transformers

    cls = getattr(transformers, kind)
    return cls(cls.config_class(**TRANSFORMERS, tie_word_embeddings=kind.startswith("Qwen2")))


def two_layers() -> nn.Sequential:
    """A column-parallel layer and a row-parallel one, with a row of zeros and a row of small numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 96))
    with torch.no_grad():
        model[0].weight[3] = 0
        model[2].weight[5] *= 1e-5
    return model


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets [2, 32]."""
    both = torch.randint(61, (2, 2, 32), generator=torch.Generator().manual_seed(1))
    return both[0], both[1]


def logits_of(model: Model, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def train(model: Model, steps: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """The first logits and gradients of `steps` steps of AdamW on one batch, whole on each rank."""
    tokens, targets = batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        logits = logits_of(model, tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        if step == 0:
            first = whole(logits), {name: whole(p.grad) for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return first


def distance_of_all(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """`distance` of all tensors together."""
    assert actual.keys() == expected.keys()
    return distance(*(torch.cat([t.flatten() for t in side.values()]) for side in (actual, expected)))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def converted(kind: str, recipe: str | None, cut=None, *, first: bool = True) -> Model:
    """A model, converted by `recipe` before (`first`) or after `cut` was called with it."""
    model = make_model(kind)
    steps = [] if recipe is None else [lambda m: octavo.convert(m, recipe)]
    if cut is not None:
        steps = [*steps, cut] if first else [cut, *steps]
    for step in steps:
        step(model)
    return model
