"""octavo plan: memory, time and cost of a training run or a server, before it is paid for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo_cli.choices import ATTENTIONS, CACHES, GPUS, SCHEMES
from octavo_cli.display import print_table, say
from octavo_cli.options import AsJson, changed, option

if TYPE_CHECKING:
    from octavo.plan.serving import ServingPlan
    from octavo.plan.training import TrainingPlan


_SMALLEST = 1024  # inputs and outputs of the smallest layer that was measured
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
        typer.Argument(
            metavar="MODEL",
            help="A preset such as llama-3-8b, a Hugging Face folder or config.json, a TOML file or a run of octavo "
            "train, or a number of parameters such as 7B.",
        ),
    ],
    gpu: Annotated[str, option("NAME", f"{', '.join(GPUS)}.")] = "h200",
    gpus: Annotated[int, option("NUMBER", "GPUs, eight in a node.")] = 1,
    network: Annotated[float, option("GBIT", "Gb/s of the network card of each GPU.")] = 400.0,
    tokens: Annotated[str, option("COUNT", "Tokens to train on, such as 1T: days and cost.")] = "",
    price: Annotated[float | None, option("MONEY", "Price of an hour of one GPU.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Plan serving instead of training.")] = False,
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
    compare: Annotated[
        str, option("NAME=VALUES", "Cases side by side, such as recipe=bf16,rowwise or gpus=8,64.")
    ] = "",
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

      octavo plan llama-3-70b --gpus 64 --parallel.tp 8 --compare recipe=bf16,rowwise

      octavo plan mixtral-8x7b --serve --gpus 2 --batch 64 --context 4096 --kv-cache fp8

      octavo plan llama-3-8b --serve --batch 16 --compare scheme=bf16,channel,int8,weight

      octavo plan 7B
    """
    from octavo.plan.cases import Case, make_cases, parse_count, plan_schemes

    count = parse_count(model)
    if count is not None:
        if given := [name for name in (*changed(context), *context.args) if name != "--json"]:
            raise ValueError(f"{given[0]} needs a model: a number of parameters has one table, that of training")
        _show_states(count, as_json)
        return
    if model.startswith("--"):
        raise ValueError(f"MODEL comes before the settings; got {model} first")
    budget = _token_budget(tokens, price, serve)
    case = Case(model, tuple(context.args), gpu, gpus, network, scheme, kv_cache, attention)
    cases = make_cases(case, compare)
    labels = [label for label, _ in cases]
    if serve:
        served = [each.serving() for _, each in cases]
        _show(labels, served, _serving, as_json)
        if not compare and not as_json:
            _show_schemes(plan_schemes(case))
        remarks = _serving_remarks(served)
    else:
        plans = [each.training() for _, each in cases]
        _show(labels, plans, lambda plan: _training(plan, budget, price), as_json)
        remarks = [*_waiting_remarks(labels, plans), *_remarks(plans)]
    for remark in [] if as_json else remarks:
        say(remark)


def _token_budget(tokens: str, price: float | None, serve: bool) -> float | None:
    """The number of --tokens, None without; a ValueError for options that do not fit each other."""
    from octavo.plan.cases import parse_count

    budget = parse_count(tokens)
    if tokens and budget is None:
        raise ValueError(f"--tokens must be a number such as 300B or 1.5T; got {tokens!r}")
    if price is not None and price < 0:
        raise ValueError(f"--price must be 0 or more; got {price:g}")
    if price is not None and not tokens:
        raise ValueError("--price gives the cost of --tokens: add it, such as --tokens 1T")
    if tokens and serve:
        raise ValueError("--tokens belongs to training: leave out --serve, or --tokens")
    return budget


def _show(labels: list[str], plans: Sequence[Any], figures: Callable[[Any], dict[str, str]], as_json: bool) -> None:
    """Print a table with a column for each plan, or JSON."""
    if as_json:
        print(json.dumps([{"case": label, **plan.to_dict()} for label, plan in zip(labels, plans, strict=True)]))
        return
    columns = [figures(plan) for plan in plans]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    print_table(("", *labels), rows, right=labels)


