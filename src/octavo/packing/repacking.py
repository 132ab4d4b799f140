"""From a packed folder to another layout or scheme, or back to BF16.

If the new scheme can hold the same scales, the bytes are copied and nothing is lost. This is so for one scheme in
another layout, and from one scale for a tensor to one for each channel. Otherwise each weight w is widened and cast
again to w', and the loss is reported as the SQNR 10 log10(|w|^2 / |w' - w|^2) in dB.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.checkpoint import scheme as schemes
from octavo.checkpoint.files import RECORD, ArtifactError, model_tensors, read_record, write_shards
from octavo.checkpoint.folder import CARD, check_absent, read_card, whole_folder
from octavo.checkpoint.layouts import UNQUANTIZED_DTYPE, Packing, check_layout, get_layout, read_config
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.checkpoint.scheme import BLOCK, BLOCK_POW2, CHANNEL, INPUT_SCALE_NAME, SCALE_NAME, STATIC, Layout, Scheme
from octavo.evaluation.metrics import energies, sqnr
from octavo.evaluation.prompts import OnRead, PromptOptions, open_prompts
from octavo.hf.meta_model import arguments_of, measured_part, predicts_tokens, read_meta_model
from octavo.hf.source import open_source
from octavo.hf.stored_tensors import DequantizedReader
from octavo.inference.opening import load_packed
from octavo.inference.packed_linear import PackedLinear
from octavo.models.decoder import Decoder
from octavo.nn import select_linears
from octavo.numerics import TENSOR, scale_from_amax
from octavo.ops import quantize
from octavo.packing.options import PackOptions, choose_layers
from octavo.packing.packer import PackReport, card_of, pack_source
from octavo.scales import observe_inputs
from octavo.util import Progress, choose_device, finite, no_progress
from octavo.version import __version__


@dataclass(frozen=True)
class Repacked:
    """A folder that was made from a packed one."""

    folder: Path
    sqnr: Mapping[str, float] = field(default_factory=dict)  # of each layer in dB; infinite if its weight is the same
    unused: Sequence[str] = ()  # scales that no layer reads and that were left out

    @property
    def lossless(self) -> bool:
        return all(math.isinf(db) for db in self.sqnr.values())


def unpack(folder: str | Path, out: str | Path, progress: Progress = no_progress) -> Repacked:
    """Write a packed model in BF16. Every weight is data * scale, rounded once.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: `folder` is no packed folder, or damaged.
        WriteError: the disk refused.
    """
    folder, out = Path(folder), Path(out)
    packed = _open(folder)
    wide = DequantizedReader(packed, UNQUANTIZED_DTYPE)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, name in enumerate(wide.specs, start=1):
            yield name, wide.get(name)
            progress(done, len(wide.specs), "unpacking")

    with whole_folder(out) as partial:
        packed.describe(partial, None)
        write_shards(partial, wide.specs, tensors(), {"format": "pt", "octavo_version": __version__})
    return Repacked(out, unused=packed.unused)


def convert_layout(
    folder: str | Path,
    out: str | Path,
    *,
    layout: str = "compressed-tensors",
    scheme: str | None = None,
    input_scales: Mapping[str, Tensor] | None = None,
    progress: Progress = no_progress,
) -> Repacked:
    """Write a packed model in another layout or scheme.

    Args:
        folder: a packed folder.
        out: the folder to make.
        layout: compressed-tensors, fp8 (which holds block alone) or modelopt (static, channel or block).
        scheme: of all packed layers. None keeps the scheme of each.
        input_scales: for the scheme static the scale of each layer's input, float32 [1], by the layer's name in the
            files (`octavo.scales.freeze_scales`). None takes those that the folder has.
        progress: called after each layer (`octavo.util`).

    Raises:
        ValueError: an unknown layout or scheme, a layout that does not hold the scheme, or sizes that the scheme cannot
            have; and the errors of `unpack`.
    """
    folder, out = Path(folder), Path(out)
    packed = _open(folder)
    packing = _target(packed, get_layout(layout), scheme, input_scales)
    sqnr: dict[str, float] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from ((name, packed.other(name)) for name in packed.others)
        yield from packed.kv_tensors(packing).items()
        for done, (name, new) in enumerate(packing.schemes.items(), start=1):
            data, scale, sqnr[name] = _cast_again(packed, name, new)
            scales = {f"{name}.{SCALE_NAME}": scale}
            if new.static:
                given = None if input_scales is None else input_scales[name].float().reshape(1).cpu()
                scales[f"{name}.{INPUT_SCALE_NAME}"] = packed.input_scale(name) if given is None else given
            yield f"{name}.weight", data
            yield from packing.to_files(scales).items()
            progress(done, len(packing.schemes), "converting")

    with whole_folder(out) as partial:
        packed.describe(partial, packing)
        metadata = {"format": "pt", "octavo_version": __version__, "octavo_source": folder.name}
        checksums = write_shards(partial, packed.specs_as(packing), tensors(), metadata)
        made = {"octavo_version": __version__, "source": folder.name, "layout": layout, "sqnr_db": finite(sqnr)}
        record = {**made, **_still_true(packed, packing, sqnr, input_scales is None), "checksums": checksums}
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        layers = {name: each.name for name, each in packing.schemes.items()}
        card = card_of(out.name, folder.name, packed.config, {**record, "layers": layers}, read_card(folder))
        (partial / CARD).write_text(card, encoding="utf-8")
    return Repacked(out, sqnr, packed.unused)


def _open(folder: Path) -> PackedTensors:
    packed = PackedTensors(folder)
    of_layers = [name for name in packed.others if name.rpartition(".")[0] in packed.packing.schemes]
    if unknown := [name for name in of_layers if not name.endswith(".bias")]:
        raise ArtifactError(f"{folder}: {unknown[0]} of a packed layer is not known: pack the model in BF16 instead")
    if lost := _lost(packed):
        raise ArtifactError(f"{folder}: tensor {lost[0]} is missing ({len(lost)} in all); {schemes.ADVICE}")
    if suspects := packed.suspects():
        warnings.warn(f"{folder}: {schemes.reciprocal_warning(suspects, len(packed.packing.schemes))}", stacklevel=3)
    return packed


def _lost(packed: PackedTensors) -> list[str]:
    """The tensors that the folder lacks: of those that Octavo wrote, or else of those that its config.json needs. None
    are known where transformers does not build the model, or the folder has others, as by names of older writers."""
    specs, listed = packed.reader.specs.keys(), read_record(packed.folder).get("checksums")
    if listed and packed.reader.written == specs and (lost := sorted(listed.keys() - specs)):
        return lost
    try:
        meta_model = read_meta_model(packed.config, packed.folder)
    except (ArtifactError, ImportError):
        return []
    needed = meta_model.experts.split(model_tensors(meta_model.model)).keys()
    others, _ = meta_model.leave_out(dict.fromkeys(packed.others))
    there = {*others, *(f"{name}.weight" for name in packed.packing.schemes)}
    return sorted(needed - there) if there <= needed else []


def _still_true(
    packed: PackedTensors, packing: Packing, sqnr: Mapping[str, float], same_inputs: bool
) -> dict[str, object]:
    """The entries of the old octavo.json that hold for the new folder; with `same_inputs` that of scales, too."""
    record = read_record(packed.folder)
    cast = record.get("layers") or {}
    copied = [name for name in cast if name in packing.schemes and math.isinf(sqnr[name])]
    layers = {name: packing.schemes[name].name for name in copied if f"{name}.weight" in packed.reader.written}
    kept = ("folded", "calibration") if same_inputs else ("folded",)
    return {"layers": layers} | {key: record[key] for key in kept if key in record}


def _target(
    packed: PackedTensors, layout: Layout, scheme: str | None, input_scales: Mapping[str, Tensor] | None
) -> Packing:
    shapes = {name: packed.reader.specs[f"{name}.weight"].shape for name in packed.packing.schemes}
    chosen = {
        name: (BLOCK if own is BLOCK_POW2 else own) if scheme is None else schemes.get_scheme(scheme)
        for name, own in packed.packing.schemes.items()
    }
    check_layout(layout, chosen.values(), packed.packing.kv_cache)
    try:
        layout.check_experts(chosen, shapes)
    except ValueError:  # transformers stacks the experts of most models; those that are linear layers fit
        stacked = read_meta_model(packed.config, packed.folder).experts.experts
        layout.check_experts({name: chosen[name] for name in stacked if name in chosen}, shapes)
    for name, new in chosen.items():
        same = new.weight == packed.packing.schemes[name].weight
        copied = same and (layout.smaller_blocks or not new.misfit(0, shapes[name][1]))
        if not copied and (reason := new.misfit(*shapes[name])):
            raise ValueError(f"{name}: {reason}: convert to another scheme, such as channel")
        known = packed.packing.schemes[name].static if input_scales is None else name in input_scales
        if new.static and not known:
            raise ValueError(
                f"{name}: the scheme static stores the scale of the input, which is not here: warm the model up on "
                "text (--freeze), or octavo pack the BF16 model with a calibration"
            )
    return Packing(layout, chosen, packed.packing.kv_cache)


def _cast_again(packed: PackedTensors, name: str, new: Scheme) -> tuple[Tensor, Tensor, float]:
    old = packed.packing.schemes[name]
    data, scale = packed.stored(name)
    if new.weight == old.weight:
        return data, scale, math.inf
    before = old.packed_weight(data, scale)
    if old.weight.granularity == TENSOR and new.weight == CHANNEL.weight:
        return data, before.scale.expand(len(data), 1).contiguous(), math.inf
    wide = before.dequantize()
    q = quantize(wide, new.weight)
    return q.data, new.stored_scale(q), sqnr(*energies(wide, q.dequantize()))


# ---- Warming a model up on prompts, and writing it with the scales of its inputs frozen: the scheme static.
#
# The scale of an input is amax/448 of all prompts. The model runs as it is: a run or a model folder in BF16, a packed
# folder in its own scheme.


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
        data, prompts, device, progress, on_read: see `octavo.packing.pack_within`.

    Raises:
        ValueError: no layer is packed by static, or a layer saw no input, or inf or NaN; and the errors of `pack` and
            `open_prompts`.
    """
    source, out = Path(source), Path(out)
    check_absent(out)
    named = [] if options.scheme is None else [options.scheme, *options.layers.values()]
    if named and not any(schemes.get_scheme(name).static for name in named):
        raise ValueError(
            f"only the scheme static stores scales of inputs, and {options.scheme} is given: give --scheme static, or "
            "leave --freeze out"
        )
    place, opened = choose_device(device), open_source(source, step)
    selected = select_linears(opened.meta_model.model, (*opened.skip, *options.skip))
    layers = {each.name: each.module for each in selected if not each.reason}
    # The errors of `choose_layers` come before the model runs, whatever scales it will find.
    unknown = replace(options, input_scales=dict.fromkeys(layers, torch.ones(1)))
    choose_layers(opened, replace(unknown, calibration=None, rule=None, kv_cache=None))
    chosen = open_prompts(data, opened.description, prompts, opened.meta_model, on_read)
    model = opened.fill_bf16(place).eval()
    scales = _warm_up(model, layers, chosen.batches(prompts.batch), place, progress)
    record = {
        "prompts": len(chosen.ids), "tokens": chosen.tokens, "context": chosen.context, "seed": prompts.seed,
        "fingerprint": chosen.fingerprint, "read": chosen.report.to_dict(),
    }  # fmt: skip
    return pack_source(opened, out, replace(options, input_scales=scales), progress, {"warm_up": record})


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
        layout: that holds the scheme static: compressed-tensors or modelopt.
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
    scales = _warm_up(model, layers, chosen.batches(prompts.batch), place, progress)
    named = {meta_model.file_name(name): scale for name, scale in scales.items()}
    del model
    return convert_layout(folder, out, layout=layout, scheme=STATIC.name, input_scales=named, progress=progress)


def _warm_up(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: list[Tensor], device: torch.device, progress: Progress
) -> dict[str, Tensor]:
    """The scale of the input of each layer, float32 [1], from the amax of all prompts."""

    def moved() -> Iterator[Mapping[str, Tensor] | Tensor]:
        for done, ids in enumerate(batches):
            progress(done, len(batches), "warming up")
            yield ids.to(device) if isinstance(model, Decoder) else arguments_of(model, ids.to(device))

    part = measured_part(model, predicts_tokens(model))
    whole = set(layers.values()) - set(part.modules())  # the heads of encoders have layers that are packed too
    seen = observe_inputs(model if whole else part, layers, moved())
    return {name: scale_from_amax(amax, schemes.STATIC_INPUTS.fmt).reshape(1).cpu() for name, amax in seen.items()}
