"""FP8 in torchtitan: a converter of its model configurations. Written for torchtitan 0.3.

    from octavo.integrations.torchtitan import FP8Converter

    config.model_spec = model_registry("8B", converters=[FP8Converter.Config(recipe="rowwise")])

torchtitan builds a model on the meta device from a tree of configurations, shards it, allocates its memory, and then
calls `init_states`. The converter replaces the configuration of each linear layer by one that builds an `FP8Linear`. It
also replaces the configuration of the model. The `init_states` of the new one prepares the sharded model for FP8: the
all-gather in eight bits (`octavo.distributed.fp8_all_gather`) and the update of delayed scales.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.distributed.activation_checkpoint import SelectiveAC as TitanSelectiveAC
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from octavo.distributed import fp8_all_gather
from octavo.nn import Linear
from octavo.nn.selection import check_globs, skipped_by_name
from octavo.recipe import get_recipe
from octavo.scales import scale_state, update_scales


class FP8Linear(Linear, Module):  # type: ignore[misc]
    """torchtitan's `Linear` that computes by a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):  # type: ignore[misc]
        """The settings of torchtitan's `Linear`, the recipe of the layer, and its name in the model."""

        recipe: str
        name: str

    def __init__(self, config: Config) -> None:
        nn.Linear.__init__(self, config.in_features, config.out_features, bias=config.bias)
        self.recipe, self.name, self.histories = get_recipe(config.recipe), config.name, None

    def _init_self_buffers(self, *, buffer_device: Any = None) -> None:
        # Scale histories are made here, on the device of the weight: on the meta device they would have no zeros.
        self.prepare(self.recipe, self.name, self.weight.device)


class FP8Converter(QuantizationConverter):  # type: ignore[misc]
    """Makes the linear layers of a model of torchtitan compute by a recipe.

    Output heads, routers, and layers that torchtitan computes in a way of their own stay as they are; the log says
    which. Put it before `LoRAConverter`, as torchtitan's own converters.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc]
        """The settings.

        Args:
            recipe: a preset's name (`octavo.recipe.PRESETS`).
            skip: globs of names of linear layers to leave as they are, as in `octavo.convert`.
        """

        recipe: str = "rowwise"
        skip: list[str] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The configuration of the converted model.

        Raises:
            ValueError: an unknown recipe, a glob of `skip` that matches nothing, or no layer left to convert.
        """
        get_recipe(self.config.recipe)
        layers = list(model_config.traverse(TitanLinear.Config))
        check_globs(self.config.skip, [name for name, *_ in layers])
        reasons = {name: self._skip_reason(name, linear) for name, linear, *_ in layers}
        skipped = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items() if reason)
        if all(reasons.values()):
            raise ValueError(f"every linear layer of the model is skipped, nothing would change:{skipped}")
        for name, linear, parent, key in layers:
            if not reasons[name]:
                ours = FP8Linear.Config(**_values(linear), recipe=self.config.recipe, name=name)
                if isinstance(parent, list):
                    parent[key] = ours
                else:
                    setattr(parent, key, ours)
        converted = len(layers) - skipped.count("\n")
        logger.info(f"octavo: {converted} linear layers compute by {self.config.recipe}; not converted:{skipped}")
        return _prepared(model_config)

    def _skip_reason(self, name: str, linear: Any) -> str:
        if type(linear) is not TitanLinear.Config:
            return f"a {type(linear).__qualname__.removesuffix('.Config')}, whose forward is its own"
        return skipped_by_name(name, linear.out_features, linear.in_features, self.config.skip)


def _values(config: Any) -> dict[str, Any]:
    return {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.init}


def _prepared(config: Any) -> Any:
    """The configuration of a model that is prepared for FP8 after torchtitan has sharded and initialized it."""
    owner, settings = config._owner, type(config)

    class FP8Model(owner):  # type: ignore[misc, valid-type]
        @dataclass(kw_only=True, slots=True)
        class Config(settings):  # type: ignore[misc, valid-type]
            pass

        def parallelize(self, parallel_dims: Any) -> None:
            _check(parallel_dims)
            super().parallelize(parallel_dims)

        def init_states(self, *args: Any, **kwargs: Any) -> None:
            super().init_states(*args, **kwargs)
            _finish(self)

    FP8Model.__name__ = FP8Model.__qualname__ = f"FP8{owner.__name__}"
    return FP8Model.Config(**_values(config))


def _check(parallel_dims: Any) -> None:
    """Raise an error for a division of the model that the layers cannot run, before its memory is allocated."""
    if parallel_dims.tp_enabled or parallel_dims.spmd_backend == "full_dtensor":
        raise NotImplementedError(
            "octavo's layers in torchtitan need tensor_parallel_degree=1 and spmd_backend='partial_dtensor', got "
            f"{parallel_dims.tp} and {parallel_dims.spmd_backend!r}: shard the model by FSDP2 alone. octavo train has "
            "tensor parallelism"
        )


def _finish(model: nn.Module) -> None:
    """Gather sharded weights in eight bits, and update scale histories after each optimizer step."""
    if isinstance(model, FSDPModule):
        logger.info(f"octavo: {fp8_all_gather(model)}")
    if not scale_state(model):
        return
    parameters = set(map(id, model.parameters()))

    def update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
            update_scales(model)

    register_optimizer_step_post_hook(update)  # called after the step of every optimizer in this process


class SelectiveAC(TitanSelectiveAC):  # type: ignore[misc]
    """torchtitan's selective activation checkpointing, which also saves the results of the FP8 GEMMs.

    torchtitan's own knows the GEMMs of PyTorch only, and computes those of Octavo again in the backward pass.

        config.activation_checkpoint = SelectiveAC.Config()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanSelectiveAC.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def get_save_ops(self) -> set[Any]:
        """The operations whose results are saved."""
        return {*super().get_save_ops(), torch.ops.octavo.scaled_mm.default}
