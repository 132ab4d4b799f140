"""`convert`: change a model's linear layers in place so that they compute by a recipe, and report which ones."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from octavo.nn.attention_layers import (
    GradientScales,
    MultiheadAttention,
    find_attention,
    input_weights,
    is_convertible,
    use_bf16_attention,
    use_fp8_attention,
)
from octavo.nn.conversion_report import Conversion, ForwardPass, Row, find_coverage, trace_forward
from octavo.nn.experts import LEAST_SIDE, Experts, GroupedLinear
from octavo.nn.fused_loss import HeadRecipe, LossEmbedding, LossHead, LossModel, find_loss, join_loss
from octavo.nn.fused_modules import SILU, DecoderLayer, NormLinear, SwiGLU, fuse_blocks, mark_saved_inputs
from octavo.nn.linear import CONVOLUTIONS, OURS, Conv1D, RecipeLayer, convert_layer, is_gemm, reads_image, restore_layer
from octavo.nn.module_tools import (
    check_initialized,
    check_module,
    is_fsdp_module,
    is_of_library,
    library_of,
    mix_into,
    own_class,
    parts_of,
    shape_of,
    unmix,
)
from octavo.nn.only_if_faster import find_speedups, gemm_shapes, skip_slower, skip_uncalled
from octavo.nn.selection import ATTENTION_OUTPUT, REPLACED, SelectedLayer, select_linears, skipped_by_name
from octavo.ops import Backend
from octavo.ops.dispatch import choose_recipe, gemm_backends, runs_experts
from octavo.ops.grouped_gemm import ALIGNMENT
from octavo.ops.launching import find_architecture
from octavo.ops.registration import FLOATS
from octavo.rates.measured import LEAST_SPEEDUP, experts_speedup
from octavo.recipe import PRESETS, Recipe, RecipeName, get_recipe, rowwise, similar_preset
from octavo.util import check_kinds, choose_device


def convert(
    model: nn.Module,
    recipe: RecipeName | Literal["auto"] | Path | Recipe = "rowwise",
    *,
    skip: Sequence[str] = (),
    emulate: bool = False,
    only_if_faster: bool = False,
    tokens: int = 8192,
    batch: Any = None,
    device: torch.device | str | None = None,
    fuse_loss: bool = False,
    head: HeadRecipe = "bf16",
    attention: Literal["bf16", "fp8"] = "bf16",
    recompute: bool = False,
) -> Conversion:
    """Change the linear layers of `model` in place into layers that compute by `recipe`.

    Parameters and `state_dict` stay as they are. A layer changes its class, not its identity: hooks, tied parameters
    and references to it keep working. `octavo.restore` undoes the conversion. A layer that an earlier conversion
    changed, and that this one skips, is restored. One that has this recipe already keeps its scale histories, and those
    that are frozen; `octavo.restore` deletes them.

    The `Conv1D` of transformers' GPT-2 is converted too: it is a linear layer whose weight is stored transposed. With a
    fusable recipe (`rowwise`), `NormLinear`, `SwiGLU`, `GELU` and `GEGLU` quantize in the pass that computes the norm
    or the activation. So do the decoder layers of transformers' Llama, Mistral, Qwen2 and Qwen3
    (`octavo.architectures`), the blocks of timm's vision transformers, and the transformer blocks of diffusers' U-Nets.
    With such a recipe, or `blockwise`, `mxfp8` or `groupwise`, experts run grouped GEMMs in FP8: `octavo.nn.Experts`,
    `GroupedLinear`, and those of transformers that compute as Mixtral's. With other recipes, or skipped, these compute
    in the dtype of autocast, which by itself leaves them in that of their weights. `nn.MultiheadAttention` is converted
    (`octavo.nn.attention_layers`), and so are convolutions that are matrix products: those of size 1, and those of
    disjoint patches (`octavo.nn.linear`), but not one that reads an image. `nn.TransformerEncoderLayer` leaves
    PyTorch's fast path, which would not call its converted layers.

    Args:
        model: any module. Embeddings and norms are not linear layers and stay; output heads and routers are skipped.
        recipe: a preset's name, the path of the .json or .toml file of a recipe, a `Recipe`, or "auto": `rowwise` if
            the device of `model` has its GEMMs, else the nearest recipe that runs there (the report names it).
        skip: globs of names of layers, or of modules of experts or attention, to leave in high precision, in addition
            to `DEFAULT_SKIP` and heads tied to an embedding.
        emulate: on a GPU without the GEMMs of the recipe, compute them slowly in float32 instead of raising an error.
        only_if_faster: leave in BF16 each layer whose forward and backward pass FP8 would not speed up on the device
            that `model` is on (`octavo.nn.only_if_faster`; the report has the figures; layers that run as one GEMM are
            judged as one). All layers stay in BF16 if together they are too little work to hide the longer launches of
            FP8, and where FP8 is emulated or has no GEMM; that is no error. On an unknown GPU the layers are timed
            first.
        tokens: with `only_if_faster`, the rows of each layer's input in a forward pass: batch x sequence.
        batch: an input of the model, in place of `tokens`: a tensor, a sequence of positional arguments, or a mapping
            of keyword arguments. A forward pass is traced without memory or arithmetic. It gives the rows of each
            layer, and for the report the FLOPs of each parameter. Layers that are read and never called are skipped.
        device: where the model will run, which decides the GEMMs. By default the device of its weights; for a model on
            the meta device, this machine's accelerator, or else the CPU.
        fuse_loss: of a causal model of transformers in training: `model(input_ids, labels=labels).loss` is computed
            from the inputs of the head, 4,096 tokens at a time, so that the logits never exist as a whole, and
            `.logits` is None. It takes `num_items_in_batch`, `ignore_index` and `shift_labels` as transformers' loss
            does, so Trainer and Lightning need no change. In evaluation, and without labels, the logits are whole.
            Of a model that returns logits alone, as those of `octavo.models`, `model(tokens, labels=tokens)` is the
            loss, by the same options, of each logit and the next label. The recipe "bf16" quantizes nothing else.
        head: with `fuse_loss`, "rowwise" computes the three products of the head in FP8: faster than "bf16" where the
            vocabulary is large, at a cost in loss that docs/loss.md has.
        attention: "fp8" computes causal attention in E4M3 too (`octavo.nn.use_fp8_attention`). "bf16" leaves it as it
            is. `octavo.restore` puts it back into BF16.
        recompute: of MLPs and experts that run fused: the backward pass computes the outputs of gate and up again, from
            the same bytes, so they are not saved. That is most of the memory of a block's activations, for one GEMM
            more. Every bit of the gradients stays.

    Returns:
        The report: which layers were converted, which were skipped and why, the backend of each GEMM, and the
        parameters that stay in high precision, with their shares of the model's FLOPs and parameters.

    Raises:
        TypeError: `model` is not a module, `recipe` neither a name nor a `Recipe`, `skip` no list of strings, or
            `emulate`, `only_if_faster`, `fuse_loss` or `recompute` no bool.
        ValueError: an unknown recipe, a GPU that is not here or lacks the GEMMs of the recipe, a lazy parameter without
            a shape, a glob of `skip` that matches nothing, no linear layer left to convert, a layer to restore whose
            forward was replaced, or a `batch` with which the model cannot be traced; with `fuse_loss`, a model whose
            logits are not the outputs of a linear layer without bias, scaled or capped; with `attention="fp8"`, what
            `use_fp8_attention` refuses; with `recompute`, a recipe or a model without MLPs and experts that run fused.
        RuntimeError: the forward pass fails with `batch`.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> octavo.convert(model, "rowwise", skip=["2"]).converted
        ['0']
    """
    check_module(model, "convert")
    check_initialized(model)
    if head not in get_args(HeadRecipe) or (head != "bf16" and not fuse_loss):
        raise ValueError(f"head takes 'bf16', or with fuse_loss=True 'rowwise'; got {head!r}, fuse_loss={fuse_loss}")
    if attention not in ("bf16", "fp8"):
        raise ValueError(f"attention must be 'bf16' or 'fp8', got {attention!r}")
    flags = {"only_if_faster": only_if_faster, "fuse_loss": fuse_loss, "recompute": recompute}
    check_kinds(flags, dict.fromkeys(flags, bool), error=TypeError)
    changing = model.modules() if recompute else ()  # which alone is refused after the first change
    before: list[Any] = [(m, type(m), vars(m) | {"_modules": dict(m._modules)}) for m in changing]
    for module in list(model.modules()):
        if isinstance(module, LossModel | LossHead | LossEmbedding):
            unmix(module)
    loss = find_loss(model) if fuse_loss else None
    products, experts = select_products(model, skip), find_experts(model)
    linears = select_linears(model, skip, [*experts, *(each.name for each in products)])
    first, *_ = *(layer.module for layer in (*linears, *products)), *experts.values()
    weight = next(first.parameters())
    if device is None and weight.is_meta:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = weight.device if device is None else choose_device(device)
    recipe = choose_recipe(recipe, device)
    if emulate:
        recipe = replace(recipe, emulate=emulate)  # which refuses "no"
    backends = gemm_backends(recipe, device)
    if head == "rowwise":
        _check_backends(rowwise(), gemm_backends(rowwise(), device))
    if not recipe.emulate and not only_if_faster:
        _check_backends(recipe, backends)
    if attention == "fp8":
        find_attention(model, device)  # refuses before anything is changed
    forward = None if batch is None else trace_forward(model, batch)
    if recipe.fusable:
        fuse_blocks(model)
    of_linears = _rows(linears) if forward is None else skip_uncalled(model, _rows(linears), forward)
    rows, speedup_source = follow_attention((*of_linears, *_rows(products)), products), ""
    if only_if_faster:
        shapes = gemm_shapes(model, rows, recipe, _input_rows(model, rows, tokens, forward))
        speedups = find_speedups(recipe, backends, device, set(shapes.values()))
        rows, speedup_source = follow_attention(skip_slower(rows, shapes, speedups), products), speedups.source
    layers = select_experts(experts, recipe, device, skip, only_if_faster=only_if_faster)
    stacks = _rows(layers)
    chosen = {row.name for row in (*rows, *stacks) if not row.reason}
    for name, module, _ in (*products, *linears):
        if not weights_of(name, module).keys() <= chosen:
            _check_forward(name, module)
    for layer in (*products, *linears, *layers):
        _change(layer, recipe, chosen)
    if not recompute_hidden(model, recompute) and recompute and not only_if_faster:
        for module, cls, attributes in before:  # an earlier conversion stays
            module.__class__, module.__dict__ = cls, attributes
        raise ValueError(
            "recompute=True takes a recipe and a model whose MLPs or experts run fused, as Llama by 'rowwise'; got "
            f"{recipe.name}, {type(model).__name__} and skip={list(skip)}: leave it out, or take torch.utils.checkpoint"
        )
    mark_saved_inputs(model)
    if attention == "fp8":
        use_fp8_attention(model, device=device)  # which marks the inputs anew
    leave_fast_paths(model)
    if loss is not None:
        join_loss(*loss, head)
    coverage = find_coverage(model, chosen if recipe.quantized else (), forward)
    fused, grouped = _fused_modules(model), gemm_backends(recipe, device, grouped=True)
    sides = [size for row in stacks if not row.reason for size in row.shape[1:]]
    slow = reason_if_slower(sides, recipe, device) if sides and device.type == "cuda" else ""
    return Conversion(recipe, rows, backends, coverage, speedup_source, fused, stacks, grouped, slow)


def recompute_hidden(model: nn.Module, recompute: bool = True) -> bool:
    """Let the MLPs and experts of a converted model that run fused save the outputs of gate and up, or compute them
    again in the backward pass. False if none runs fused."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "runs_fused")]
    fused = [module for module in modules if module.runs_fused()]
    for module in modules:
        vars(module).pop("recompute", None)
    for module in fused if recompute else ():
        module.recompute = True
    return bool(fused)


