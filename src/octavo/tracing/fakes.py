"""Fake tensors in place of a model's parameters and inputs: shapes and dtypes without memory or arithmetic."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Fakes:
    """Makes fake tensors of the CPU, from tensors of any device. The same tensor gives the same fake tensor."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # here: it imports sympy

        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # the tensor too: while it lives, its id is its own

    def tensors_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Fake parameters and buffers by all their names, shared ones under each.

        Raises:
            ValueError: a parameter is sharded, or has no shape yet (a lazy module).
        """
        found: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if hasattr(parameter, "device_mesh"):
                raise ValueError(
                    f"a trace takes a model that is not sharded, and {name} is a DTensor: give the model before "
                    "fully_shard, on the meta device if it is large"
                )
            if isinstance(parameter, nn.UninitializedParameter):
                raise ValueError(f"{name} has no shape yet: run the lazy module once before a trace")
            found[name] = self.fake(parameter)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            found[name] = self.fake(buffer)
        return found

    def fake(self, value: Any) -> Any:
        """`value` with a fake tensor for each tensor in it."""
        return tree_map(lambda leaf: self._of(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def fake_meta(self, value: Any) -> Any:
        """`value` with a fake tensor for each tensor of the meta device that is none, as an attribute of a module."""
        from torch._subclasses.fake_tensor import FakeTensor

        def of(leaf: Any) -> Any:
            plain = isinstance(leaf, Tensor) and leaf.is_meta and not isinstance(leaf, FakeTensor)
            return self._of(leaf) if plain else leaf

        return tree_map(of, value)

    def _of(self, tensor: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        if id(tensor) not in self._known:
            meta = tensor.detach().to("meta")
            fake: Tensor = FakeTensor(self.mode, meta, torch.device("cpu"))
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
            self._known[id(tensor)] = tensor, fake
        return self._known[id(tensor)][1]


@contextmanager
def clear_errors(model: nn.Module) -> Iterator[None]:
    """Say in an error that it comes from a trace of `model`; PyTorch logs none of its own about fake tensors."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    logger, name = logging.getLogger("torch._subclasses.fake_tensor"), type(model).__name__
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"{name} cannot be traced: its code depends on the values of a tensor ({error}), and a trace has shapes "
            "only. Give it inputs for which it looks at no values (no mask, fixed lengths), or trace a part of it"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(f"{name} fails in a trace with these inputs and dtypes: {error}") from error
    finally:
        logger.disabled = disabled
