"""FP8 in torchtitan: a converter of its model configurations. Written for torchtitan 0.3.

    from octavo.integrations.torchtitan import FP8Converter

    config.model_spec = model_registry("8B", converters=[FP8Converter.Config(recipe="rowwise")])

torchtitan builds a model on the meta device from a tree of configurations, shards it, allocates its memory, and then
calls `init_states`. The converter replaces the configuration of each linear layer by one that builds an `FP8Linear`,
and that of experts by one whose grouped products run in FP8. It also replaces the configuration of the model. The
`init_states` of the new one prepares the sharded model for FP8: the all-gather in eight bits
(`octavo.distributed.fp8_all_gather`) and the update of delayed scales.

torchtitan's tensor parallelism hands DTensors from module to module. A block gathers its input, in BF16. An `FP8Linear`
computes on local tensors as `octavo.distributed.ColumnParallel` and `RowParallel` do, with the scales of the whole
tensors: a row-parallel one scatters its output along the sequence, and gathers dy as bytes and row scales.
"""

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.distributed.activation_checkpoint import SelectiveAC as TitanSelectiveAC
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import resolve_placements
from torchtitan.tools.logging import logger

from octavo.distributed import fp8_all_gather
from octavo.distributed.parallel_layers import Column, Row
from octavo.distributed.ranks import Ranks
from octavo.nn import Linear
from octavo.nn.conversion import reason_if_slower
from octavo.nn.conversion_report import Row as ReportRow
from octavo.nn.experts import grouped_linear
from octavo.nn.only_if_faster import find_speedups, skip_slower
from octavo.nn.selection import check_globs, skipped_by_name
from octavo.ops.dispatch import gemm_backends, runs_experts
from octavo.recipe import Recipe, get_recipe
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

    def parallelize(self, parallel_dims: Any) -> None:
        """Divide the layer over the ranks of tensor parallelism as its sharding configuration says."""
        super().parallelize(parallel_dims)
        config: Any = self._sharding_config
        if not isinstance(self.weight, DTensor):
            return
        mesh, (placement,) = self.weight.device_mesh, self.weight.placements
        if not isinstance(placement, Shard):
            raise NotImplementedError(
                f"octavo has no tensor parallelism for {self.name}, whose weight each rank has whole: leave it in BF16 "
                f"by FP8Converter.Config(skip=[{self.name!r}])"
            )
        if placement.dim == 0:
            self.parallel = Column(PartialSums.of(mesh, sequence=False))
            return
        # The layer scatters its output itself, to what torchtitan would make of a partial sum.
        config.out_src_shardings = config.out_dst_shardings
        (self.placement,) = resolve_placements(config.out_dst_shardings, mesh)
        self.parallel = Row(Ranks.of(mesh, sequence=isinstance(self.placement, Shard)))

    def forward(self, input: Any) -> Any:
        """y [..., N] of the input [..., K], a DTensor where the layer is divided."""
        if self.parallel is None:
            return super().forward(input)
        cuts_rows, mesh = self.parallel.cuts_rows, input.device_mesh
        # A column-parallel layer leaves the sum of dx to the block, which adds those of several layers first.
        x = input.to_local(grad_placements=[Shard(input.ndim - 1) if cuts_rows else Partial()])
        y = super().forward(x)
        return DTensor.from_local(y, mesh, [self.placement if cuts_rows else Shard(y.ndim - 1)], run_check=False)


