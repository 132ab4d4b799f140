"""Which linear layers of a model run in FP8, and more precision for one of a converted model."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from octavo.nn.conversion_report import find_coverage
from octavo.nn.linear import Linear, RecipeLayer
from octavo.nn.module_tools import computes_linearly, is_conv1d, is_fsdp_module, is_of_library, plain_name, shape_of
from octavo.nn.parallel_weights import ParallelLinear, device_of
from octavo.numerics.formats import NARROW_FORMATS
from octavo.ops.dispatch import gemm_backends
from octavo.ops.registration import FLOATS
from octavo.recipe import Gemm, Recipe

# ---- Which layers of a model are linear, and which are skipped: for conversion, packing and calibration alike.


# Output heads and routers: their logits feed a softmax, few FLOPs, and errors there go straight into the loss.
DEFAULT_SKIP = (
    "lm_head", "*.lm_head", "head", "*.head", "head.fc", "*.head.fc", "score", "*.score", "classifier",
    "*.classifier", "embed_out", "*.embed_out", "router", "*router", "*router.*", "*.router_mlp.*", "*.router_gate",
    "gate", "*.gate", "*.gate.down_proj", "*.gate.wg", "*.shared_expert_gate",
)  # fmt: skip

ATTENTION_OUTPUT = "multi-head attention reads its weight directly and never calls it"
STATE_SPACE = "the state-space layer reads its weight directly and never calls it"
REPLACED = "its forward was replaced, as Accelerate's hooks do: convert the model before that"
TP_PLAN = "transformers' tp_plan cut it: open the model without tp_plan, convert it, and call tensor_parallel"


class SelectedLayer(NamedTuple):
    """One linear layer of a model: its name, the module, and why it is skipped ("" where it is not)."""

    name: str
    module: nn.Module
    reason: str


def select_linears(model: nn.Module, skip: Sequence[str] = (), others: Sequence[str] = ()) -> list[SelectedLayer]:
    """Every `nn.Linear` and `Conv1D` of `model`, in the order of its modules, with the reason why it is skipped.

    Output heads and routers (`DEFAULT_SKIP`) are skipped, layers that `skip` matches, and layers whose weight is an
    embedding's. So are layers that no recipe can run: a subclass with its own forward, a weight of another dtype, a
    unit of its own in FSDP. The model is not changed and may be on the meta device.

    Args:
        model: converted or not.
        skip: globs of names of linear layers, or of `others`.
        others: names of other modules that can be converted. Where there are some, no linear layer need be left.

    Raises:
        ValueError: `model` has no linear layer, every one is skipped, or a glob of `skip` matches none.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) or is_conv1d(m)}
    if not linears and not others:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to convert: FP8 is for models with linear layers. "
            f"{_other_matrices(model)}"
        )
    check_globs(skip, [*linears, *others])
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and not is_parametrized(m)}
    read = {id(m.out_proj): ATTENTION_OUTPUT for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    read |= {id(m.dt_proj): STATE_SPACE for m in model.modules() if hasattr(m, "dt_proj") and hasattr(m, "A_log")}
    selected = [SelectedLayer(name, m, _skip_reason(name, m, skip, tied, read)) for name, m in linears.items()]
    if all(layer.reason for layer in selected) and not others:
        reasons = "\n".join(f"  {layer.name}: {layer.reason}" for layer in selected)
        raise ValueError(
            f"every linear layer of {type(model).__name__} is skipped, nothing would change:\n{reasons}\n"
            f"{_other_matrices(model)}"
        )
    return selected


def _other_matrices(model: nn.Module) -> str:
    """The matrices of a model without a linear layer to convert, in a sentence."""
    quantized = {f.dtype for f in NARROW_FORMATS.values()}
    if any(t.dtype in quantized for t in (*model.parameters(), *model.buffers())):
        return (
            "It has weights in eight bits already: convert the model in BF16 that it was made from, or the one that "
            "octavo unpack makes of a packed folder."
        )
    left = find_coverage(model, ()).left
    if not left:
        return "None of its other parameters is read by a matrix product."
    return f"Its matrices are {'; '.join(map(str, left[:8]))}: octavo does not convert these."


def check_strings(skip: object) -> None:
    """Raise a TypeError unless `skip` is a list of strings. A string is a list of its letters, and no list of globs."""
    if isinstance(skip, str):
        raise TypeError(f"skip takes a list of globs, got the string {skip!r}: give [{skip!r}]")
    if not isinstance(skip, Collection) or not all(isinstance(glob, str) for glob in skip):
        raise TypeError(f"skip takes a list of globs, got {skip!r}: give ['lm_head'], or leave it out")


def check_globs(skip: Sequence[str], names: Sequence[str]) -> None:
    """Raise a ValueError for a glob of `skip` that matches none of the layers `names`; the error of `check_strings`."""
    check_strings(skip)
    for glob in skip:
        if not any(fnmatchcase(name, glob) for name in names):
            first = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            raise ValueError(f"skip={glob!r} matches no linear layer; the model has {len(names)}, named {first}")


def _skip_reason(name: str, module: nn.Module, skip: Sequence[str], tied: set[int], read: dict[int, str]) -> str:
    weight: Any = None if is_parametrized(module) else module.weight  # to compute it may change the module
    outputs, inputs = shape_of(module)
    if id(weight) in tied:
        return "it shares its weight with the embedding"
    if isinstance(module, Linear) and (is_fsdp_module(module) or is_parametrized(module)):
        change = "fully_shard made it a unit of its own" if is_fsdp_module(module) else "it was parametrized"
        return f"{change} after an earlier conversion: it still runs {module.recipe.name}"
    if by_name := skipped_by_name(name, outputs, inputs, skip):
        return by_name
    if is_fsdp_module(module):
        return "fully_shard made it a unit of its own: convert the model before fully_shard"
    if id(module) in read and not is_parametrized(module):
        return read[id(module)]
    known = type(module) in (Linear, ParallelLinear) or is_of_library(module, "transformers", "Conv1D")
    if is_of_library(module, "torchao", "Float8Linear"):
        return "torchao converted it (Float8Linear): octavo.restore(model) makes it an nn.Linear again"
    if not known and not computes_linearly(module):
        return f"a {type(module).__name__}, whose forward is its own"
    if "forward" in vars(module) and not isinstance(module, RecipeLayer):
        return TP_PLAN if hasattr(weight, "device_mesh") else REPLACED
    if not isinstance(weight, nn.Parameter):
        return "its weight is no parameter, but computed from some, as torch.nn.utils.prune does"
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}: FP8 is computed from float32, bfloat16 or float16"
    return ""


