"""octavo plan: memory, time and cost of a training run or a server, before it is paid for."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from csv import DictWriter
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.util import Table
from octavo.version import __version__
from octavo_cli.display import check_output, print_rows, print_table, say, write_output
from octavo_cli.shared import ATTENTIONS, CACHES, GPUS, SCHEMES, AsJson, argument, changed, option

if TYPE_CHECKING:
    from octavo.plan.cases import TrainingPlan
    from octavo.plan.serving import ServingPlan


_ROWS = 8  # of a search
_PARTS = {
    "fp8_copies": "FP8 copies",
    "block": "one block's backward",
    "head": "head and logits",
    "waiting": "waiting for the host",
}


def plan_command(
    context: typer.Context,
    model: Annotated[
        str,
        argument(
            "MODEL",
            "A preset such as llama-3-8b, a Hugging Face folder or config.json, a TOML file or a run of octavo "
            "train, or a number of parameters such as 7B.",
        ),
    ],
    gpu: Annotated[str, option("NAME", f"{', '.join(GPUS)}.")] = "h200",
    gpus: Annotated[int, option("NUMBER", "GPUs, eight in a node.")] = 1,
    network: Annotated[float, option("GBIT", "Gb/s of the network card of each GPU.")] = 400.0,
    tokens: Annotated[str, option("COUNT", "Tokens to train on, such as 1T or 1e12: days and cost.")] = "",
    days: Annotated[float | None, option("NUMBER", "The cheapest runs of --tokens that end in so many days.")] = None,
    price: Annotated[float | None, option("MONEY", "Price of an hour of one GPU.")] = None,
    serve: Annotated[bool, option("--serve", "Plan serving instead of training.")] = False,
    scheme: Annotated[
        str,
        option(
            "NAME",
            f"Packing scheme in serving: bf16, {', '.join(SCHEMES)}. Default: that of the recipe, "
            "which is channel for rowwise.",
        ),
    ] = "",
    kv_cache: Annotated[str, option("DTYPE", f"Keys and values in serving: {', '.join(CACHES)}.")] = "bf16",
    attention: Annotated[str, option("DTYPE", f"Attention of prompts in serving: {', '.join(ATTENTIONS)}.")] = "bf16",
    compare: Annotated[list[str] | None, option("NAME=VALUES", "Cases side by side, as recipe=bf16,rowwise.")] = None,
    csv: Annotated[Path | None, option("FILE", "Write the figures as a table, with a row for each case.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan memory, time and cost of training or serving a model.

    Nothing is allocated, and no GPU is used. Settings of octavo train can follow, such as --recipe, --batch, --context,
    --accumulate, --optimizer.state 8bit, --activation-checkpointing.mode full or --parallel.tp 2. --batch counts the
    sequences of all GPUs. In serving it counts the sequences that are generated at once, and the GPUs share each layer;
    without --compare a second table has all packing schemes.

    A number of parameters in place of a model shows the table of weights and optimizer states alone.

    Examples:

      octavo plan llama-3-8b --gpu h200 --gpus 8 --tokens 1T --price 3
      octavo plan llama-3-70b --gpus 64 --compare recipe=bf16,rowwise --compare gpu=h100,h200
      octavo plan llama-3-8b --tokens 1T --days 14
      octavo plan mixtral-8x7b --serve --gpus 2 --batch 64 --context 4096 --kv-cache fp8
      octavo plan llama-3-8b --serve --batch 16 --compare scheme=bf16,channel,int8,weight
      octavo plan 7B
    """
    from octavo.plan.cases import Case, find_runs, make_cases, parse_count, plan_schemes
    from octavo.train.settings import parse

    if (count := parse_count(model)) is not None:
        if given := [name for name in (*changed(context), *context.args) if name != "--json"]:
            raise ValueError(f"{given[0]} needs a model: a number of parameters has one table, that of training")
        _show_states(count, as_json)
        return
    if not model or model.startswith("--"):
        raise ValueError(f"MODEL comes before the settings and names a model, such as llama-3-8b; got {model!r}")
    budget = _token_budget(tokens, price, serve)
    check_output(csv, "--csv", "a table")
    case = Case(model, parse(context.args), gpu, gpus, network, scheme, kv_cache, attention)
    if days is not None:
        if given := [name for name in ("--serve", "--compare", "--gpus") if name in changed(context)]:
            raise ValueError(f"--days searches GPUs and recipes: leave out {given[0]}")
        if budget is None:
            raise ValueError("--days is the time for --tokens: add it, such as --tokens 1T")
        if not days > 0:
            raise ValueError(f"--days must be above 0; got {days:g}")
        runs = find_runs(case, budget, days)
        _save(csv, as_json, [plan.to_dict() for plan in runs])
        if not as_json:
            _show_runs(runs, budget, price)
        return
    cases = make_cases(case, compare or ())
    labels = [label for label, _ in cases]
    plans: list[TrainingPlan] = [] if serve else [each.training() for _, each in cases]
    served: list[ServingPlan] = [each.serving() for _, each in cases] if serve else []
    figures = [asdict(plan) for plan in served] or [plan.to_dict() for plan in plans]
    _save(csv, as_json, [{"case": label, **each} for label, each in zip(labels, figures, strict=True)])
    if as_json:
        return
    _show(labels, [_serving(plan) for plan in served] or [_training(plan, budget, price) for plan in plans])
    if serve and not compare:
        _show_schemes(plan_schemes(case))
    for label, plan in zip(labels, plans, strict=bool(plans)):
        _show_fitting(label if compare else "", plan, budget, price)
    packed = [f"{p.scheme}: {origin}." for p in served if (origin := p.origins.get("packed layers"))]
    by_gpu = [f"{p.gpu}: {_listed(p.origins, but='packed layers')}." for p in served]
    for remark in (*dict.fromkeys([*packed, *by_gpu]), *_waiting_remarks(labels, plans), *_remarks(plans)):
        say(remark)