class PartialSums(Ranks):
    """Ranks that have the whole sequence, and leave the sum over them to their caller."""

    def scatter(self, y: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return y


@cache
def fp8_experts(parent: Any) -> Any:
    """A class of torchtitan's experts that computes its grouped products by a recipe, from weights in BF16."""
    settings: Any = parent.Config

    class FP8Experts(parent):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(settings):  # type: ignore[misc]
            recipe: str

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.recipe = get_recipe(config.recipe)

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            return grouped_linear(self, A, B_t.transpose(-2, -1), offs)

    FP8Experts.__name__ = FP8Experts.__qualname__ = f"FP8{parent.__name__}"
    return FP8Experts


class FP8Converter(QuantizationConverter):  # type: ignore[misc]
    """Makes the linear layers and the experts of a model of torchtitan compute by a recipe.

    Output heads, routers, and layers that torchtitan computes in a way of their own stay as they are; the log says
    which. Put it before `LoRAConverter`, as torchtitan's own converters.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc]
        """The settings.

        Args:
            recipe: a preset's name (`octavo.recipe.PRESETS`).
            skip: globs of names of linear layers and experts to leave as they are, as in `octavo.convert`.
            only_if_faster: leave layers that FP8 would not speed up on this GPU, as in `octavo.convert`. It is
                torchtitan's `auto_filter_small_kn`, from times of this GPU or its kind.
            tokens: with `only_if_faster`, the rows of a layer's input: local_batch_size x seq_len.
        """

        recipe: str = "rowwise"
        skip: list[str] = field(default_factory=list)
        only_if_faster: bool = False
        tokens: int = 8192

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The configuration of the converted model.

        Raises:
            ValueError: an unknown recipe, a glob of `skip` that matches nothing, or no layer left to convert.
        """
        recipe = get_recipe(self.config.recipe)
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        layers = list(model_config.traverse(TitanLinear.Config))
        experts = list(model_config.traverse(GroupedExperts.Config))
        check_globs(self.config.skip, [name for name, *_ in (*layers, *experts)])
        rows = [ReportRow(n, (c.out_features, c.in_features), self._skip_reason(n, c)) for n, c, *_ in layers]
        if self.config.only_if_faster:
            shapes = {row.name: (self.config.tokens, row.shape[1], row.shape[0]) for row in rows if not row.reason}
            speedups = find_speedups(recipe, gemm_backends(recipe, device), device, set(shapes.values()))
            rows = [*skip_slower(rows, shapes, speedups)]
        reasons = {row.name: row.reason for row in rows}
        reasons |= {name: self._reason_of_experts(name, c, recipe, device) for name, c, *_ in experts}
        skipped = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items() if reason)
        if all(reasons.values()):
            raise ValueError(f"every linear layer of the model is skipped, nothing would change:{skipped}")
        for name, config, parent, key in (*layers, *experts):
            if not reasons[name]:
                values = _values(config) | {"recipe": self.config.recipe}
                stacked = isinstance(config, GroupedExperts.Config)
                ours = fp8_experts(config._owner).Config(**values) if stacked else FP8Linear.Config(**values, name=name)
                if isinstance(parent, list):
                    parent[key] = ours
                else:
                    setattr(parent, key, ours)
        converted = len(reasons) - skipped.count("\n")
        logger.info(f"octavo: {converted} layers compute by {self.config.recipe}; not converted:{skipped}")
        return _prepared(model_config)

    def _skip_reason(self, name: str, linear: Any) -> str:
        if type(linear) is not TitanLinear.Config:
            return f"a {type(linear).__qualname__.removesuffix('.Config')}, whose forward is its own"
        return skipped_by_name(name, linear.out_features, linear.in_features, self.config.skip)

    def _reason_of_experts(self, name: str, config: Any, recipe: Recipe, device: torch.device) -> str:
        if type(config)._owner.forward is not GroupedExperts.forward:
            return f"{type(config)._owner.__name__}, whose forward is its own"
        if not runs_experts(recipe):
            return f"experts do not run {recipe.name}"
        if self.config.only_if_faster and (slow := reason_if_slower((config.dim, config.hidden_dim), recipe, device)):
            return f"{slow}: left in BF16"
        return skipped_by_name(name, config.hidden_dim, config.dim, self.config.skip)


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
    backend = parallel_dims.spmd_backend
    if backend == "full_dtensor" or (parallel_dims.tp_enabled and backend != "partial_dtensor"):
        raise NotImplementedError(
            f"octavo's layers in torchtitan need spmd_backend='partial_dtensor', or FSDP2 alone, got {backend!r}: set "
            "config.parallelism.spmd_backend"
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
