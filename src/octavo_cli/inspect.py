"""octavo inspect: the tensors of a packed folder, and the dtypes that a model trains in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo_cli.display import print_table, say
from octavo_cli.dtypes import print_dtypes
from octavo_cli.options import AsJson, option, refuse_unused

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.artifact.packed.reader import PackedTensors


def inspect_command(
    command: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed folder; with --dtypes the model of a training.")
    ],
    dtypes: Annotated[
        bool,
        typer.Option(
            "--dtypes",
            help="Show in which dtype each operation of a step of training runs, and why. SOURCE is a preset, a TOML "
            "file of settings, a run of octavo train, or the folder or config.json of a Hugging Face model.",
        ),
    ] = False,
    module: Annotated[
        str | None, option("GLOB", "With --dtypes: the operations of these modules, one by one; * for all.")
    ] = None,
    recipe: Annotated[str | None, option("RECIPE", "With --dtypes: another recipe than that of the settings.")] = None,
    batch: Annotated[int | None, option("NUMBER", "With --dtypes: sequences.")] = None,
    context: Annotated[int | None, option("NUMBER", "With --dtypes: tokens of a sequence.")] = None,
    weights: Annotated[str | None, option("NAME", "With --dtypes: the dtype of the weights, fp32 or bf16.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the tensors of a packed folder, or trace dtypes.

    Each row of a packed folder's table has a tensor's dtype, shape, scheme, the number and range of its scales, and its
    size.

    With --dtypes, a forward and backward pass runs on tensors without numbers, under the autocast of a GPU, so that a
    model of any size can be shown on any machine.

    Examples:

      octavo inspect packed/first

      octavo inspect llama-3-70b --dtypes

      octavo inspect models/qwen --dtypes --recipe bf16 --module "*.layers.0.self_attn*"
    """
    changes = {"recipe": recipe, "batch": batch, "context": context, "optimizer.weights": weights}
    given = {name: value for name, value in changes.items() if value is not None}
    if dtypes:
        print_dtypes(source, module, given, as_json=as_json)
        return
    refuse_unused(command, ["--module", "--recipe", "--batch", "--context", "--weights"], "--dtypes")
    if source.suffix == ".toml" or not source.exists():
        raise ValueError(f"{source} is no packed folder; to trace the dtypes of a model, add --dtypes")
    _print_packed(source, as_json)


def _print_packed(folder: Path, as_json: bool) -> None:
    from octavo.artifact.packed.plausible import reciprocal_warning
    from octavo.artifact.packed.reader import PackedTensors
    from octavo.words import plural

    packed = PackedTensors(folder)
    rows = [_layer(packed, name) for name in packed.packing.schemes]
    rows += [_scale(name, t) for name, t in packed.kv_tensors(packed.packing).items()]
    rows += [_other(packed, name) for name in packed.others]
    total = sum(row["bytes"] for row in rows)
    suspects = packed.suspects()
    if as_json:
        found = {"layout": packed.packing.layout, "bytes": total, "reciprocal_scales": suspects, "tensors": rows}
        found["unused"] = packed.unused
        print(json.dumps(found, indent=2))
        return
    numbers = ("scales", "least", "largest", "MB")
    shown = []
    for row in rows:
        least, largest = (f"{row[key]:.3g}" if key in row else "" for key in ("least", "largest"))
        shape, megabytes = " x ".join(map(str, row["shape"])), f"{row['bytes'] / 1e6:.2f}"
        scheme, scales = row.get("scheme", ""), str(row.get("scales", ""))
        shown.append((row["tensor"], row["dtype"], shape, scheme, scales, least, largest, megabytes))
    print_table(("tensor", "dtype", "shape", "scheme", *numbers), shown, right=numbers)
    layers, left = plural(len(packed.packing.schemes), "layer"), plural(len(packed.ignored), "linear layer")
    say(f"{packed.packing.layout}: {layers} packed, {left} in BF16, {total / 1e6:.2f} MB")
    if packed.unused:
        say(f"{len(packed.unused)} scales and zero points that no layer reads, {packed.unused[0]} among them")
    if suspects:
        say(reciprocal_warning(suspects, len(packed.packing.schemes)), "red")


def _layer(packed: PackedTensors, name: str) -> dict[str, Any]:
    scheme, (data, scale) = packed.packing.schemes[name], packed.stored(name)
    values = scheme.packed_weight(data, scale).scale.float()
    row = {
        "tensor": f"{name}.weight", "dtype": "e4m3", "shape": list(data.shape),
        "scheme": scheme.name, "scales": scale.numel(),
        "least": float(values.min()), "largest": float(values.max()), "bytes": data.nbytes + scale.nbytes,
    }  # fmt: skip
    return row | ({"input_scale": float(packed.input_scale(name))} if scheme.static else {})


def _scale(name: str, scale: Tensor) -> dict[str, Any]:
    return {
        "tensor": name, "dtype": "float32", "shape": list(scale.shape), "scheme": "kv cache", "scales": 1,
        "least": float(scale), "largest": float(scale), "bytes": scale.nbytes,
    }  # fmt: skip


def _other(packed: PackedTensors, name: str) -> dict[str, Any]:
    spec = packed.reader.specs[name]
    dtype = str(spec.dtype).removeprefix("torch.")
    return {"tensor": name, "dtype": dtype, "shape": list(spec.shape), "bytes": spec.nbytes}
