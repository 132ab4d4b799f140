"""Warming a model up on prompts, and writing it with the scales of its inputs frozen: the scheme static.

The scale of an input is amax/448 of all prompts. The model runs as it is: a run or a model folder in BF16, a packed
folder in its own scheme.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.artifact.atomic_folder import check_absent
from octavo.artifact.packed.layouts import read_config
from octavo.artifact.packed.scheme import STATIC, STATIC_INPUTS
from octavo.device import choose_device
from octavo.evaluation.prompts import OnRead, PromptOptions, Prompts, open_prompts
from octavo.hf.inputs import arguments_of
from octavo.hf.meta_model import read_meta_model
from octavo.hf.outputs import measured_part, predicts_tokens
from octavo.hf.source import Source, open_source
from octavo.models.decoder import Decoder
from octavo.nn import select_linears
from octavo.nn.scale_learning import observe_inputs
from octavo.numerics import scale_from_amax
from octavo.packing.chosen_layers import choose_layers
from octavo.packing.options import PackOptions
from octavo.packing.pipeline import pack_source
from octavo.packing.repacking import Repacked, convert_layout
from octavo.packing.report import PackReport
from octavo.progress import Progress, no_progress
from octavo.runtime import load_packed
from octavo.runtime.packed_linear import PackedLinear

WARM_UP = PromptOptions(samples=64, context=512)


def pack_frozen(
    source: str | Path,
    out: str | Path,
    data: Sequence[str],
    options: PackOptions = PackOptions(),
    *,
    prompts: PromptOptions = WARM_UP,
    device: str = "cpu",
    step: int | None = None,
    progress: Progress = no_progress,
    on_read: OnRead | None = None,
) -> PackReport:
    """`pack` with scales of inputs from prompts, which the model first runs on in BF16, as a whole in memory.

    Args:
        source, out, options, step: see `octavo.packing.pack`.
        data: sources of text, see `octavo.text.read_text`.
        prompts: which prompts are taken from it.
        device: where the model runs.
        progress: called with every piece of work that is done (`octavo.progress`).
        on_read: called with the report of the text that was read.

    Raises:
        ValueError: no layer is packed by static, or a layer saw no input, or inf or NaN; and the errors of `pack` and
            `open_prompts`.
    """
    source, out = Path(source), Path(out)
    check_absent(out)
    if options.scheme is not None and "static" not in (options.scheme, *options.layers.values()):
        raise ValueError(
            f"only the scheme static stores scales of inputs, and {options.scheme} is given: give --scheme static, or "
            "leave --freeze out"
        )
    place, opened = choose_device(device), open_source(source, step)
    _check_options(opened, options)
    chosen = open_prompts(data, opened.description, prompts, opened.meta_model, on_read)
    model = opened.fill_bf16(place).eval()
    layers = {
        each.name: each.module for each in select_linears(model, (*opened.skip, *options.skip)) if not each.reason
    }
    scales = _warm_up(model, layers, chosen, prompts, place, progress)
    del model
    options = replace(options, input_scales=scales)
    return pack_source(opened, out, options, progress, {"warm_up": _record(chosen, prompts)})


def _check_options(source: Source, options: PackOptions) -> None:
    """Raise the errors of `choose_layers` before the model runs, whatever scales it will find."""
    linears = select_linears(source.meta_model.model, (*source.skip, *options.skip))
    scales = {linear.name: torch.ones(1) for linear in linears if not linear.reason}
    choose_layers(source, replace(options, input_scales=scales, calibration=None, rule=None, kv_cache=None))


def freeze_folder(
    folder: str | Path,
    out: str | Path,
    data: Sequence[str],
    *,
    layout: str = "compressed-tensors",
    prompts: PromptOptions = WARM_UP,
    device: str = "cpu",
    progress: Progress = no_progress,
    on_read: OnRead | None = None,
) -> Repacked:
    """Write a packed folder in the scheme static, with scales of inputs from prompts, which its model runs on first.

    A weight with one scale keeps its bytes; a weight with finer scales is cast again.

    Args:
        folder: a packed folder with a tokenizer.
        out: the folder to make.
        layout: that holds the scheme static: compressed-tensors, modelopt or autofp8.
        data, prompts, device, progress, on_read: see `pack_frozen`.

    Raises:
        ValueError: the folder's scales of inputs are stored already; and the errors of `convert_layout` and
            `open_prompts`.
    """
    folder, out = Path(folder), Path(out)
    check_absent(out)
    place = choose_device(device)
    meta_model = read_meta_model(read_config(folder), folder)
    chosen = open_prompts(data, folder, prompts, meta_model, on_read)
    model = load_packed(folder, place).model
    layers = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    if all(not layer.freezable for layer in layers.values()):
        raise ValueError(f"{folder} stores the scales of its inputs already: its scheme is static")
    scales = _warm_up(model, layers, chosen, prompts, place, progress)
    named = {meta_model.file_name(name): scale for name, scale in scales.items()}
    del model
    return convert_layout(folder, out, layout=layout, scheme=STATIC.name, input_scales=named, progress=progress)


def _warm_up(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    chosen: Prompts,
    prompts: PromptOptions,
    device: torch.device,
    progress: Progress,
) -> dict[str, Tensor]:
    """The scale of the input of each layer, float32 [1], from the amax of all prompts."""
    batches = chosen.batches(prompts.batch)

    def moved() -> Iterator[Mapping[str, Tensor] | Tensor]:
        for done, ids in enumerate(batches):
            progress(done, len(batches), "warming up")
            yield ids.to(device) if isinstance(model, Decoder) else arguments_of(model, ids.to(device))

    seen = observe_inputs(measured_part(model, predicts_tokens(model)), layers, moved())
    return {name: scale_from_amax(amax, STATIC_INPUTS.fmt).reshape(1).cpu() for name, amax in seen.items()}


def _record(chosen: Prompts, prompts: PromptOptions) -> dict[str, object]:
    """The entry "warm_up" of octavo.json."""
    return {
        "prompts": len(chosen.ids), "tokens": chosen.tokens, "context": chosen.context, "seed": prompts.seed,
        "fingerprint": chosen.fingerprint, "read": chosen.report.to_dict(),
    }  # fmt: skip