def _token_budget(tokens: str, price: float | None, serve: bool) -> float | None:
    """The number of --tokens, None without; a ValueError for options that do not fit each other."""
    from octavo.plan.cases import parse_count

    budget = parse_count(tokens)
    if tokens and budget is None:
        raise ValueError(f"--tokens must be a number such as 300B, 1.5T or 1e12; got {tokens!r}")
    if price is not None and price < 0:
        raise ValueError(f"--price must be 0 or more; got {price:g}")
    if price is not None and not tokens:
        raise ValueError("--price gives the cost of --tokens: add it, such as --tokens 1T")
    if tokens and serve:
        raise ValueError("--tokens belongs to training: leave out --serve, or --tokens")
    return budget


def _save(csv: Path | None, as_json: bool, found: Any) -> None:
    """Print the figures as JSON if `as_json`, and write them to the file `csv` if there is one."""
    from octavo.train.config import flatten

    if as_json:
        print(json.dumps(found))
    if csv is not None:
        flat = [flatten(each, ("fitting",)) for each in found]
        rows = [{name: v for name, v in each.items() if not isinstance(v, list | dict)} for each in flat]
        text = io.StringIO()
        table = DictWriter(text, ["octavo plan", *dict.fromkeys(name for row in rows for name in row)], restval="")
        table.writeheader()
        table.writerows({"octavo plan": __version__, **row} for row in rows)
        write_output(csv, text.getvalue())