def skipped_by_name(name: str, outputs: int, inputs: int, skip: Sequence[str]) -> str:
    """Why the name of a layer [N, K] skips it (`DEFAULT_SKIP` or `skip`), or ""."""
    plain = plain_name(name)
    for glob in DEFAULT_SKIP:
        is_router = outputs < inputs or "gate" not in glob  # the gate of an MLP has more outputs than inputs
        if fnmatchcase(plain, glob) and is_router:
            return f"an output head or router ({glob})"
    return next((f"skip={glob!r}" for glob in skip if fnmatchcase(name, glob)), "")


# ---- Giving a converted layer more precision while its model trains: BF16, or gradients in e5m2.
#
# A checkpoint from before the change fits the model after it. A module that fuses layers of one recipe runs them one by
# one when their recipes differ. Compiled code of the block is compiled again at its next call. Experts move together.


def promote(layer: Any, to: str) -> None:
    """Change the recipe of `layer`, linear or of experts, in place. Leave the block of `cast_once` first.

    `to` is "bf16", for all three GEMMs, or "e5m2", for dy in place of e4m3, which has 14 binades less. A weight that
    FSDP2 gathers in eight bits (`octavo.distributed.fp8_all_gather`) is still gathered so: in BF16 the GEMMs then read
    the numbers that the eight bits stand for.
    """
    if to not in ("bf16", "e5m2"):
        raise ValueError(f"a layer can move to bf16 or e5m2; got {to!r}")
    if getattr(layer, "recipe", None) is None:
        raise ValueError(
            f"promote takes a layer of a model that octavo.convert has converted; got {type(layer).__name__}"
        )
    if to == "bf16":
        layer.recipe = Recipe("bf16", emulate=layer.recipe.emulate)
        return
    if (recipe := e5m2_gradients(layer)) is None:
        raise ValueError(
            f"the gradients of {layer._layer_name} cannot move to e5m2: {layer.recipe.name} has no dy in e4m3, or "
            f"{next(layer.parameters()).device} has no GEMM for e5m2. Move the layer to bf16"
        )
    layer.recipe, history = recipe, layer.history_of("dy")
    if history is not None and recipe.dy is not None:
        with torch.no_grad():
            history.scale.mul_(history.cast.fmt.max / recipe.dy.fmt.max)
        history.cast = recipe.dy


def e5m2_gradients(layer: Any) -> Recipe | None:
    """The recipe of `layer` with dy in e5m2; None if its dy is not in e4m3, or its device lacks the GEMMs."""
    recipe: Recipe = layer.recipe
    # No device has the grouped GEMMs of experts in e5m2.
    if not isinstance(layer, RecipeLayer) or recipe.dy is None or not recipe.dy.format.startswith("e4m3"):
        return None
    wider = replace(recipe, name=f"{recipe.name}_e5m2", dx=_in_e5m2(recipe.dx), dw=_in_e5m2(recipe.dw))
    backends = gemm_backends(wider, device_of(next(layer.parameters()))).values()
    return wider if recipe.emulate or all(backend.name != "none" for backend in backends) else None


def _in_e5m2(gemm: Gemm | None) -> Gemm | None:
    return None if gemm is None else replace(gemm, a=replace(gemm.a, format=gemm.a.format.replace("e4m3", "e5m2")))