def _input_rows(model: nn.Module, rows: Sequence[Row], tokens: int, forward: ForwardPass | None) -> dict[str, int]:
    """The rows of the input that each layer, or input weight of attention, multiplies in a forward pass, by name."""
    if forward is None:
        return {row.name: tokens for row in rows}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {row.name: row.name if row.name in parameters else f"{row.name}.weight".lstrip(".") for row in rows}
    # 0 for a layer whose weight is computed from other parameters, and which is skipped for that
    return {name: forward.rows_of(parameters[w]) if w in parameters else 0 for name, w in weights.items()}


def _check_backends(recipe: Recipe, backends: Mapping[str, Backend]) -> None:
    gemms: dict[str, list[str]] = {}  # by the reason that they are missing
    for gemm, backend in backends.items():
        if backend.name == "none":
            gemms.setdefault(backend.reason, []).append(gemm)
    if gemms:
        missing = [f"{', '.join(names)}: {reason}" for reason, names in gemms.items()]
        raise ValueError(
            f"this device cannot run the recipe {recipe.name} ({'; '.join(missing)}): `octavo doctor` lists what it "
            'can run, recipe="auto" takes the nearest of these, and emulate=True computes it slowly in float32'
        )


def _fused_modules(model: nn.Module) -> dict[str, str]:
    """The names of the modules that run several layers in one pass, and a description of each."""
    fused = {}
    for name, module in model.named_modules():
        if isinstance(module, LossHead):
            fused[name] = f"head + loss, {module.options[2]}"
        elif isinstance(scales := getattr(module, "fp8_gradients", None), GradientScales):
            fused[name] = f"attention in FP8, of {scales.shortest:,} tokens and more"
        elif isinstance(module, NormLinear) and module.cached_weights() is not None:
            fused[name] = f"{type(module.norm).__name__} + {module.extra_repr()}"
        elif hasattr(module, "runs_fused") and module.runs_fused():
            kind = "swiglu experts" if isinstance(module, Experts) else f"{module.activation} MLP"
            fused[name] = f"{kind}, hidden input recomputed" if module.recompute else kind
    return fused