def _show(labels: list[str], columns: list[dict[str, str]]) -> None:
    """Print a table with a column for each case, or several, none wider than the terminal; equal rows once, first."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = {name: [column.get(name, "") for column in columns] for name in names}
    same = {name: row for name, row in rows.items() if len(labels) > 1 and len(set(row)) == 1}
    if same:
        print_table(Table("", ("in all cases", ""), [(name, row[0]) for name, row in same.items()], right=("",)))
        say()
    rows = {name: row for name, row in rows.items() if name not in same}
    widths = [2 + max(map(len, (label, *(row[at] for row in rows.values())))) for at, label in enumerate(labels)]
    room = get_terminal_size((sum(widths) + 1000, 24)).columns - max(map(len, rows), default=0)
    first = 0
    while first < len(labels):
        last = first + 1
        while last < len(labels) and sum(widths[first : last + 1]) <= room:
            last += 1
        some = tuple(labels[first:last])
        print_table(Table("", ("", *some), [(name, *row[first:last]) for name, row in rows.items()], right=some))
        first = last


def _show_runs(plans: Sequence[TrainingPlan], budget: float, price: float | None) -> None:
    rows = [
        {
            "GPUs": str(plan.gpus), "recipe": plan.setup.recipe.name,
            "checkpointing": plan.setup.config.activation_checkpointing.mode, "batch": str(plan.setup.config.batch),
            "tokens/s a GPU": f"{plan.tokens_per_second:,.0f}", "MFU": f"{plan.utilization:.2f}",
            "days": f"{plan.days(budget):,.1f}", "GPU hours": f"{plan.cost(budget, 1):,.0f}",
            "cost": "" if price is None else f"{plan.cost(budget, price):,.0f}",
        }
        for plan in plans[:_ROWS]
    ]  # fmt: skip
    model, gpu = plans[0].setup.model, plans[0].setup.gpu
    title = f"{model.name} on {gpu.name}, {budget:.3g} tokens: the cheapest of {len(plans)} runs that end in time"
    print_rows(rows, title=title)
    for remark in _remarks(plans[:1]):
        say(remark)


def _show_fitting(label: str, plan: TrainingPlan, budget: float | None, price: float | None) -> None:
    """With which options a plan fits that does not; nothing where it fits."""
    if plan.fits:
        return
    rows = [
        {
            "with": options, "GB at the peak": _digits(other.memory.peak / 1e9, 2),
            "tokens/s a GPU": f"{other.tokens_per_second:,.0f}", **_bill(other, budget, price),
        }
        for options, other in plan.fitting.items()
    ]  # fmt: skip
    say()
    if rows:
        print_rows(rows, title=f"{label or 'This'} does not fit. What fits:")
    else:
        say(
            f"{label or 'This'} does not fit, nor with three of these: a smaller --batch, another --recipe, more "
            "--gpus, --activation-checkpointing.mode full, --optimizer.state 8bit, --optimizer.weights bf16, "
            "--optimizer.offload."
        )


def _bill(plan: TrainingPlan, budget: float | None, price: float | None) -> dict[str, str]:
    """The days of a run and its cost, each if it can be computed."""
    found = {} if budget is None else {"days": f"{plan.days(budget):,.1f}"}
    return found if budget is None or price is None else found | {"cost": f"{plan.cost(budget, price):,.0f}"}


def _training(plan: TrainingPlan, budget: float | None, price: float | None) -> dict[str, str]:
    setup, memory = plan.setup, plan.memory
    found = {
        "parameters": f"{_digits(setup.model.parameters / 1e9, 2)} B",
        "GPUs": f"{plan.gpus} {setup.gpu.name}",
        "recipe": setup.recipe.name,
        "GEMMs": ", ".join(dict.fromkeys(backend.name for backend in plan.gemms.values())),
        "tokens a step": f"{plan.setup.config.step_tokens:,}",
    }
    found |= {f"GB {_name(name)}": _digits(size / 1e9, 2) for name, size in memory.parts.items()}
    found |= {
        "GB at the peak": _digits(memory.peak / 1e9, 2),
        "GB of the GPU": f"{setup.gpu.memory / 1e9:.0f}",
        "fits": "yes" if plan.fits else "NO",
        "GB in the CPU's memory": _digits(memory.offloaded / 1e9, 2),
        "largest batch": str(plan.largest_batch),
    }
    found |= {f"ms {_name(name)}": _digits(seconds * 1e3, 1) for name, seconds in plan.time.parts.items()}
    found |= {
        "ms of a step": _digits(plan.time.total * 1e3, 1),
        "ms of the host": _digits(plan.time.host * 1e3, 1),
        "tokens/s a GPU": f"{plan.tokens_per_second:,.0f}",
    }
    if plan.fits:  # what cannot run costs nothing
        found |= {"MFU": f"{plan.utilization:.2f}", **_bill(plan, budget, price)}
    gains = plan.gains.items()
    found |= {f"speed of {each.layer} {'x'.join(map(str, each.shape))}": f"{speed:.2f}x" for each, speed in gains}
    if plan.fp8_attention_speed is not None:
        found["speed of attention in FP8"] = f"{plan.fp8_attention_speed:.2f}x"
    return found


def _serving(plan: ServingPlan) -> dict[str, str]:
    return {
        "scheme": plan.scheme,
        "attention of the prompts": plan.attention,
        "GEMMs": plan.gemm,
        "GB weights": _digits(plan.weights / 1e9, 2),
        "GB keys and values": _digits(plan.cache / 1e9, 2),
        "KB of a token's keys and values": f"{plan.cache_a_token / 1e3:.1f}",
        "GB at the peak": _digits(plan.peak / 1e9, 2),
        "fits": "yes" if plan.fits else "NO",
        "largest batch": str(plan.largest_batch),
        "longest context": f"{plan.largest_context:,}",
        "ms of the prompts": _digits(plan.prefill_seconds * 1e3, 1),
        "prompt tokens/s": f"{plan.prefill_tokens_per_second:,.0f}",
        "ms of a decoding step": _digits(plan.step_seconds * 1e3, 2),
        "new tokens/s": f"{plan.decode_tokens_per_second:,.1f}",
    }


def _show_schemes(plans: Sequence[ServingPlan]) -> None:
    wide = plans[0]
    rows = [
        {
            "scheme": plan.scheme, "GEMMs": plan.gemm, "GB weights": _digits(plan.weights / 1e9, 2),
            "largest batch": str(plan.largest_batch), "ms of the prompts": _digits(plan.prefill_seconds * 1e3, 1),
            "speed": f"{wide.prefill_seconds / plan.prefill_seconds:.2f}x",
            "ms of a decoding step": _digits(plan.step_seconds * 1e3, 2),
            "its speed": f"{wide.step_seconds / plan.step_seconds:.2f}x",
            "layers measured": "yes" if plan.measured else "no",
        }
        for plan in plans
    ]  # fmt: skip
    print_rows(rows, title="By packing scheme")


def _listed(origins: Mapping[str, str], but: str = "") -> str:
    return "; ".join(f"{name}: {origin}" for name, origin in origins.items() if name != but)


def _digits(value: float, decimals: int) -> str:
    """The value with so many decimals; a small one with two digits that are not zero, such as 0.0013."""
    return f"{value:.{decimals}f}" if value == 0 or value >= 0.1 else f"{float(f'{value:.2g}'):f}".rstrip("0")


def _name(part: str) -> str:
    return _PARTS.get(part, part.replace("_", " "))


def _waiting_remarks(labels: Sequence[str], plans: Sequence[TrainingPlan]) -> Iterator[str]:
    """For each case with GPUs that wait for the host: how long, and the settings that train on more tokens."""
    for label, plan in zip(labels, plans, strict=bool(plans)):
        if waiting := plan.time.parts["waiting"]:
            faster = ", ".join(f"{setting} ({speed:.2f}x)" for setting, speed in plan.faster_settings.items())
            others = f" Tokens/s with other settings: {faster}." if faster else ""
            yield f"{label}: the GPU waits for the host: {_digits(waiting * 1e3, 1)} ms of a step.{others}"


def _remarks(plans: Sequence[TrainingPlan]) -> Iterator[str]:
    for plan in {plan.setup.gpu.key: plan for plan in plans}.values():
        gpu = plan.setup.gpu
        measured = f"Measured: {gpu.measured}." if gpu.measured else "Nothing of Octavo is measured on it."
        yield f"{gpu.name}: {_listed(plan.origins)}. Data sheet: {gpu.source}. {measured}"


def _show_states(parameters: float, as_json: bool) -> None:
    """The table of weights, gradients and optimizer states of so many parameters."""
    from octavo.plan.setup import known_states

    sizes, rows = {}, []
    for name, each in known_states().items():
        gpu, cpu = each.on_gpu * parameters, (each.total - each.on_gpu) * parameters
        sizes[name] = {"gpu": gpu, "cpu": cpu}
        row = {"bytes of a parameter": name, "weight": f"{each.weight:g}", "gradient": f"{each.gradient:g}"}
        row |= {"moments": f"{each.moments:.4g}", "copies": f"{each.copies:g}"}
        rows.append(row | {"GPU GB": f"{gpu / 1e9:.1f}", "CPU GB": f"{cpu / 1e9:.1f}"})
    _save(None, as_json, sizes)
    if as_json:
        return
    print_rows(rows)
    say("Without activations. The copies are two of the weight in FP8 and a gradient in BF16: they come on top.")
