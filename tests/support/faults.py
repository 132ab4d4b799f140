"""Faults to plant in a packed folder."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from verify_examples import Damage, change_json, change_tensors

E4M3 = torch.float8_e4m3fn
DamageFromModel = Callable[[Path, Path], None]
"""Damages a folder, given MODEL too."""


def edit(change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    return lambda folder: change_tensors(folder, change)


def replaced(name: str, function: Callable[[Tensor], Tensor]) -> Damage:
    return edit(lambda tensors: tensors.update({name: function(tensors[name].clone())}))


def scaled(name: str, factor: float, place: Any = ...) -> Damage:
    """Multiply a scale, or a part of it."""

    def change(scale: Tensor) -> Tensor:
        scale[place] *= factor
        return scale

    return replaced(f"{name}.weight_scale", change)


def coded(name: str, change: Callable[[Tensor], Any]) -> Damage:
    """Let `change` edit the bytes of a weight in place, as a flat uint8 tensor."""

    def function(weight: Tensor) -> Tensor:
        change(weight.view(torch.uint8).view(-1))
        return weight

    return replaced(f"{name}.weight", function)


def swapped(*names: tuple[str, str]) -> Damage:
    def change(tensors: dict[str, Tensor]) -> None:
        for a, b in names:
            tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()

    return edit(change)


def layers_swapped(a: str, b: str) -> Damage:
    return swapped(*((f"{a}.{leaf}", f"{b}.{leaf}") for leaf in ("weight", "weight_scale")))


def rows_swapped(t: Tensor) -> Tensor:
    """An eight-bit tensor cannot be indexed."""
    rows = t.view(torch.uint8)[[1, 0, *range(2, len(t))]]
    return rows.view(t.dtype)


def times(name: str, factor: float) -> Damage:
    return replaced(name, lambda scale: scale * factor)


def moved(name: str, exponent: int) -> Damage:
    """Add to the exponent of one block."""

    def change(scale: Tensor) -> Tensor:
        scale[9, 1] += exponent
        return scale

    return replaced(f"{name}.weight_scale", change)


def cast_again(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> DamageFromModel:
    """Write the bytes e4m3(change(w, w / s)) of MODEL's weight w, with the scale s that the folder has."""

    def damage(folder: Path, model: Path) -> None:
        w = load_file(model / "model.safetensors")[f"{name}.weight"].float()

        def edit_bytes(tensors: dict[str, Tensor]) -> None:
            s = tensors[f"{name}.weight_scale"]
            tensors[f"{name}.weight"] = change(w, s).clamp(-448, 448).to(E4M3)

        change_tensors(folder, edit_bytes)

    return damage


def noisy(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Another checkpoint of the model."""

    def change(w: Tensor, s: Tensor) -> Tensor:
        return (w + share * w.std() * torch.randn(w.shape, generator=torch.Generator().manual_seed(0))) / s

    return change


def truncated(w: Tensor, s: Tensor) -> Tensor:
    """Toward zero: the next number down where rounding to nearest goes up."""
    x = w / s
    q = x.clamp(-448, 448).to(E4M3)
    up = q.float().abs() > x.abs()
    return (q.view(torch.uint8) - up.to(torch.uint8)).view(E4M3).float()


def setting(**values: Any) -> Damage:
    return lambda folder: change_json(folder / "config.json", lambda config: config.update(values))


def rope(folder: Path) -> None:
    change_json(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=100_000.0))


def shifted_ids(folder: Path) -> None:
    def shift(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {token: (i + 1) % len(vocabulary) for token, i in vocabulary.items()}

    change_json(folder / "tokenizer.json", shift)


def no_inputs(folder: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None

    change_json(folder / "config.json", change)


def labelled(**weights: Any) -> Damage:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(weights)

    return lambda folder: change_json(folder / "config.json", change)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def put(name: str, place: Any, value: float) -> Damage:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8 if tensor.dtype == E4M3 else tensor.dtype)[place] = value
        return tensor

    return replaced(name, change)


def thousandth(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def function(codes: Tensor) -> None:
        codes[::1000] = change(codes[::1000])

    return function


def one_bit(codes: Tensor) -> None:
    codes[1234] ^= 0b1000
