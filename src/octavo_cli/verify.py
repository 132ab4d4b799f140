"""octavo verify and inspect: what a packed folder holds, and whether it is right."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.util import plural
from octavo_cli import shared
from octavo_cli.display import check_output, print_rows, progress, say, show, write_output
from octavo_cli.shared import DATA_HELP, argument, option, print_reading, refuse_unused

if TYPE_CHECKING:
    from octavo.checkpoint.packed_folder import PackedTensors
    from octavo.verification.findings import Report


_ROWS = 12


def verify_command(
    command: typer.Context,
    packed: shared.Packed,
    against: Annotated[
        Path | None, option("MODEL", "The folder or run that it was packed from; without it fewer checks are made.")
    ] = None,
    calibration: Annotated[Path | None, option("FOLDER", "The calibration that gave the stored scales.")] = None,
    data: Annotated[list[str] | None, option("TEXT", f"{DATA_HELP}; without it the quality is not measured.")] = None,
    budget: Annotated[
        list[str] | None, option("BUDGET", f"The most that packing may cost on --data: {shared.BUDGET_HELP}.")
    ] = None,
    samples: Annotated[int, option("NUMBER", "Number of prompts.")] = 64,
    context: shared.PromptTokens = 512,
    batch: shared.PromptBatch = 8,
    device: shared.Device = "cpu",
    seed: shared.PromptSeed = 0,
    folded: Annotated[bool, option("--folded", "Weights were smoothed or rotated: do not compare them.")] = False,
    live: Annotated[
        bool, option("--live", "Also run the model that octavo.load opens, and check what its layers compute.")
    ] = False,
    to_json: Annotated[Path | None, option("--json FILE", "Write all results to FILE, as JSON.")] = None,
    to_html: Annotated[Path | None, option("--html FILE", "Write all results to FILE, as one HTML page.")] = None,
) -> None:
    """Check a packed folder, and measure what packing cost.

    The command checks the bytes, and opens the folder with every installed program that can read it. The exit code is 1
    if something is wrong, a reader disagrees with the bytes, or the cost is over the budget.
    Only safetensors and JSON are read from the folder; no code of it runs.

    Example:

      octavo verify packed/qwen --against models/qwen --data texts/ --budget kl=0.01 --budget ppl=0.5% --html q.html
    """
    import octavo
    from octavo.evaluation.metrics import Budget
    from octavo.evaluation.prompts import PromptOptions
    from octavo.report.page import page_of_report
    from octavo.verification import verify
    from octavo.verification.findings import invocation_of

    if not data:
        refuse_unused(command, ["--samples", "--context", "--batch", "--seed"], "--data")
    budgets, prompts = [Budget.parse(text) for text in budget or ()], PromptOptions(samples, context, batch, seed)
    if to_json is not None and to_html is not None and to_json.resolve() == to_html.resolve():
        raise ValueError(f"--json and --html must be two files, got {to_json} for both")
    check_output(to_json, "--json", "a report")
    check_output(to_html, "--html", "a page")
    with progress("reading model and prompts") as advance:
        report = verify(
            packed, against, data or (), calibration=calibration, budgets=budgets, prompts=prompts, device=device,
            folded=folded, progress=advance, on_read=print_reading,
        )  # fmt: skip
    _print(report)
    invocation = invocation_of(shlex.join(["octavo", *sys.argv[1:]]))
    if to_json is not None:
        write_output(to_json, json.dumps(report.to_dict(invocation), indent=1, allow_nan=False) + "\n")
    if to_html is not None:
        write_output(to_html, page_of_report(report, invocation).html())
    if not report.ok:
        raise typer.Exit(1)
    if live:
        found = octavo.check(octavo.load(packed, device), packed)
        show([found.table()])
        for line in (*found.remarks, f"live: {found.verdict}"):
            say(line)
        raise typer.Exit(not found.ok)


def _print(report: Report) -> None:
    shown = report
    if len(report.layers) > _ROWS:
        ordered = sorted(report.layers, key=lambda layer: layer.output_sqnr or layer.weight_sqnr or 0.0)
        remark = f"of {len(report.layers)} layers the {_ROWS} that lose most are shown; --json and --html have all"
        shown = replace(report, layers=ordered[:_ROWS], remarks=[*report.remarks, remark])
    show(shown.tables())
    for remark in shown.remarks:
        say(remark)
    say(f"{report.packed}: {report.verdict}", "" if report.ok else "red")
    for finding in report.findings:
        say(f"  {finding.kind} {finding}")


def inspect_command(
    command: typer.Context,
    source: Annotated[Path, argument("SOURCE", "A packed folder; with --dtypes a model.")],
    dtypes: Annotated[
        bool, option("--dtypes", "Show in which dtype each operation of a step of training runs, and why.")
    ] = False,
    module: Annotated[str | None, option("GLOB", "With --dtypes: the operations of modules, one by one.")] = None,
    recipe: Annotated[str | None, option("RECIPE", "With --dtypes: another recipe than that of the settings.")] = None,
    batch: Annotated[int | None, option("NUMBER", "With --dtypes: sequences.")] = None,
    context: Annotated[int | None, option("NUMBER", "With --dtypes: tokens of a sequence.")] = None,
    weights: Annotated[str | None, option("NAME", "With --dtypes: the dtype of the weights, fp32 or bf16.")] = None,
    as_json: shared.AsJson = False,
) -> None:
    """List the tensors of a packed folder, or trace dtypes.

    Each row of a packed folder's table has a tensor's dtype, shape, scheme, the number and range of its scales, and its
    size.

    With --dtypes SOURCE is a preset, a TOML file of settings, a run of octavo train, or the folder or config.json of a
    Hugging Face model. A forward and backward pass runs on tensors without numbers, under the autocast of a GPU, so
    that a model of any size can be shown on any machine.

    Examples:

      octavo inspect packed/first
      octavo inspect llama-3-70b --dtypes
      octavo inspect models/qwen --dtypes --recipe bf16 --module "*.layers.0.self_attn*"
    """
    changes = {"recipe": recipe, "batch": batch, "context": context, "optimizer.weights": weights}
    given = {name: value for name, value in changes.items() if value is not None}
    if dtypes:
        _print_dtypes(source, module, given, as_json)
        return
    refuse_unused(command, ["--module", "--recipe", "--batch", "--context", "--weights"], "--dtypes")
    if source.suffix == ".toml" or not source.exists():
        raise ValueError(f"{source} is no packed folder; to trace the dtypes of a model, add --dtypes")
    _print_packed(source, as_json)


def _print_packed(folder: Path, as_json: bool) -> None:
    from octavo.checkpoint.packed_folder import PackedTensors
    from octavo.checkpoint.scheme import reciprocal_warning

    packed = PackedTensors(folder)
    rows = [_layer(packed, name) for name in packed.packing.schemes]
    rows += [
        {
            "tensor": name, "dtype": "float32", "shape": list(scale.shape), "scheme": "kv cache", "scales": 1,
            "least": float(scale), "largest": float(scale), "bytes": scale.nbytes,
        }
        for name, scale in packed.kv_tensors(packed.packing).items()
    ]  # fmt: skip
    for name in packed.others:
        spec = packed.reader.specs[name]
        dtype = str(spec.dtype).removeprefix("torch.")
        rows.append({"tensor": name, "dtype": dtype, "shape": list(spec.shape), "bytes": spec.nbytes})
    total = sum(row["bytes"] for row in rows)
    suspects = packed.suspects()
    if as_json:
        found = {"layout": packed.packing.layout.name, "bytes": total, "reciprocal_scales": suspects, "tensors": rows}
        print(json.dumps(found | {"unused": packed.unused}, indent=2))
        return
    shown = []
    for row in rows:
        text = {name: str(row.get(name, "")) for name in ("tensor", "dtype", "shape", "scheme", "scales")}
        ends = {name: f"{row[name]:.3g}" if name in row else "" for name in ("least", "largest")}
        size = {"shape": " x ".join(map(str, row["shape"])), "MB": f"{row['bytes'] / 1e6:.2f}"}
        shown.append(text | ends | size)
    print_rows(shown)
    layers, left = plural(len(packed.packing.schemes), "layer"), plural(len(packed.ignored), "linear layer")
    say(f"{packed.packing.layout.name}: {layers} packed, {left} in BF16, {total / 1e6:.2f} MB")
    if packed.unused:
        say(f"{len(packed.unused)} scales and zero points that no layer reads, {packed.unused[0]} among them")
    if suspects:
        say(reciprocal_warning(suspects, len(packed.packing.schemes)), "red")


def _layer(packed: PackedTensors, name: str) -> dict[str, Any]:
    scheme, (data, scale) = packed.packing.schemes[name], packed.stored(name)
    values = scheme.packed_weight(data, scale).scale.float()
    row = {
        "tensor": f"{name}.weight", "dtype": scheme.weight.format, "shape": list(data.shape),
        "scheme": scheme.name, "scales": scale.numel(),
        "least": float(values.min()), "largest": float(values.max()), "bytes": data.nbytes + scale.nbytes,
    }  # fmt: skip
    return row | ({"input_scale": float(packed.input_scale(name))} if scheme.static else {})


def _print_dtypes(source: Path, module: str | None, changes: dict[str, Any], as_json: bool) -> None:
    """Trace a step of training, with `changes` of settings, and print its tables, or the operations of some modules."""
    from octavo.train.finished import trace_source

    flow = trace_source(source, changes)
    if module is not None:
        flow = flow.select(module)
    if as_json:
        print(json.dumps(flow.to_dict(), indent=2))
        return
    say(f"{flow.model} of {source}: a forward and backward pass, autocast {flow.autocast}")
    show([flow.operation_table()] if module is not None else flow.tables())
    for remark in flow.remarks:
        say(remark)