def _training(plan: TrainingPlan, budget: float | None, price: float | None) -> dict[str, str]:
    setup, memory = plan.setup, plan.memory
    found = {
        "parameters": f"{_digits(setup.model.parameters / 1e9, 2)} B",
        "GPUs": f"{plan.gpus} {setup.gpu.name}",
        "recipe": setup.recipe.name,
        "GEMMs": ", ".join(dict.fromkeys(backend.name for backend in plan.gemms.values())),
        "tokens a step": f"{plan.tokens_per_step:,}",
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
        "MFU": f"{plan.utilization:.2f}",
    }
    if budget is not None:
        found["days"] = f"{plan.days(budget):,.1f}"
        if price is not None:
            found["cost"] = f"{plan.cost(budget, price):,.0f}"
    found |= {f"speed of {gain.layer} {'x'.join(map(str, gain.shape))}": f"{gain.speedup:.2f}x" for gain in plan.gains}
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
    """The same model by each packing scheme."""
    wide = plans[0]
    rows = [
        (
            plan.scheme, plan.gemm, _digits(plan.weights / 1e9, 2), str(plan.largest_batch),
            _digits(plan.prefill_seconds * 1e3, 1), f"{wide.prefill_seconds / plan.prefill_seconds:.2f}x",
            _digits(plan.step_seconds * 1e3, 2), f"{wide.step_seconds / plan.step_seconds:.2f}x",
            "yes" if plan.measured else "no",
        )
        for plan in plans
    ]  # fmt: skip
    columns = (
        "scheme", "GEMMs", "GB weights", "largest batch", "ms of the prompts", "speed", "ms of a decoding step",
        "its speed", "layers measured",
    )  # fmt: skip
    print_table(columns, rows, right=columns[2:-1], title="By packing scheme")


def _serving_remarks(plans: Sequence[ServingPlan]) -> list[str]:
    """Where the figures come from."""
    by_gpu = [f"{p.gpu}: {_listed(p.origins, but='packed layers')}." for p in plans]
    packed = [f"{p.scheme}: {origin}." for p in plans if (origin := p.origins.get("packed layers"))]
    return list(dict.fromkeys([*packed, *by_gpu]))


def _listed(origins: Mapping[str, str], but: str = "") -> str:
    return "; ".join(f"{name}: {origin}" for name, origin in origins.items() if name != but)


def _digits(value: float, decimals: int) -> str:
    """The value with so many decimals; a small one with two digits that are not zero, such as 0.0013."""
    return f"{value:.{decimals}f}" if value == 0 or value >= 0.1 else f"{float(f'{value:.2g}'):f}".rstrip("0")


def _name(part: str) -> str:
    return _PARTS.get(part, part.replace("_", " "))


def _waiting_remarks(labels: Sequence[str], plans: Sequence[TrainingPlan]) -> list[str]:
    """For each case whose GPUs wait for the host: how long, and the settings with which they train on more tokens."""
    found = []
    for label, plan in zip(labels, plans, strict=True):
        if plan.time.waiting:
            faster = [f"{setting} ({speed:.2f}x)" for setting, speed in plan.faster_settings.items()]
            found.append(f"{label}: the GPU waits for the host: {_digits(plan.time.waiting * 1e3, 1)} ms of a step.")
            found[-1] += f" Tokens/s with other settings: {', '.join(faster)}." if faster else ""
    return found


def _remarks(plans: Sequence[TrainingPlan]) -> list[str]:
    """Where the figures come from, and advice where a case does not fit."""
    found = []
    for plan in {plan.setup.gpu.key: plan for plan in plans}.values():
        gpu = plan.setup.gpu
        found.append(
            f"{gpu.name}: {_listed(plan.origins)}. Data sheet: {gpu.source}. "
            + (f"Measured: {gpu.measured}." if gpu.measured else "Nothing of Octavo is measured on it.")
        )
    if min(plan.setup.model.width for plan in plans) < _SMALLEST:
        found.append(f"A small model: the time of layers below {_SMALLEST:,} inputs or outputs is extrapolated.")
    if not all(plan.fits for plan in plans):
        found.append(
            "Less memory: --activation-checkpointing.mode full, --optimizer.state 8bit, --optimizer.weights bf16, "
            "--optimizer.offload, a smaller --batch, or more --gpus."
        )
    return found


def _show_states(parameters: float, as_json: bool) -> None:
    """The table of weights, gradients and optimizer states of so many parameters."""
    from octavo.plan.states import KNOWN_STATES, own_states

    states = {**KNOWN_STATES, **own_states()}
    if as_json:
        sizes = {
            name: {"gpu": each.on_gpu * parameters, "cpu": (each.total - each.on_gpu) * parameters}
            for name, each in states.items()
        }
        print(json.dumps(sizes))
        return
    columns = ("weight", "gradient", "moments", "copies", "GPU GB", "CPU GB")
    rows = [
        (
            name, f"{each.weight:g}", f"{each.gradient:g}", f"{each.moments:.4g}", f"{each.copies:g}",
            f"{each.on_gpu * parameters / 1e9:.1f}", f"{(each.total - each.on_gpu) * parameters / 1e9:.1f}",
        )
        for name, each in states.items()
    ]  # fmt: skip
    print_table(("bytes of a parameter", *columns), rows, right=columns)
    say("Without activations. The copies are two of the weight in FP8 and a gradient in BF16: they come on top.")