# ---- The modules that `convert` can change: linear layers, attention, convolutions that are products, and experts.


_OURS = OURS | {nn.MultiheadAttention: MultiheadAttention}


def weights_of(name: str, module: Any) -> dict[str, tuple[int, ...]]:
    """The shapes [N, K], or [E, N, K] of experts, of the weights of a module, by the names of their rows."""
    if _is_experts(module):
        return {weight: tuple(p.shape) for weight, p in stacks_of(name, module).items()}
    if isinstance(module, nn.MultiheadAttention):
        return {f"{name}.{leaf}".lstrip("."): (len(w), w.shape[1]) for leaf, w in input_weights(module).items()}
    if isinstance(module, CONVOLUTIONS):
        return {name: (module.out_channels, module.weight[0].numel())}
    return {name: shape_of(module)}


def _rows(layers: Sequence[SelectedLayer]) -> tuple[Row, ...]:
    return tuple(Row(weight, shape, m.reason) for m in layers for weight, shape in weights_of(m.name, m.module).items())


def _change(layer: SelectedLayer, recipe: Recipe, chosen: set[str]) -> None:
    """Convert a module if all its weights are `chosen`, and restore it otherwise."""
    name, module, _ = layer
    converts = weights_of(name, module).keys() <= chosen
    if converts and isinstance(module, RecipeLayer) and module.recipe == recipe:
        module._layer_name = name  # the rest stays: weights cast once, and histories
        return
    if not restore_experts(module):
        restore_layer(module)
    if _is_experts(module) and (converts or _autocast_misses(module)):
        to_fp8_experts(module, recipe if converts else None, name)
    elif converts:
        ours = next((ours for theirs, ours in _OURS.items() if isinstance(module, theirs)), Conv1D)
        convert_layer(module, ours, recipe, name)


