"""The numbers that a live module's weight stands for, and the folder that it should come from.

    w[N,K] = data * scale        one scale a block; a scale always multiplies, as in `layer_spec`, which widens here too

A weight is plain, or eight-bit beside a scale of its module (transformers, compressed-tensors, Octavo), or a subclass
of Tensor that says what it stands for (torchao, Transformer Engine).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.checkpoint.files import ArtifactError
from octavo.hf.meta_model import transformers_meta_model
from octavo.verification.layer_spec import LayerSpec, numbers_of, scale_values, widen
from octavo.verification.stored_files import Finding, read_files

INF = float("inf")
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8)
_SCALES = ("{}_scale_inv", "{}_scale", "scale", "scales")  # of the weight `{}`
_LARGE = 240  # bytes reach this, and most 448; weights do not
_NEAR = {True: 0.1, False: 2.0**-7}  # |w - w_file| / |w_file|: where one of them is eight-bit, and where none is
# What wrappers add to names: of PEFT, DDP, torch.compile and checkpointing.
_WRAPPED = re.compile(r"^base_model\.model\.|^module\.|_orig_mod\.|_checkpoint_wrapped_module\.|base_layer\.(?=\w+$)")


@dataclass(frozen=True)
class Fault(Finding):
    """Something wrong with a live model. The kind is scale, file, y, dx, gradient or precision."""

    error: float  # of y, dx or w, relative; inf where nothing can be right
    count: int = 1  # of repeated modules


class Held(NamedTuple):
    """A weight as a module or a file holds it."""

    weight: Tensor  # float32 [..., N, K]
    eight_bit: bool = False
    wrong: str = ""  # with its scale


def held(module: nn.Module, leaf: str = "weight") -> Held:
    """What the parameter or buffer `leaf` of a module stands for."""
    tensor = getattr(module, leaf).detach()
    if hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "dequantize"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0] if "scale" in name]
        return Held(tensor.dequantize().float(), True, next(filter(None, map(_wrong_scale, inner)), ""))
    if tensor.dtype in _EIGHT_BITS:
        scales = (getattr(module, name.format(leaf), None) for name in _SCALES)
        return _widened(tensor, next((scale for scale in scales if isinstance(scale, Tensor)), None))
    weight = tensor.float()
    large = tensor.is_floating_point() and weight.ndim > 1 and weight.numel() and float(weight.abs().max()) >= _LARGE
    alone = large and torch.equal(weight, weight.to(torch.float8_e4m3fn).float())
    return Held(weight, False, "has the bytes of e4m3, up to 240 and more, without their scales" if alone else "")


def _widened(data: Tensor, scale: Tensor | None) -> Held:
    """The weight [..., N, K] of eight-bit data; the shape of the scale says which blocks share one."""
    numbers = numbers_of(data)
    if scale is None:
        return Held(numbers, True, f"is {data.dtype} and has no scale: its bytes alone are multiplied")
    if data.ndim == 3:  # a stack of experts: their rows, one below the other
        flat = _widened(data.flatten(0, 1), scale.flatten(0, 1))
        return flat._replace(weight=flat.weight.view(data.shape))
    values = scale_values(scale.detach(), LayerSpec.per_tensor("none"))
    rows, columns = (_block(size, count) for size, count in zip(data.shape, values.shape, strict=True))
    if rows < 0 or columns < 0:
        return Held(numbers, True, f"is {list(data.shape)}, and its scale {list(scale.shape)} fits no block of it")
    wrong = _wrong_scale(values)
    if not wrong and bool((values == 1).all()) and data.is_floating_point() and float(numbers.abs().max()) >= _LARGE:
        wrong = "has scales that are all 1, beside bytes up to 240 and more: they were never loaded"
    return Held(widen(data, scale.detach(), LayerSpec(rows, columns, "none")), True, wrong)


def _wrong_scale(scale: Tensor) -> str:
    values = scale.detach().float()
    right = bool((values.isfinite() & (values > 0)).all())
    return "" if right else "has a scale that is NaN, infinite, zero or negative"


def _block(size: int, count: int) -> int:
    """The elements that share a scale, of `size` with `count` scales: 0 for all; -1 if no block fits."""
    if count in (1, size):
        return int(1 < count == size)
    powers = (1 << bits for bits in range(1, 15))
    return next((block for block in powers if -(-size // block) == count), -1 if size % count else size // count)


def weight_faults(model: nn.Module, folder: Path | None, remarks: list[str]) -> Iterator[Fault]:
    """Weights whose scale is missing, does not fit or cannot be right, and tensors that are not those of the folder."""
    get, alone = {} if folder is None else _readers(folder), []
    for module_name, module in model.named_modules():
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            name = f"{module_name}.{leaf}".lstrip(".")
            if tensor is None or "scale" in leaf or not (tensor.is_floating_point() or tensor.dtype in _EIGHT_BITS):
                continue
            live, read = held(module, leaf), get.get(_WRAPPED.sub("", name))
            if live.wrong and tensor.ndim > 1:
                yield Fault("scale", name, live.wrong, INF)
            if read is not None:
                yield from (Fault("file", name, message, error) for message, error in _differences(live, read()))
            elif get and tensor.ndim > 1:
                alone.append(name)
    if alone:
        remarks.append(f"{alone[0]} ({len(alone)} such) has no counterpart in the folder: it was not compared")


def _readers(folder: Path) -> dict[str, Callable[[], Held]]:
    """A function that reads and dequantizes each tensor of a folder, by the names that transformers' model has."""
    files = read_files(folder)
    if files.findings:
        raise ArtifactError(f"{folder / files.findings[0].where} {files.findings[0].message}: see octavo verify")

    def read(name: str) -> Tensor:
        layer, _, leaf = name.rpartition(".")
        names = (f"{layer}.{pattern.format(leaf)}" for pattern in _SCALES)
        scale = next((files.get(each) for each in names if each in files.shapes), None)
        data = files.get(name)
        return _widened(data, scale).weight if data.dtype in _EIGHT_BITS else data.float()

    get, names = read, list(files.shapes)
    try:
        experts = transformers_meta_model(files.config, folder).experts
        get, names = experts.by_model_names(read, names) if experts.stacks else (get, names)
    except (ArtifactError, ImportError):  # not of transformers: the model has the names of the files
        pass
    narrow = {n for n in names if files.dtypes.get(n, "F8_E4M3") in ("F8_E4M3", "F8_E5M2", "I8")}  # a stack may be
    return {name: lambda name=name: Held(get(name), name in narrow) for name in names}  # type: ignore[misc]


