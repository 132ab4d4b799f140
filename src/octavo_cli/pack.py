"""octavo calibrate, pack and unpack: from a model to a packed folder, and from one packing to another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.util import plural, some_of
from octavo_cli import shared
from octavo_cli.display import print_facts, print_rows, progress, say
from octavo_cli.shared import DATA_HELP, argument, changed, numbers, option, print_reading, refuse_unused, required_data

if TYPE_CHECKING:
    from octavo.calibration.calibrator import Calibration
    from octavo.packing.budget import BudgetReport
    from octavo.packing.packer import PackReport

_ROWS = 10  # of groups of layers, or of sites


def pack_command(
    command: typer.Context,
    source: Annotated[Path, argument("SOURCE", "A run of octavo train, or a Hugging Face model folder.")],
    out: shared.Out,
    scheme: Annotated[
        str | None,
        option(
            "NAME",
            f"Scheme of the packed layers: {', '.join(shared.SCHEMES)}. Default: that of the run's recipe, or channel. "
            f"Of gguf: {', '.join(shared.GGUF_WEIGHTS)}. With --smooth or --rotate: bf16, fp32.",
        ),
    ] = None,
    layer: Annotated[list[str] | None, option("GLOB=SCHEME", "Another scheme for these layers. Repeatable.")] = None,
    layout: Annotated[
        str, option("NAME", f"{', '.join(shared.LAYOUTS)}, or gguf. {shared.FOR_VLLM} gguf is a file for llama.cpp.")
    ] = shared.LAYOUTS[0],
    skip: Annotated[list[str] | None, option("GLOB", "Layers that stay in BF16. Repeatable.")] = None,
    calibration: Annotated[Path | None, option("FOLDER", "By octavo calibrate: for static and --kv-cache.")] = None,
    rule: Annotated[str | None, option("NAME", "Rule of its scales: amax, the default, percentile or mse.")] = None,
    weights: Annotated[str, option("NAME", "Rule of the weights' scales: amax, or mse (mean squared error).")] = "amax",
    pow2: Annotated[bool, option("--pow2", "Round the scales of weights up to powers of two.")] = False,
    share_scales: Annotated[
        bool | None,
        option("", "One scale for layers that vLLM fuses. Default: yes, unless the run trained its own scales."),
    ] = None,
    kv_cache: Annotated[str | None, option("NAME", "fp8: store the scales of a cache of keys and values.")] = None,
    experts: Annotated[bool, option("--experts", "Pack the experts of a mixture too, each with own scales.")] = False,
    tensor_parallel: Annotated[str, option("NUMBERS", "GPUs, as 1,2,4, that the layers must divide over.")] = "1",
    step: shared.Step = None,
    smooth: Annotated[Path | None, option("FOLDER", "Move outliers into weights by a calibration, unpacked.")] = None,
    alpha: Annotated[float, option("NUMBER", "For --smooth: how much of the outliers moves, from 0 to 1.")] = 0.5,
    rotate: Annotated[bool, option("--rotate", "Rotate residual stream and values, unpacked. For RMSNorm.")] = False,
    seed: Annotated[int, option("NUMBER", "For --rotate: seed of the signs of the rotation.")] = 0,
    no_tokenizer: Annotated[bool, option("--no-tokenizer", "For gguf: leave out the tokenizer, else a BPE.")] = False,
    budget: Annotated[
        list[str] | None,
        option("BUDGET", f"Keep layers in BF16 until the model on --data is within {shared.BUDGET_HELP}."),
    ] = None,
    freeze: shared.Freeze = None,
    data: Annotated[list[str] | None, option("TEXT", f"For --budget and --freeze. {DATA_HELP}.")] = None,
    samples: Annotated[int, option("NUMBER", "For --budget: number of prompts.")] = 32,
    context: Annotated[int, option("NUMBER", "For --budget and --freeze: most tokens of a prompt.")] = 512,
    device: shared.Device = "cpu",
) -> None:
    """Write a model with its linear weights in FP8.

    The folder is a whole model: octavo generate, vLLM and transformers (with compressed-tensors) open it. Output heads,
    routers, layers that training skipped or moved to BF16, and everything but linear layers stay in BF16. Experts of a
    mixture stay in BF16 without --experts. --layer NAME=SCHEME packs a layer that training moved to BF16.

    --smooth and --rotate write a model in BF16 that computes the same and quantizes better, to calibrate and pack like
    any other. The factors of smoothing are powers of two, so nothing is rounded; a rotation rounds the weights that it
    changes. With both only the input of down_proj is smoothed, because the rotation does not reach it. Both help INT8,
    and outliers beyond the range of a static scale. FP8 with a scale for each token gains nothing (bench/log.md).

    --layout gguf writes a Llama, Mistral or Qwen2 in BF16 as one file: linear weights in Q8_0 (or F16), the embedding
    and the head in F16, vectors in F32. A packed folder can be written so after octavo unpack.

    Examples:

      octavo pack runs/first packed/first
      octavo pack models/qwen packed/qwen --scheme block --layout fp8 --tensor-parallel 1,2,4
      octavo pack models/qwen packed/qwen --calibration calibrated/qwen --kv-cache fp8
      octavo pack models/qwen packed/static --freeze 64 --data chats.jsonl
      octavo pack models/qwen packed/good --budget kl=0.01 --data chats.jsonl
      octavo pack models/llama models/llama-smooth --smooth calibrated/llama
      octavo pack runs/first first.gguf --layout gguf --no-tokenizer
    """
    from octavo.evaluation.metrics import Budget
    from octavo.evaluation.prompts import PromptOptions
    from octavo.packing import PackOptions, pack, pack_frozen, pack_within

    if smooth is not None or rotate:
        _only(command, "--smooth or --rotate", "--smooth", "--alpha", "--rotate", "--seed", "--scheme", "--step")
        if smooth is None:
            refuse_unused(command, ["--alpha"], "--smooth")
        if not rotate:
            refuse_unused(command, ["--seed"], "--rotate")
        _fold(source, out, scheme or "bf16", smooth, alpha, rotate, seed, step)
        return
    refuse_unused(command, ["--alpha", "--seed"], "--smooth or --rotate")
    if layout == "gguf":
        _only(command, "--layout gguf", "--layout", "--scheme", "--step", "--no-tokenizer")
        _write_gguf(source, out, scheme or shared.GGUF_WEIGHTS[0], not no_tokenizer, step)
        return
    refuse_unused(command, ["--no-tokenizer"], "--layout gguf")
    if out.suffix == ".gguf":
        raise ValueError(f"{out} would be a folder: add --layout gguf for a file, or give a name without .gguf")
    options = PackOptions(
        scheme=scheme,
        layers=_layers(layer or []),
        layout=layout,
        skip=skip or [],
        calibration=calibration,
        rule=rule,
        weights=weights,
        pow2=pow2,
        share=share_scales,
        kv_cache=kv_cache,
        experts=experts,
        tensor_parallel=numbers("--tensor-parallel", tensor_parallel),
    )
    if not (kv_cache or experts or freeze) and "static" not in (scheme, *options.layers.values()):
        refuse_unused(command, ["--calibration"], "--scheme static or --kv-cache")
    kept = None
    if budget and freeze is not None:
        raise ValueError("--budget and --freeze both run the model on --data: give one of them")
    if not budget and freeze is None:
        refuse_unused(command, shared.RUN_OPTIONS, "--budget or --freeze")
    if freeze is not None:
        refuse_unused(command, ["--samples"], "--budget")
    with progress("packing") as advance:
        run: dict[str, Any] = {"device": device, "step": step, "progress": advance, "on_read": print_reading}
        if freeze is not None:
            prompts, texts = PromptOptions(freeze, context), required_data(data)
            report = pack_frozen(source, out, texts, options, prompts=prompts, **run)
        elif budget:
            budgets, prompts = [Budget.parse(text) for text in budget], PromptOptions(samples, context)
            report, kept = pack_within(source, out, budgets, data or [], options, prompts=prompts, **run)
        else:
            report = pack(source, out, options, step=step, progress=advance)
    _print(report, kept, layout)


def _print(report: PackReport, kept: BudgetReport | None, layout: str) -> None:
    say(f"packed {report.source} into {report.folder}")
    print_facts([*_of_layers(report, kept), *_of_folder(report)])
    if kept is not None:
        print_budget(kept)
    if report.updates:
        _print_updates(report)
    if wide := report.unpacked_expert_bytes:
        what = f"{wide / report.folder_bytes:.0%} of the folder, {wide / 1e6:.2f} MB, are experts in BF16"
        say(f"warning: {what}: --experts packs them too", "yellow")
    _say_readers(report.folder)


def _print_updates(report: PackReport) -> None:
    """Print what the rounding left of merged adapters. Below a cosine of 0.5 most of it is noise."""
    rows = [
        {"layers": f"{each.layers} {kind}", "norm": f"{each.norm:.2f}", "cosine": f"{each.cosine:.3f}"}
        for kind, each in report.updates.items()
    ]
    print_rows(rows, title="the update by adapters, rounded to eight bits: its norm over that before, and their cosine")
    if noisy := [kind for kind, each in report.updates.items() if each.cosine < 0.5]:
        remedy = f"--skip '*.{noisy[0]}' leaves such layers in BF16, and adapters beside a packed base are not rounded"
        say(f"warning: what is left of {', '.join(noisy)} is mostly noise of the rounding: {remedy}", "yellow")


def _say_readers(folder: Path) -> None:
    from octavo.checkpoint.layouts import layout_of, not_for_transformers, read_config

    config = read_config(folder)
    if others := not_for_transformers(layout_of(config["quantization_config"]), config):
        say(others)


def _layers(given: list[str]) -> dict[str, str]:
    if wrong := [text for text in given if "=" not in text]:
        raise ValueError(f"--layer takes GLOB=SCHEME, such as '*.down_proj=channel', got {wrong[0]!r}")
    pairs = [(glob, name) for glob, _, name in (text.rpartition("=") for text in given)]
    if twice := [glob for glob, count in Counter(glob for glob, _ in pairs).items() if count > 1]:
        raise ValueError(f"--layer must give each pattern one scheme, got {twice[0]!r} more than once: leave one out")
    return dict(pairs)


def _of_layers(report: PackReport, kept: BudgetReport | None) -> list[tuple[str, str]]:
    from octavo.rates.measured import speeds_note

    facts = [("linear layers packed", f"{n}, {scheme}") for scheme, n in Counter(report.packed.values()).items()]
    before, after = (f"{size / 1e6:.2f} MB" for size in (report.bf16_bytes, report.packed_bytes))
    facts.append(("size of packed layers", f"{after} with scales, {report.ratio:.3f} of {before} in BF16"))
    if speeds := speeds_note(dict.fromkeys(report.packed.values())):
        facts.append(("speed", f"{speeds}; octavo verify --data measures the quality, beside int8's"))
    if report.cached:
        facts.append(("KV cache", f"scales of keys and values in e4m3, for {plural(report.cached, 'attention layer')}"))
    by_budget = [] if kept is None else kept.skip
    left = [f"{name}: {reason}" for name, reason in report.skipped.items() if name not in by_budget]
    if by_budget:
        left.append(f"{len(by_budget)} by the budget, in the table below")
    left += map(str, report.not_linear)
    facts += [("left in BF16", each) for each in left]
    return [*facts, *(("left out", f"{name}: the model has no place for it") for name in report.left_out)]


def _of_folder(report: PackReport) -> list[tuple[str, str]]:
    from octavo.checkpoint.folder import MODULES
    from octavo.checkpoint.layouts import is_expert

    facts = [("the whole folder", f"{report.folder_bytes / 1e6:.2f} MB")]
    if report.lacks_tokenizer:
        facts.append(("no tokenizer", "the source has none, and octavo generate needs one"))
    if any(scheme.startswith("group") for scheme in report.packed.values()):
        facts.append(("not for vLLM", "it cannot read groups of float32 scales; transformers and octavo can"))
    in_groups = [s for name, s in report.packed.items() if is_expert(name) and s.startswith(("group", "mx"))]
    if in_groups:
        facts.append(("not for transformers", f"it cannot read experts by {in_groups[0]}; octavo can"))
    if (report.folder / MODULES).is_file() and len(set(report.packed.values())) > 1:
        facts.append(("not for sentence-transformers", "it opens a folder of one scheme"))
    if report.gains:
        gains = sorted(report.gains.values())
        middle = gains[len(gains) // 2]
        facts.append(("SQNR gained by mse", f"{gains[0]:.2f} to {gains[-1]:.2f} dB, median {middle:.2f} dB"))
    if report.ratios:
        names, largest = max(report.ratios.items(), key=lambda each: each[1])
        groups = f"{plural(len(report.ratios), 'group')} that vLLM casts again by one scale, unlike training"
        differ = f"scales differ by {largest:.2f}x at most ({names}). --share-scales shares them"
        facts.append(("scales not shared", f"{groups}; {differ}"))
    return facts


def print_budget(found: BudgetReport) -> None:
    """Print the measured quality, the layers that stay in BF16, and the groups with the most harm per byte saved."""
    of = found.quality
    for budget in found.budgets:
        value, packed = budget.estimate(of), budget.estimate(found.all_packed)
        say(
            f"asked for {budget.show(budget.limit)}, measured {budget.show_estimate(value)} on "
            f"{plural(of.tokens, 'token')} of {plural(of.prompts, 'prompt')}; "
            f"{budget.show(packed.value)} with every layer packed"
        )
    shown, harm = max(_ROWS, found.kept + 2), found.harm.replace("_", " ")
    rows = [
        {
            "layers": group.name, harm: f"{group.harm:.3g}", "MB saved": f"{group.saved / 1e6:.3g}",
            "stays in": "BF16" if i < found.kept else "eight bits",
        }
        for i, group in enumerate(found.ranking[:shown])
    ]  # fmt: skip
    if len(found.ranking) > shown:
        rows.append({"layers": f"and {len(found.ranking) - shown} more", "stays in": "eight bits"})
    print_rows(rows)


def _only(command: typer.Context, mode: str, *allowed: str) -> None:
    """Raise a ValueError for an option that does nothing in this way of writing a model."""
    if useless := [name for name in changed(command) if name not in allowed]:
        raise ValueError(f"{useless[0]} does nothing with {mode}: leave one of them out")


def _fold(
    source: Path, out: Path, dtype: str, smooth: Path | None, alpha: float, rotate: bool, seed: int, step: int | None
) -> None:
    from octavo.packing.transforms import fold

    dtypes = {"bf16": "bfloat16", "fp32": "float32"}
    if dtype not in dtypes:
        raise ValueError(
            f"--smooth and --rotate write a model to calibrate and to pack afterwards: --scheme must be one of "
            f"{', '.join(dtypes)}, got {dtype!r}"
        )
    with progress("folding") as advance:
        report = fold(
            source, out, smooth=smooth, alpha=alpha, rotate=rotate, seed=seed, dtype=dtypes[dtype], step=step,
            progress=advance,
        )  # fmt: skip
    say(f"folded {report.source} into {report.folder}")
    facts = []
    if report.smoothed:
        lows, highs = zip(*report.smoothed.values(), strict=True)
        facts.append(("tensors smoothed", f"{len(lows)}, by factors of {min(lows):g} to {max(highs):g}"))
    if report.rotated:
        stream, head = report.rotated
        facts.append(("rotated", f"residual stream in blocks of {stream}, heads in blocks of {head}"))
    if report.untied:
        facts.append(("head", "has its own weight now; it shared that of the embedding"))
    facts.append(("tensors changed", str(report.changed)))
    facts += [("left out", f"{name}: the model has no place for it") for name in report.left_out]
    print_facts([*facts, ("the whole folder", f"{report.folder_bytes / 1e6:.2f} MB")])


def _write_gguf(source: Path, out: Path, weights: str, tokenizer: bool, step: int | None) -> None:
    from octavo.packing.gguf_export import export_gguf

    with progress("exporting") as advance:
        report = export_gguf(source, out, weights=weights, tokenizer=tokenizer, step=step, progress=advance)
    types = ", ".join(f"{plural(count, 'tensor')} of {kind}" for kind, count in report.types.items())
    say(f"exported {source} into {report.path}: {report.architecture}, {types}, {report.bytes / 1e6:.2f} MB")
    for remark in report.remarks:
        say(remark)


def unpack_command(
    command: typer.Context,
    folder: shared.Packed,
    out: shared.Out,
    layout: Annotated[
        str | None, option("NAME", f"Another layout: {', '.join(shared.LAYOUTS)}. {shared.FOR_VLLM} Default: BF16.")
    ] = None,
    scheme: Annotated[
        str | None, option("NAME", f"Another scheme: {', '.join(shared.SCHEMES)}. Default: that of each layer stays.")
    ] = None,
    freeze: shared.Freeze = None,
    data: Annotated[list[str] | None, option("TEXT", f"For --freeze. {DATA_HELP}.")] = None,
    context: Annotated[int, option("NUMBER", "For --freeze: most tokens of a prompt.")] = 512,
    device: shared.Device = "cpu",
) -> None:
    """Write a packed model in BF16, or in another layout or scheme.

    In BF16 every weight is its bytes times its scale, rounded once.

    With --layout, --scheme or --freeze the model stays packed. The command then reports whether any weight changed, and
    by how much.

    Examples:

      octavo unpack packed/first models/first
      octavo unpack packed/block packed/block-fp8 --layout fp8
      octavo unpack packed/first packed/static --freeze 64 --data chats.jsonl
    """
    from octavo.evaluation.prompts import PromptOptions
    from octavo.packing import convert_layout, freeze_folder, unpack

    if freeze is not None and scheme not in (None, "static"):
        raise ValueError(f"--freeze stores scales of inputs, which only the scheme static has; got --scheme {scheme}")
    if freeze is None:
        refuse_unused(command, shared.RUN_OPTIONS, "--freeze")
    if out.suffix == ".gguf":
        raise ValueError(f"{out} would be a folder: give OUT, and octavo pack OUT {out} --layout gguf makes the file")
    to_bf16 = freeze is None and layout is None and scheme is None
    layout = layout or shared.LAYOUTS[0]
    with progress("unpacking" if to_bf16 else "converting") as advance:
        if to_bf16:
            result = unpack(folder, out, progress=advance)
        elif freeze is None:
            result = convert_layout(folder, out, layout=layout, scheme=scheme, progress=advance)
        else:
            result = freeze_folder(
                folder, out, required_data(data), layout=layout, prompts=PromptOptions(freeze, context), device=device,
                progress=advance, on_read=print_reading,
            )  # fmt: skip
    say(f"{'unpacked' if to_bf16 else 'converted'} {folder} into {out}")
    if result.unused:
        say(f"left out: {len(result.unused)} scales and zero points that no layer reads, {result.unused[0]} among them")
    if to_bf16:
        return
    _say_readers(out)
    if result.lossless:
        say("no weight changed")
        return
    worst = min(result.sqnr, key=lambda name: result.sqnr[name])
    finite = sorted(db for db in result.sqnr.values() if db < float("inf"))
    say(
        f"{len(finite)} of {plural(len(result.sqnr), 'weight')} were cast again: median "
        f"{finite[len(finite) // 2]:.1f} dB, lowest {result.sqnr[worst]:.1f} dB ({worst})"
    )


def calibrate_command(
    model: Annotated[Path, argument("MODEL", "A Hugging Face model folder, or a run of octavo train.")],
    out: shared.Out,
    data: Annotated[list[str], option("TEXT", f"{DATA_HELP}.")],
    samples: Annotated[int, option("NUMBER", "Number of prompts; 128 to 512 are usual.")] = 256,
    context: shared.PromptTokens = 2048,
    batch: shared.PromptBatch = 8,
    device: shared.Device = "cpu",
    seed: shared.PromptSeed = 0,
    step: shared.Step = None,
) -> None:
    """Measure the tensors of a model while it runs on text.

    The model runs in BF16 on prompts. The folder OUT gets the amax (also by channel and by batch) and the distribution
    of magnitudes of these tensors: inputs of linear layers, outputs of norms, queries, keys and values.

    One block is in memory at a time. Give the same command again to resume after an interruption.

    Example:

      octavo calibrate models/llama calibrated/llama --data chats.jsonl --data books/ --samples 512
    """
    from octavo.calibration import calibrate
    from octavo.evaluation.prompts import PromptOptions

    prompts = PromptOptions(samples, context, batch, seed)
    try:
        with progress("reading model and prompts") as advance:
            found = calibrate(
                model, data, out, prompts=prompts, device=device, step=step, progress=advance, on_read=print_reading
            )
    except KeyboardInterrupt:
        say(f"interrupted: the blocks that were done are kept beside {out}; the same command continues", error=True)
        raise typer.Exit(130) from None
    say(f"calibrated {model} into {out}")
    fewer = f" ({samples} asked for, the data has no more)" if found.prompts < samples else ""
    sites = plural(len(found.sites), "site")
    say(f"{plural(found.prompts, 'prompt')}{fewer}, {plural(found.tokens, 'token')}, {sites}")
    if found.unseen:
        say(
            f"no token reached {len(found.unseen)} matrices of experts ({some_of(found.unseen)}): a static scale of "
            "such an input is the largest of the layer's other experts. More data may reach it"
        )
    _print_outliers(found)


def _print_outliers(found: Calibration) -> None:
    from octavo.calibration.site_statistics import PERCENTILES

    high = PERCENTILES[-1]
    rows: dict[tuple[float, str], dict[str, str]] = {}
    for name, statistics in ((name, s) for name, s in found.sites.items() if s.tokens):
        percentile = statistics.percentile(high)
        ratio = statistics.amax / percentile if percentile else float("inf") if statistics.amax else 1.0
        rows[ratio, name] = {
            "site": name, "amax": f"{statistics.amax:.4g}", f"{high}%": f"{percentile:.4g}", "ratio": f"{ratio:.2f}",
            "outlier channels": str(len(statistics.outlier_channels())),
        }  # fmt: skip
    shown = [rows[key] for key in sorted(rows, reverse=True)[:_ROWS]]
    print_rows(shown, title=f"the {plural(len(shown), 'site')} with the largest outliers")
