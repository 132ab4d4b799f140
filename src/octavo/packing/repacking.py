"""From a packed folder to another layout or scheme, or back to BF16.

If the new scheme can hold the same scales, the bytes are copied and nothing is lost. This is so for one scheme in
another layout, and from one scale for a tensor to one for each channel. Otherwise each weight w is widened and cast
again to w', and the loss is reported as the SQNR 10 log10(|w|^2 / |w' - w|^2) in dB.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from octavo.artifact.atomic_folder import whole_folder
from octavo.artifact.packed.layouts import UNQUANTIZED_DTYPE, Packing, check_layout
from octavo.artifact.packed.plausible import reciprocal_warning
from octavo.artifact.packed.reader import PackedTensors
from octavo.artifact.packed.scales import INPUT_SCALE_NAME, SCALE_NAME
from octavo.artifact.packed.scheme import BLOCK, BLOCK_POW2, CHANNEL, Scheme, get_scheme
from octavo.artifact.safetensors_files import Spec, write_shards
from octavo.evaluation.metrics import energies, sqnr
from octavo.numerics import TENSOR
from octavo.ops import quantize
from octavo.progress import Progress, no_progress
from octavo.version import __version__


@dataclass(frozen=True)
class Repacked:
    """A folder that was made from a packed one.

    Attributes:
        folder: the new folder.
        sqnr: of each packed layer in dB; infinite if its weight did not change.
        unused: scales that no layer reads and that were left out.
    """

    folder: Path
    sqnr: Mapping[str, float] = field(default_factory=dict)
    unused: Sequence[str] = ()

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
    specs = {name: packed.reader.specs[name] for name in packed.others}
    specs |= {
        f"{n}.weight": Spec(UNQUANTIZED_DTYPE, packed.reader.specs[f"{n}.weight"].shape) for n in packed.packing.schemes
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in packed.others:
            yield name, packed.reader.get(name)
        for done, name in enumerate(packed.packing.schemes, start=1):
            yield f"{name}.weight", packed.weight(name).dequantize(UNQUANTIZED_DTYPE)
            progress(done, len(packed.packing.schemes), "unpacking")

    with whole_folder(out) as partial:
        packed.describe(partial, None)
        write_shards(partial, specs, tensors(), {"format": "pt", "octavo_version": __version__})
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
        layout: compressed-tensors, or one that holds fewer schemes: fp8 (block alone), modelopt (static, channel or
            block), autofp8 (static or tensor).
        scheme: of all packed layers. None keeps the scheme of each.
        input_scales: for the scheme static the scale of each layer's input, float32 [1], by the layer's name in the
            files (`octavo.freeze_scales`). None takes those that the folder has.
        progress: called after each layer (`octavo.progress`).

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: `folder` is no packed folder, or damaged.
        ValueError: an unknown layout or scheme, a layout that does not hold the scheme, or sizes that the scheme cannot
            have.
        WriteError: the disk refused.
    """
    folder, out = Path(folder), Path(out)
    packed = _open(folder)
    packing = _target(packed, layout, scheme, input_scales)
    sqnr: dict[str, float] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in packed.others:
            yield name, packed.reader.get(name)
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
        write_shards(partial, packed.specs_as(packing), tensors(), metadata)
        record = {"octavo_version": __version__, "source": folder.name, "layout": layout, "sqnr_db": _finite(sqnr)}
        (partial / "octavo.json").write_text(json.dumps(record, indent=2) + "\n")
    return Repacked(out, sqnr, packed.unused)


def _open(folder: Path) -> PackedTensors:
    """Open the packed folder, with a warning if its scales look reciprocal."""
    packed = PackedTensors(folder)
    if suspects := packed.suspects():
        warnings.warn(f"{folder}: {reciprocal_warning(suspects, len(packed.packing.schemes))}", stacklevel=3)
    return packed


def _finite(sqnr: Mapping[str, float]) -> dict[str, float | None]:
    """The SQNR for JSON, which has no infinity: None if nothing was lost."""
    return {name: None if math.isinf(db) else db for name, db in sqnr.items()}


def _target(
    packed: PackedTensors, layout: str, scheme: str | None, input_scales: Mapping[str, Tensor] | None
) -> Packing:
    schemes = {
        name: (BLOCK if own is BLOCK_POW2 else own) if scheme is None else get_scheme(scheme)
        for name, own in packed.packing.schemes.items()
    }
    kv_cache = bool(packed.kv_scales)
    check_layout(layout, schemes.values(), kv_cache)
    for name, new in schemes.items():
        same = new.weight == packed.packing.schemes[name].weight
        if not same and (reason := new.misfit(*packed.reader.specs[f"{name}.weight"].shape)):
            raise ValueError(f"{name}: {reason}: convert to another scheme, such as channel")
        known = packed.packing.schemes[name].static if input_scales is None else name in input_scales
        if new.static and not known:
            raise ValueError(
                f"{name}: the scheme static stores the scale of the input, which is not here: warm the model up on "
                "text (--freeze), or octavo pack the BF16 model with a calibration"
            )
    return Packing(layout, schemes, kv_cache)


def _cast_again(packed: PackedTensors, name: str, new: Scheme) -> tuple[Tensor, Tensor, float]:
    """The data and the scale of a layer in the new scheme, and the SQNR in dB."""
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
