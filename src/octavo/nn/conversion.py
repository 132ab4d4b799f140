"""`convert`: change a model's linear layers in place so that they compute by a recipe, and report which ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.backends import choose_recipe, gemm_backends, grouped_backends
from octavo.nn.candidates import find_candidates
from octavo.nn.conversion_report import Conversion, Row
from octavo.nn.coverage import find_coverage
from octavo.nn.diffusers_fusion import fuse_diffusion_blocks
from octavo.nn.expert_conversion import expert_rows
from octavo.nn.fast_path import leave_fast_paths
from octavo.nn.layer_limits import check_module
from octavo.nn.mlp import FusedMLP
from octavo.nn.norm_linear import NormLinear, fusable_layers, read_norm
from octavo.nn.only_if_faster import gemm_shapes, skip_slower
from octavo.nn.saved_inputs import mark_saved_inputs
from octavo.nn.speedup.lookup import find_speedups
from octavo.nn.timm_fusion import fuse_vision_blocks
from octavo.nn.transformers_fusion import fuse_decoder_layers
from octavo.ops import Backend
from octavo.recipe import Recipe
from octavo.tracing.forward_pass import ForwardPass, trace_forward


def convert(
    model: nn.Module,
    recipe: str | Recipe = "rowwise",
    *,
    skip: Sequence[str] = (),
    emulate: bool = False,
    only_if_faster: bool = False,
    tokens: int = 8192,
    batch: Any = None,
    device: torch.device | str | None = None,
) -> Conversion:
    """Change the linear layers of `model` in place into layers that compute by `recipe`.

    Parameters and `state_dict` stay as they are. A layer changes its class, not its identity: hooks, tied parameters
    and references to it keep working. `octavo.restore` undoes the conversion. A layer that an earlier conversion
    changed, and that this one skips, is restored.

    The `Conv1D` of transformers' GPT-2 is converted too: it is a linear layer whose weight is stored transposed. With a
    fusable recipe (`rowwise`), `NormLinear`, `SwiGLU`, `GELU` and `GEGLU` quantize in the pass that computes the norm
    or the activation, and so do the decoder layers of transformers' Llama, Mistral, Qwen2 and Qwen3
    (`octavo.nn.transformers_fusion`), the blocks of timm's vision transformers (`octavo.nn.timm_fusion`) and the
    transformer blocks of diffusers' U-Nets (`octavo.nn.diffusers_fusion`). With such a recipe the experts of a
    mixture run grouped GEMMs in FP8: `octavo.nn.Experts`, `GroupedLinear`, and those of transformers' Mixtral,
    Qwen3-MoE, DeepSeek-V3 and others (`octavo.nn.expert_conversion`).
    `nn.MultiheadAttention` is converted (`octavo.nn.attention`), and so are convolutions that are matrix products:
    those of size 1, and those of disjoint patches (`octavo.nn.convolution`), but not one that reads an image.
    `nn.TransformerEncoderLayer` leaves PyTorch's fast path, which would not call its converted layers.

    Args:
        model: any module. Embeddings and norms are not linear layers and stay; output heads and routers are skipped.
        recipe: a preset's name, the .json or .toml file of a recipe, a `Recipe`, or "auto": `rowwise` if the device of
            `model` has its GEMMs, else the nearest recipe that runs there (the report names it).
        skip: globs of names of layers, or of modules of experts or attention, to leave as they are, in addition to
            `DEFAULT_SKIP` and heads tied to an embedding.
        emulate: on a GPU without the GEMMs of the recipe, compute them slowly in float32 instead of raising an error.
        only_if_faster: leave in BF16 each layer whose forward and backward pass FP8 would not speed up on the device
            that `model` is on (`octavo.nn.speedup`; the report has the figures; layers that run as one GEMM are judged
            as one). All layers stay in BF16 if together they are too little work to hide the longer launches of FP8,
            and where FP8 is emulated or has no GEMM; that is no error. On an unknown GPU the layers are timed first.
        tokens: with `only_if_faster`, the rows of each layer's input in a forward pass: batch x sequence.
        batch: an input of the model, in place of `tokens`: a tensor, a sequence of positional arguments, or a mapping
            of keyword arguments. A forward pass is traced without memory or arithmetic. It gives the rows of each
            layer, and for the report the FLOPs of each parameter. Layers that are read and never called are skipped.
        device: where the model will run, which decides the GEMMs. By default the device of its weights; for a model on
            the meta device, this machine's accelerator, or else the CPU.

    Returns:
        The report: which layers were converted, which were skipped and why, the backend of each GEMM, and the
        parameters that stay in high precision, with their shares of the model's FLOPs and parameters.

    Raises:
        TypeError: `model` is not a module, `recipe` neither a name nor a `Recipe`, or `skip` a string.
        ValueError: an unknown recipe, a glob of `skip` that matches nothing, no linear layer left to convert, a GPU
            without the GEMMs of the recipe, or a `batch` with which the model cannot be traced.
        RuntimeError: the forward pass fails with `batch`.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> octavo.convert(model, "rowwise", skip=["2"]).converted
        ['0']
    """
    check_module(model, "convert")
    candidates = find_candidates(model, skip)
    device = _execution_device(candidates.weight) if device is None else torch.device(device)
    recipe = choose_recipe(recipe, device)
    if emulate:
        recipe = replace(recipe, emulate=True)
    backends = gemm_backends(recipe, device)
    if not recipe.emulate and not only_if_faster:
        _check_backends(recipe, backends)
    forward = None if batch is None else trace_forward(model, batch)
    if recipe.fusable:
        fuse_decoder_layers(model)
        fuse_vision_blocks(model)
        fuse_diffusion_blocks(model)
    rows, speedup_source = candidates.rows(model, skip, forward), ""
    if only_if_faster:
        shapes = gemm_shapes(model, rows, recipe, _input_rows(model, rows, tokens, forward))
        speedups = find_speedups(recipe, backends, device, set(shapes.values()))
        rows, speedup_source = candidates.with_outputs(skip_slower(rows, shapes, speedups)), speedups.source
    stacks = expert_rows(candidates.experts, recipe, device, skip, only_if_faster=only_if_faster)
    candidates.convert(recipe, (*rows, *stacks))
    mark_saved_inputs(model)
    leave_fast_paths(model)
    quantized = [row.name for row in (*rows, *stacks) if not row.reason and recipe.quantized]
    coverage = find_coverage(model, quantized, forward)
    fused, grouped = _fused_modules(model), grouped_backends(recipe, device)
    return Conversion(recipe, rows, backends, coverage, speedup_source, fused, stacks, grouped)


def _input_rows(model: nn.Module, rows: Sequence[Row], tokens: int, forward: ForwardPass | None) -> dict[str, int]:
    """The rows of the input that each layer, or input weight of attention, multiplies in a forward pass, by name.

    They are 0 for a layer whose weight is computed from other parameters, and which is skipped for that.
    """
    if forward is None:
        return {row.name: tokens for row in rows}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {row.name: row.name if row.name in parameters else f"{row.name}.weight".lstrip(".") for row in rows}
    return {name: forward.rows_of(parameters[w]) if w in parameters else 0 for name, w in weights.items()}


def _execution_device(weight: Tensor) -> torch.device:
    if not weight.is_meta:
        return weight.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


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
        if isinstance(module, NormLinear) and fusable_layers(module.linears) and read_norm(module.norm):
            fused[name] = f"{type(module.norm).__name__} + {module.extra_repr()}"
        elif isinstance(module, FusedMLP) and fusable_layers((*module.inner, module.outer)):
            fused[name] = f"{module.activation} MLP"
    return fused