def _differences(live: Held, stored: Held) -> Iterator[tuple[str, float]]:
    """What a tensor holds in place of the file's, and |w - w_file| / |w_file|: of each matrix of a stack."""
    w, truth = live.weight.cpu(), stored.weight
    if w.shape != truth.shape or not bool(w.isfinite().all()):
        yield f"is {list(w.shape)}, or not finite; it is {list(truth.shape)} in the folder", INF
    elif w.ndim == 3:
        for i, pair in enumerate(zip(w, truth, strict=True)):
            yield from ((f"matrix {i} {what}", error) for what, error in _differences(*(Held(m, True) for m in pair)))
    elif (error := float((w - truth).norm() / truth.norm().clamp(min=1e-30))) > _NEAR[
        live.eight_bit | stored.eight_bit
    ]:
        factor = float((w * truth).sum() / truth.square().sum().clamp(min=1e-30))
        cosine = factor * float(truth.norm() / w.norm().clamp(min=1e-30))
        if abs(cosine) < 0.5:
            yield f"has nothing of the folder's (cosine {cosine:.2f}): never loaded, it is random or zero", error
        else:
            lost = "a scale is lost, or it was trained or merged since"
            yield f"is {factor:.4g} times the folder's (cosine {cosine:.3f}): {lost}", error
