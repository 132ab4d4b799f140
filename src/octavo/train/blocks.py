"""The blocks of a model, and what is done to each of them: activation checkpointing and compilation.

Activation checkpointing (Chen et al., arXiv:1604.06174) is inside of the compiled code, so the compiler sees what the
backward pass computes again.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octavo.ops.inductor import register_lowerings
from octavo.train.config import Config, ConfigError

# Selective checkpointing saves the outputs of the first, and of every second of the others. Both are slow to compute:
# the first because their cost grows with the square of the sequence.
_ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
] + [torch.ops.octavo.fp8_attention.default]
_GEMMS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.octavo.scaled_mm.default]

SMALL = 1 << 27  # parameters: more than a block of a model of a billion has, less than one of Llama-3-8B


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The repeated blocks of a model, in order: the list of modules of one class that holds the most parameters.

    Raises:
        ConfigError: the model has no such list.
    """
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(entry) for entry in module}) == 1
    ]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} must have a list of equal blocks for compile.blocks, activation_checkpointing "
            "and parallel, and has none: leave these settings out"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def blocks_gathered_together(model: nn.Module) -> list[list[nn.Module]]:
    """The blocks of a model, in order, in lists that FSDP2 gathers and reduces together (`unit_size`)."""
    blocks = list(find_blocks(model))
    size = unit_size(max(sum(p.numel() for p in block.parameters()) for block in blocks))
    return [blocks[i : i + size] for i in range(0, len(blocks), size)]


def unit_size(parameters: int) -> int:
    """The blocks, of so many parameters each, in a unit of FSDP2: two if they are small together, else one.

    For each unit the host calls FSDP2's hooks and starts its collectives, which takes about as long as the other work
    of a small block, and the GPU would wait.
    """
    return 2 if 2 * parameters <= SMALL else 1


def prepare_blocks(model: nn.Module, config: Config) -> None:
    """Apply the tables `activation_checkpointing` and `compile` to the blocks of a converted model, in place.

    Raises:
        ConfigError: the model has no list of blocks, or the backend "eager" of `torch.compile` meets checkpointing.
    """
    mode = config.activation_checkpointing.mode
    if mode != "none":
        if config.compile.blocks and config.compile.backend == "eager":
            # PyTorch's autograd_function_apply saves the tensors of an autograd.Function, and every converted layer is
            # one, past the hooks of checkpointing. The other backends plan both passes in one graph.
            raise ConfigError(
                "activation_checkpointing requires a backend of torch.compile that computes converted layers again, "
                'and "eager" saves their tensors instead; got activation_checkpointing.mode '
                f"{mode} and compile.backend eager: give --compile.backend aot_eager or inductor, "
                "--no-compile.blocks, or --activation-checkpointing.mode none"
            )
        blocks: Any = find_blocks(model)
        for block in blocks:
            block.forward = _checkpointed(block.forward, _contexts(mode, compiled=config.compile.blocks))
            block.activation_checkpointing = mode  # read by octavo.watch
    if config.compile.blocks:
        if config.compile.backend == "inductor":
            register_lowerings()  # of a model in BF16 too, which has none of our operations
        for block in find_blocks(model):
            block.compile(backend=config.compile.backend)


def eager() -> AbstractContextManager[Any]:
    """Run compiled blocks as they were before, for passes that would compile them anew: with a cache, or with hooks."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def allow_compilations(count: int) -> None:
    """Let Dynamo compile the code of a block so many times more: beyond its limit it runs the code as it is.

    All blocks share their code. A block with a promoted layer is compiled by itself.
    """
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit += count


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # not a functools.partial, of which Dynamo would compile nothing
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return run


def _contexts(mode: str, *, compiled: bool) -> dict[str, Any]:
    """The argument of `checkpoint` that chooses what is saved.

    Compiled code needs a policy to save nothing too. Without one, PyTorch 2.11 recomputes no operation inside an
    autograd.Function that Dynamo traces. Layers that are observed or that have histories are traced
    (`octavo.nn.composite_operations`): their tensors would be saved, and no memory gained.
    """
    if mode == "selective":
        return {"context_fn": _selective}
    return {"context_fn": _nothing} if compiled else {}


def _nothing() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)  # type: ignore[no-untyped-call]


def _selective() -> Any:
    counts: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _GEMMS:
            counts[context.is_recompute] += 1
        saved = operation in _ATTENTION or (operation in _GEMMS and counts[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
