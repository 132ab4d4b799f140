"""The weights of a packed folder against those of the model that it was packed from, MODEL.

For each block that shares a scale s, the scale s' that fits MODEL's weight w best is <w, data> / <data, data>, and
s' / s is 1 except for rounding. This tells wrong scales from wrong bytes.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.evaluation.metrics import energies, sqnr
from octavo.progress import Progress
from octavo.verification.checks import Shape, belongs_to_packing
from octavo.verification.files import CheckpointFiles
from octavo.verification.layer_spec import LayerSpec
from octavo.verification.numbers import scale_values, spread

_SAME_DB = 12.0  # e4m3 bytes of a weight have 28 dB and more, those of another model's weight about 0
_FACTOR = 1.25  # the most that clipping and rounding move s' / s from 1


def check_weights(
    files: CheckpointFiles,
    layers: Mapping[str, LayerSpec],
    shapes: Mapping[str, Shape],
    get: Callable[[str], Tensor],
    progress: Progress,
) -> dict[str, float]:
    """Add the tensors that differ from MODEL's to `files.findings`.

    Args:
        files: the packed folder.
        layers: the packed layers.
        shapes: of MODEL's tensors.
        get: reads one of MODEL's tensors.
        progress: see `octavo.progress`.

    Returns:
        The SQNR of each packed weight in dB.
    """
    ratios: dict[str, float] = {}
    names = {name for name in files.shapes if not belongs_to_packing(name, layers)}
    for name in sorted(names - shapes.keys()):
        files.add_finding("weights", name, "MODEL has no such tensor: the folder is of another model")
    common = sorted(names & shapes.keys())
    for done, name in enumerate(common, start=1):
        progress(done, len(common), "comparing weights")
        expected, actual = list(shapes[name]), list(files.shapes[name])
        module = name.removesuffix(".weight")
        if expected != actual:
            error = f"MODEL has shape {expected}, the folder {actual}: it is of another model"
        elif name.endswith(".weight") and module in layers:
            scale = files.get(f"{module}.{layers[module].scale}")
            ratios[module], error = diagnose(files.get(name), scale, layers[module], get(name))
        else:
            error = _difference(files.get(name), get(name))
        if error:
            files.add_finding("weights", name, error)
    return ratios


def _difference(stored: Tensor, truth: Tensor) -> str:
    """The error of an unpacked tensor that is not MODEL's, rounded to its dtype; "" if it is."""
    expected = truth.to(stored.dtype)
    if torch.equal(stored, expected):
        return ""
    dtype = str(stored.dtype).removeprefix("torch.")
    return f"is not MODEL's, rounded to {dtype}: {sqnr(*energies(expected, stored)):.1f} dB"


def diagnose(data: Tensor, scale: Tensor, spec: LayerSpec, truth: Tensor) -> tuple[float, str]:
    """Compare a packed weight with MODEL's.

    Args:
        data: the stored weight [N, K].
        scale: the stored scale.
        spec: how they are quantized.
        truth: MODEL's weight [N, K].

    Returns:
        The SQNR in dB, and the error, or "".
    """
    data, truth, values = data.float(), truth.float(), scale_values(scale, spec)
    full = spread(values, spec, data.shape)
    db = sqnr(*energies(truth, data * full))
    if sqnr(*energies(truth, data / full)) > max(db, _SAME_DB):
        return db, "the scale is reciprocal: data / scale is MODEL's weight, and a scale must multiply"
    fitted = _fit(data, spec, truth)
    if sqnr(*energies(truth, data * spread(fitted, spec, data.shape))) < _SAME_DB:
        return db, f"the bytes are not MODEL's weight ({db:.1f} dB, whatever the scale): the folder is of another model"
    factor = torch.maximum(fitted / values, values / fitted)
    # A block whose bytes are all below 1 has too few bits to judge its scale.
    factor = torch.where(_blocks(data, spec).abs().amax((1, 3)) >= 1, factor, 1.0)
    wrong = ~(factor <= _FACTOR)  # counts NaN
    if not wrong.any():
        return db, ""
    row, column = divmod(int(factor.nan_to_num(torch.inf).argmax()), factor.shape[1])
    return db, (
        f"the bytes are MODEL's and {int(wrong.sum())} of {factor.numel()} scales are not: [{row}, {column}] is "
        f"{values[row, column]:.4g} and should be about {fitted[row, column]:.4g}"
    )


def _blocks(matrix: Tensor, spec: LayerSpec) -> Tensor:
    """[N, K] as [blocks, rows, blocks, columns], padded with zeros."""
    n, k = matrix.shape
    rows, columns = spec.rows or n, spec.columns or k
    padded = pad(matrix, (0, -k % columns, 0, -n % rows))
    return padded.view(padded.shape[0] // rows, rows, -1, columns)


def _fit(data: Tensor, spec: LayerSpec, truth: Tensor) -> Tensor:
    """The scale of each block that minimizes |data * scale - truth|."""
    d, w = _blocks(data, spec), _blocks(truth, spec)
    return (d * w).sum((1, 3)) / d.square().sum((1, 3)).clamp(min=1e-30)