def select_products(model: nn.Module, skip: Sequence[str]) -> list[SelectedLayer]:
    """The attention of `model`, and its convolutions that are matrix products."""
    selected = []
    for name, module in model.named_modules():
        known = is_convertible(module) if isinstance(module, nn.MultiheadAttention) else is_gemm(module)
        if known and not is_fsdp_module(module) and all(p.dtype in FLOATS for p in module.parameters(recurse=False)):
            image = isinstance(module, CONVOLUTIONS) and reads_image(module)
            reason = "it reads the image, whose rounding raises the loss of diffusion" if image else ""
            reason = REPLACED if "forward" in vars(module) and not isinstance(module, RecipeLayer) else reason
            by_name = (skipped_by_name(name, n, k, skip) for n, k in weights_of(name, module).values())
            selected.append(SelectedLayer(name, module, next(filter(None, by_name), reason)))
    return selected


def follow_attention(rows: Sequence[Row], products: Sequence[SelectedLayer]) -> tuple[Row, ...]:
    """`rows`, in which the output layer of attention is converted only where its attention is."""
    skipped = {row.name for row in rows if row.reason}
    attention = [each for each in products if isinstance(each.module, nn.MultiheadAttention)]
    called = {f"{n}.out_proj".lstrip("."): skipped.isdisjoint(weights_of(n, m)) for n, m, _ in attention}

    def follow(row: Row) -> Row:
        if row.name not in called or row.reason not in ("", ATTENTION_OUTPUT):
            return row
        return replace(row, reason="" if called[row.name] else ATTENTION_OUTPUT)

    return tuple(map(follow, rows))


