"""Observing the tensors of a model while it runs in BF16.

    x -> norm -> y -> q_proj, k_proj, v_proj -> rotary -> Q K V -> attention -> z -> o_proj -> ...
            |    |                                     | | |                 |
     NORM.output Q_PROJ.input (of all three)     ATTN.q .k .v        O_PROJ.input

A site is one tensor of the computation. Linear layers that read the same tensor (query, key and value; gate and up)
share the site of the first of them, because one tensor has one scale, and readers that fuse such layers need one scale.
Queries, keys and values are observed after the rotation and before the heads of keys are repeated. For this an entry in
transformers' registry of attention functions observes its arguments and calls "sdpa", or the model's own function where
sdpa does not compute it (the softcap of Gemma 2).

Each expert of a mixture has two sites: the input of its gate and up matrices, which is the tokens that the router chose
it for, and the input of its down matrix, which is computed here a second time. The sites of an expert without a token
saw none.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from octavo.calibration.statistics import Statistics
from octavo.hf.expert_names import ExpertMatrices

KINDS = ("input", "norm", "query", "key", "value")
_ATTENTION = "octavo_observe"


@dataclass(eq=False)
class Observed:
    """A site: its kind, its statistics, and for the kind `input` the linear layers that read it, in order."""

    kind: str
    statistics: Statistics
    layers: list[str] = field(default_factory=list)


class Observer:
    """Collects statistics of a model of transformers inside a `watch` block, for the batches of `looking` blocks.

    Args:
        model: of transformers. Its modules may be on the meta device.
        linears: the names of the linear layers that packing would pack.
        experts: the matrices of the experts of each module of experts, by their names in the files.
    """

    def __init__(
        self, model: Any, linears: Sequence[str], experts: Mapping[str, Sequence[ExpertMatrices]] | None = None
    ) -> None:
        self._model, self._experts = model, experts or {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._linears = set(linears)
        self._found: dict[str, Observed] = {}
        self._looking = False
        self._measured: dict[int, _Measured] = {}
        self._read: dict[str, _Measured] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Install the hooks and the attention function in this block."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if name in self._linears:
                    hook = module.register_forward_pre_hook(self._before_linear(name), with_kwargs=True)
                elif name in self._experts:
                    hook = module.register_forward_pre_hook(self._before_experts(self._experts[name]))
                elif is_norm(module):
                    hook = module.register_forward_hook(self._after_norm(name))
                else:
                    continue
                hooks.enter_context(hook)
            hooks.enter_context(_attention(self._model, self._attention))
            yield

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Observe the tensors in this block, in which one batch passes one part of the model."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False
            self._measured.clear()
            self._read.clear()

    def take(self) -> dict[str, Observed]:
        """Return the sites observed since the last call, by name, and forget them."""
        found, self._found = self._found, {}
        return found

    # --- Hooks -------------------------------------------------------------------------------------------------------

    def _before_linear(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._looking:
                self._see_input(name, args[0] if args else kwargs["input"])

        return hook

    def _before_experts(self, experts: Sequence[ExpertMatrices]) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
            if self._looking:
                x, index, _ = args
                for e, names in enumerate(experts):
                    n = x[(index == e).any(1)]
                    gate, up = linear(n, module.gate_up_proj[e]).chunk(2, -1)
                    self._see(f"{names.gate}.input", "input", n, (names.gate, names.up))
                    self._see(f"{names.down}.input", "input", module.act_fn(gate) * up, (names.down,))

        return hook

    def _after_norm(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if self._looking:
                self._see(f"{name}.output", "norm", output)

        return hook

    def _attention(self, sdpa: Callable[..., Any]) -> Callable[..., Any]:
        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._looking:
                name = self._names[id(module)]
                for kind, x in (("query", query), ("key", key), ("value", value)):  # [B, heads, T, d]
                    self._see(f"{name}.{kind[0]}", kind, x.transpose(1, 2).flatten(2))  # [B, T, heads * d]
            return sdpa(module, query, key, value, *args, **kwargs)

        return attention

    # --- Statistics --------------------------------------------------------------------------------------------------

    def _see_input(self, name: str, x: Tensor) -> None:
        for site, measured in self._read.items():
            if measured.is_of(x):
                layers = self._found[site].layers
                if name not in layers:
                    layers.append(name)
                return
        site = f"{name}.input"
        self._read[site] = self._see(site, "input", x)
        if name not in self._found[site].layers:
            self._found[site].layers.append(name)

    def _see(self, site: str, kind: str, x: Tensor, layers: Sequence[str] = ()) -> _Measured:
        measured = self._measured.get(id(x))
        if measured is None or not measured.is_of(x):  # a norm's output is often a linear layer's input: counted once
            measured = self._measured[id(x)] = _Measured(x, Statistics(site).update(x))
        found = self._found.setdefault(site, Observed(kind, Statistics(site), list(layers)))
        found.statistics.merge(measured.statistics)
        return measured


class _Measured:
    """The statistics of one tensor. It is recognized while it exists and is not written to."""

    def __init__(self, x: Tensor, statistics: Statistics) -> None:
        self._tensor, self._version, self.statistics = weakref.ref(x), x._version, statistics

    def is_of(self, x: Tensor) -> bool:
        return self._tensor() is x and x._version == self._version


def is_norm(module: nn.Module) -> bool:
    """Whether this is a normalization over channels, of torch or of transformers, which has a class for each model."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


@contextmanager
def _attention(model: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let `model` attend by wrap(sdpa), or by wrap(eager) if transformers opens it so, with the masks of that."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions: Any = ALL_ATTENTION_FUNCTIONS
    before = model.config._attn_implementation
    kind = "eager" if before == "eager" else "sdpa"
    functions[_ATTENTION] = wrap(_eager if kind == "eager" else functions["sdpa"])
    AttentionMaskInterface.register(_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[kind])
    try:
        model.set_attn_implementation(_ATTENTION)
        yield
    finally:
        model.set_attn_implementation(before)
        del functions[_ATTENTION]


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of transformers, of which the file of each model has one."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def check_seen(found: dict[str, Observed], linears: Sequence[str], where: str) -> None:
    """Raise a ValueError unless each of `linears` read exactly one site, which saw a token.

    `where` names the part of the model that has run, for the message.
    """
    sites: dict[str, list[str]] = {}
    for site, observed in found.items():
        for layer in observed.layers if observed.statistics.tokens else ():
            sites.setdefault(layer, []).append(site)
    if blind := [name for name in linears if name not in sites]:
        raise ValueError(
            f"{blind[0]} saw no token in all of the data ({len(blind)} layers of {where}): a scale for it would be a "
            "guess. Give more or other data, so that every layer (every expert) is used"
        )
    if torn := [name for name in linears if len(sites[name]) > 1]:
        raise ValueError(
            f"{torn[0]} shares its input with another layer in some batches and not in others "
            f"({', '.join(sites[torn[0]])}): such a model cannot be calibrated"
        )