# ---- The experts that `convert` changes: ours, and those of transformers that compute the same function.
#
# transformers keeps the experts of a layer in one module, with the parameters of `octavo.nn.Experts`. Such a module
# becomes a subclass of its class whose forward is ours, without a recipe too: autocast does not cast PyTorch's grouped
# GEMM, and transformers' own forward would compute in the dtype of the weights. Routers stay in high precision.


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of stacked experts in `model` that can run in FP8, by name."""
    return {name: module for name, module in model.named_modules() if _is_experts(module)}


def stacks_of(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The stacks of matrices [E, N, K] of a module of experts called `name`, by the names of the parameters."""
    named = module.named_parameters(recurse=False)
    return {f"{name}.{leaf}".lstrip("."): parameter for leaf, parameter in named if parameter.ndim == 3}


def select_experts(
    experts: Mapping[str, nn.Module], recipe: Recipe, device: torch.device, skip: Sequence[str], *, only_if_faster: bool
) -> list[SelectedLayer]:
    """The modules of experts by name, each with the reason why it is skipped; all stacks of a module, or none."""
    selected = []
    for name, module in experts.items():
        sides = [size for w in stacks_of(name, module).values() for size in w.shape[1:]]
        reason = next((f"skip={glob!r}" for glob in skip if fnmatchcase(name, glob)), "")
        reason = reason or _reason_of_experts(module, sides, recipe, device)
        if not reason and only_if_faster and (slow := reason_if_slower(sides, recipe, device)):
            reason = f"{slow}: left in BF16"
        selected.append(SelectedLayer(name, module, reason))
    return selected


def computed_stacks(model: nn.Module) -> list[str]:
    """The names of the stacks of experts' matrices that run in FP8."""
    found = {name: m for name, m in converted_experts(model).items() if m.recipe.quantized}
    return [weight for name, module in found.items() for weight in stacks_of(name, module)]


def converted_experts(model: nn.Module) -> dict[str, Any]:
    """The modules of experts that have a recipe, by name."""
    return {name: m for name, m in find_experts(model).items() if getattr(m, "recipe", None) is not None}


def to_fp8_experts(module: Any, recipe: Recipe | None, name: str) -> None:
    """Change a module of `find_experts` in place so that our code computes it, by `recipe` if there is one."""
    if not isinstance(module, GroupedLinear):
        mix_into(module, Experts)
    module.recipe, module._layer_name = recipe, name


def restore_experts(module: Any) -> bool:
    """Undo the conversion of a module of experts, and return whether `module` was one."""
    theirs = parts_of(type(module))[1:]
    if not isinstance(module, Experts | GroupedLinear) or (module.recipe is None and not theirs):
        return False
    for name in ("recipe", "_layer_name", "recompute"):
        vars(module).pop(name, None)
    if theirs and "parallel" not in vars(module):  # their own code cannot compute the part of a rank
        (module.__class__,) = theirs
    return True


def _is_experts(module: Any) -> bool:
    """True for ours, and for transformers' experts that compute as Mixtral's, with the same parameters."""
    if isinstance(module, Experts | GroupedLinear):
        return True
    if library_of(module) != "transformers" or module._parameters.keys() != set(Experts.matrices):
        return False
    return _computes_as_mixtral(own_class(module)) and type(module.act_fn).__name__ in SILU


@cache
def _computes_as_mixtral(cls: Any) -> bool:
    """True if the forward of a class of transformers has the code of `MixtralExperts`, as most of its experts have."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    ours, theirs = (inspect.unwrap(each.forward).__code__ for each in (cls, MixtralExperts))
    return (ours.co_code, ours.co_consts, ours.co_names) == (theirs.co_code, theirs.co_consts, theirs.co_names)


def _autocast_misses(module: nn.Module) -> bool:
    """True for experts of transformers, whose GEMMs autocast does not cast, if ours, which it does, can run them."""
    theirs = not isinstance(module, Experts | GroupedLinear) and not _reason_to_keep(module)
    return theirs and all(p.shape[-1] % 8 == 0 for p in module.parameters(recurse=False))


def _reason_to_keep(module: nn.Module) -> str:
    """Why our code cannot compute a module of experts, or ""."""
    if is_fsdp_module(module):
        return "fully_shard made it a unit of its own: convert the model before fully_shard"
    if "forward" in vars(module) and not isinstance(module, Experts | GroupedLinear):
        return REPLACED
    other = [p.dtype for p in module.parameters(recurse=False) if p.dtype not in FLOATS]
    return f"its weights are {other[0]}: FP8 is computed from float32, bfloat16 or float16" if other else ""


def _reason_of_experts(module: nn.Module, sides: Sequence[int], recipe: Recipe, device: torch.device) -> str:
    if not runs_experts(recipe):
        have = [name for name, make in PRESETS.items() if runs_experts(make())]
        return f"the recipe {recipe.name} has no grouped GEMM: {', '.join(have)} have"
    if reason := _reason_to_keep(module):
        return reason
    missing = [each.reason for each in gemm_backends(recipe, device, grouped=True).values() if each.name == "none"]
    if missing and not recipe.emulate:
        return missing[0]
    if device.type == "cuda" and any(size % ALIGNMENT for size in sides):
        return f"its matrices have sides that are no multiples of {ALIGNMENT}"
    return ""


def reason_if_slower(sides: Sequence[int], recipe: Recipe, device: torch.device) -> str:
    """Why experts whose matrices have these sides would not be faster in FP8, or ""."""
    if device.type != "cuda":
        return "FP8 is emulated here"
    if any(backend.name == "dequantized" for backend in gemm_backends(recipe, device, grouped=True).values()):
        return f"the operands of {recipe.name} are widened to BF16 here, which is not faster"
    if min(sides) < LEAST_SIDE:
        return f"a side below {LEAST_SIDE}, where FP8 was not measured faster on an H200"
    speedup = experts_speedup(similar_preset(recipe)) if find_architecture(device).key == "hopper" else None
    if speedup is not None and speedup < LEAST_SPEEDUP:
        return f"{speedup:.2f}x, measured with Mixtral's experts"
    return ""


# ---- Keep PyTorch off the fast path of `nn.TransformerEncoderLayer`, which reads weights and never calls the layers.
#
# PyTorch takes the fast path in evaluation mode without gradients. A converted linear layer would then not run in FP8.
# So an encoder layer that has one, and the `nn.TransformerEncoder` around it, become subclasses of their classes in
# which the conditions of the fast path are false.


class CallingEncoder:
    """An encoder, or a layer of one, that calls its linear layers."""

    added: ClassVar[tuple[str, ...]] = ()
    activation_relu_or_gelu = property(lambda self: 0)  # the fast path of a layer requires one of these
    use_nested_tensor = property(lambda self: False)  # only the fast path takes nested tensors from the encoder


def leave_fast_paths(model: nn.Module) -> None:
    """Make every encoder of `model`, and layer of one, that has a converted layer call it; idempotent."""
    for module in model.modules():
        is_encoder = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder)
        if is_encoder and any(isinstance(m, RecipeLayer) for m in module.modules()):
            mix_into(module, CallingEncoder)


# ---- Undo `octavo.convert`: give every module its own class back, and remove the attributes that were added.


def restore(model: nn.Module) -> list[str]:
    """Undo `octavo.convert`, in place: the model computes the same bits as before the conversion.

    Parameters, `state_dict`, hooks and ties stay as they are, since `convert` changed none of them. The scale histories
    of `delayed` are deleted: save `octavo.scales.scale_state(model)` first if you need them. A model that was not
    converted stays as it is. Leave the block of `octavo.scales.cast_once` first. The layers that torchao's
    `convert_to_float8_training` made of `nn.Linear` become such again.

    Returns:
        The names of the restored modules: linear layers, the modules that ran them fused, and norms.

    Raises:
        TypeError: `model` is no module.
        ValueError: a converted layer was parametrized, sharded by itself, or got another forward. Nothing is changed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> report = octavo.convert(model, "rowwise")
        >>> octavo.restore(model)
        ['0']
    """
    check_module(model, "restore")
    for name, module in ((n, m) for n, m in model.named_modules() if isinstance(m, RecipeLayer)):
        if is_fsdp_module(module):
            raise ValueError(
                f"{name} was converted and then made a unit of its own by fully_shard, which changed its class again: "
                "restore works on a model before fully_shard, or on one sharded by larger units"
            )
        _check_forward(name, module)
        if is_parametrized(module):
            raise ValueError(
                f"{name} was converted and then parametrized, which changed its class again: call "
                "torch.nn.utils.parametrize.remove_parametrizations first, and parametrize the restored layer"
            )
    use_bf16_attention(model)
    recompute_hidden(model, False)
    modules = list(model.named_modules())
    return [name for name, m in modules if restore_layer(m) or restore_experts(m) or _undo_block(m) or _undo_torchao(m)]


def _check_forward(name: str, module: nn.Module) -> None:
    """Raise a ValueError if the forward of a converted layer, which is to be restored, was replaced."""
    if isinstance(module, RecipeLayer) and "forward" in vars(module):
        raise ValueError(
            f"{name} was converted, and then its forward was replaced, as Accelerate's hooks do: delete what replaced "
            "it first (accelerate.hooks.remove_hook_from_submodules does for hooks)"
        )


def _undo_block(module: nn.Module) -> bool:
    if isinstance(module, DecoderLayer | SwiGLU) and any("parallel" in m.__dict__ for m in module.modules()):
        return False  # its own class cannot run layers that are parallel
    return unmix(module)


def _undo_torchao(module: Any) -> bool:
    """Make a `Float8Linear` of torchao the `nn.Linear` that it was made of, and return whether `module` was one."""
    if not is_of_library(module, "torchao", "Float8Linear") or is_fsdp_module(module):
        return False
    for name in module.__dict__.keys() - nn.Linear(1, 1, device="meta").__dict__.keys():
        delattr(module, name)
    module.__class__ = nn.Linear
    if (plain := getattr(module.weight, "_tensor", None)) is not None:  # the wrapper that casts in an all-gather
        module.weight = nn.Parameter(plain, module.weight.requires_grad)
    return True


# ---- FP8 off for a block of code.


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """Compute `model` in its high precision while the block lasts.

    Linear layers, fused modules, experts, attention and the loss cast nothing to eight bits inside. They follow their
    recipes after the block, also after an exception. A conversion inside stays. A backward pass computes as its
    forward pass did; with checkpointed activations, run it inside too. Delayed scaling records nothing inside. Compiled
    code is compiled once for each state. A weight that FSDP2 gathers in eight bits is gathered so in both.

    Raises:
        TypeError: `model` is no module.
        ValueError: a layer holds its weight in eight bits alone, as those of `octavo.load` do.

    Example:
        >>> with octavo.nn.high_precision(model):
        ...     loss(model(x), y).backward()
    """
    check_module(model, "high_precision")
    switched: list[tuple[Any, str, Any, Any]] = []
    for name, module in model.named_modules():
        if any(b.dtype.itemsize == 1 and b.dtype not in (torch.bool, torch.uint8) for b in module.buffers(False)):
            raise ValueError(
                f"high_precision requires layers with a weight in high precision, and {name or 'the model'} "
                f"({type(module).__name__}) holds it in eight bits alone: octavo unpack writes its folder in BF16"
            )
        switched += [(module, key, getattr(module, key), value) for key, value in _in_high_precision(module)]
    try:
        for module, key, _, value in switched:
            setattr(module, key, value)
        yield
    finally:
        for module, key, before, value in switched:
            if getattr(module, key, before) is value:  # not converted or restored since
                setattr(module, key, before)


def _in_high_precision(module: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that choose eight bits, each with its value in high precision."""
    if isinstance(getattr(module, "recipe", None), Recipe):
        yield "recipe", get_recipe("bf16")
    if isinstance(getattr(module, "fp8_gradients", None), GradientScales):
        yield "fp8_gradients", None
    if isinstance(module, LossHead):
        yield "options", (*module.options[:2], "bf16")
