"""The tables of docs/plan.md: the figures of `octavo plan` beside measured ones."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace

from bench.gpu.modes import BASE, FUSED, SERVE, SERVE_FP8_ATTENTION
from bench.gpu.plan import AIMS, MODELS, planned_again
from bench.gpu.sharded import OURS, WIDE
from bench.report.experts import NAMES
from bench.report.scaling import gradient_bytes, rows_of, runs
from bench.report.tables import Result, Row, earlier, machine
from octavo.plan.cases import Case
from octavo.plan.hardware import find_gpu, known_gpus
from octavo.plan.models import find_architecture, model_presets
from octavo.plan.passes import STACKED_GATE, Pass
from octavo.plan.rates import grouped_seconds
from octavo.plan.schemes import find_scheme
from octavo.plan.server import Server
from octavo.plan.serving import plan_serving
from octavo.plan.setup import Setup, make_setup
from octavo.plan.states import KNOWN_STATES, own_states
from octavo.plan.training import TrainingPlan
from octavo.recipe import get_recipe
from octavo.train.config import Config

Rows = Iterable[Row]
STACK = {  # modes of gpu_stack.json: recipe, whether Octavo's own blocks, whether a figure of the plan was fitted to it
    BASE: ("bf16", False, "attention"),
    FUSED: ("rowwise", True, "temporary tensors"),
    "ours plain: tensorwise, compile": ("tensorwise", False, ""),
    "ours plain: rowwise_dw_bf16, compile": ("rowwise_dw_bf16", False, ""),
    "ours plain: blockwise, compile": ("blockwise", False, ""),
    "ours plain: delayed, compile": ("delayed", False, ""),
}
SERVED = [  # results, key, GPU, mode, scheme, batch, context, and the dtypes of keys and values and of attention
    ("gpu_serve", "prefill", "h100", BASE, "bf16", 1, 8192, "bf16", "bf16"),
    ("gpu_serve", "prefill", "h100", SERVE, "channel", 1, 8192, "bf16", "bf16"),
    ("gpu_attention", "prefill", "h200", BASE, "bf16", 1, 8192, "bf16", "bf16"),
    ("gpu_attention", "prefill", "h200", SERVE, "channel", 1, 8192, "bf16", "bf16"),
    ("gpu_attention", "prefill", "h200", SERVE_FP8_ATTENTION, "channel", 1, 8192, "bf16", "fp8"),
    ("gpu_serve", "decode 1", "h100", BASE, "bf16", 1, 1024, "bf16", "bf16"),
    ("gpu_serve", "decode 1", "h100", SERVE, "channel", 1, 1024, "bf16", "bf16"),
    ("gpu_serve", "decode 64", "h100", BASE, "bf16", 64, 1024, "bf16", "bf16"),
    ("gpu_serve", "decode 64", "h100", SERVE, "channel", 64, 1024, "bf16", "bf16"),
    ("gpu_serve", "decode 64", "h100", "ours, FP8 KV cache", "channel", 64, 1024, "fp8", "bf16"),
    ("gpu_weight_only", "decode", "h200", BASE, "bf16", 1, 1024, "bf16", "bf16"),
    ("gpu_weight_only", "decode", "h200", "W8A8, compile", "channel", 1, 1024, "bf16", "bf16"),
    ("gpu_weight_only", "decode", "h200", "weight-only, compile", "weight", 1, 1024, "bf16", "bf16"),
]


def states_table(_: dict[str, Result]) -> Rows:
    for name, states in {**KNOWN_STATES, **own_states()}.items():
        yield {
            "7 billion parameters": name,
            "weight": f"{states.weight:g}",
            "gradient": f"{states.gradient:g}",
            "m and v": f"{states.moments:.4g}",
            "copies": f"{states.copies:g}",
            "GB on the GPU": f"{7 * states.on_gpu:.1f}",
            "GB in the CPU's memory": f"{7 * (states.total - states.on_gpu):.1f}",
        }


def stack_errors(results: dict[str, Result]) -> Rows:
    """Time and peak memory of the layer stack; its weights are BF16, and it has no optimizer."""
    llama = find_architecture("llama-3-8b", Config())
    stack = replace(llama, blocks=(replace(llama.blocks[0], count=4),), vocabulary=0, head=0, embeddings=0, others=0)
    rows = {row["mode"]: row for row in results["gpu_stack"]["modes"]}
    for mode, (recipe, fused, fitted) in STACK.items():
        config = Config(recipe=recipe).change(
            batch=1, context=8192, **{"compile.blocks": True, "optimizer.weights": "bf16"}
        )
        plan = TrainingPlan(make_setup(replace(stack, fused=fused), config, find_gpu("h100"), 1))
        memory = plan.memory.peak - plan.memory.optimizer - plan.memory.fp8_copies
        seconds = plan.time.total - plan.time.optimizer
        yield {
            "mode": mode,
            "fitted to it": fitted or "nothing",
            **compared("ms", 1e3 * seconds, rows[mode]["median"], ".1f"),
            **compared("peak GB", memory / 1e9, rows[mode]["peak_gb"], ".2f"),
        }


class ReducedInFP32(Setup):
    """FSDP2 without `send_bf16_gradients`."""

    @property
    def sent_gradient(self) -> float:
        return 4.0


def fsdp_errors(results: dict[str, Result]) -> Rows:
    """Whole steps of bench/gpu/fsdp.py. Their loss is compiled, which `octavo train` does not do."""
    for run in runs(results):
        setting, modes = run["setting"], rows_of(run)
        model = find_architecture("llama-3-8b", Config())
        model = replace(model, blocks=(replace(model.blocks[0], count=setting["layers"]),))
        for mode, recipe, narrow in ((BASE, "bf16", False), (OURS, "rowwise", True), (WIDE, "rowwise", False)):
            if mode not in modes:
                continue
            options = {"gather_dtype": "bf16", "fp8_all_gather": narrow}
            config = Config(recipe=recipe).change(
                batch=setting["world"],
                context=setting["tokens"],
                **{"compile.blocks": True, "loss.logits": "whole"},
                **{f"parallel.{name}": value for name, value in options.items()},
            )
            used = replace(model, fused=recipe != "bf16")
            setup = make_setup(used, config, find_gpu("h200"), setting["world"])
            if gradient_bytes(run, modes[mode]) == 4:
                setup = ReducedInFP32(**vars(setup))
            plan = TrainingPlan(setup)
            where = {"GPUs": str(setting["world"]), "layers": str(setting["layers"]), "mode": mode}
            yield {**where, **compared("ms", 1e3 * plan.time.total, modes[mode]["median"], ".1f")}


def expert_errors(results: dict[str, Result]) -> Rows:
    """Layers of experts with routing: grouped GEMMs, SwiGLU, and the order of rows."""
    gpu = find_gpu("h200")
    for key, name in NAMES.items():
        cell = results["gpu_moe"][key]
        experts, width, hidden, top_k, tokens = cell["shape"].values()
        rows = tokens * top_k
        for mode, recipe in (("bf16", "bf16"), ("ours", "rowwise")):
            up, down = (
                grouped_seconds(gpu, get_recipe(recipe), (rows // experts, *size), experts)
                for size in ((width, hidden), (hidden, width))
            )
            moved = rows * (6 * hidden + 16 * width) / gpu.copy_rate  # the activation forward, and the order of rows
            gradient = rows * Pass(12 * hidden, STACKED_GATE * hidden if recipe == "bf16" else 0.0).seconds(gpu)
            what = f"{name}: {experts} of {width:,} x {hidden:,}, top {top_k}"
            planned = 1e3 * (2 * up + down + moved + gradient)
            yield {"experts": what, "recipe": recipe, **compared("ms", planned, cell["ms"][mode], ".1f")}


def tensor_parallel_errors(results: dict[str, Result]) -> Rows:
    """One block of Llama-3-70B on two GPUs (bench/gpu/tensor_parallel.py), its weights BF16, without an optimizer."""
    found = results["gpu_tensor_parallel_2_gpus"]
    setting, modes = found["setting"], {row["mode"]: row["median"] for row in found["modes"]}
    model = find_architecture("llama-3-70b", Config())
    blocks = (replace(model.blocks[0], count=setting["layers"]),)
    model = replace(model, blocks=blocks, vocabulary=0, head=0, embeddings=0, others=0)
    options = {"compile.blocks": True, "optimizer.weights": "bf16", "parallel.tp": setting["world"]}
    for mode, recipe in (("bf16", "bf16"), ("octavo: rowwise", "rowwise")):
        config = Config(recipe=recipe).change(batch=1, context=setting["tokens"], **options)
        used = replace(model, fused=recipe != "bf16")
        plan = TrainingPlan(make_setup(used, config, find_gpu("h200"), setting["world"]))
        seconds = plan.time.total - plan.time.optimizer
        where = {"GPUs": str(setting["world"]), "recipe": recipe}
        yield {**where, **compared("ms", 1e3 * seconds, modes[mode], ".1f")}


def image_errors(results: dict[str, Result]) -> Rows:
    """Blocks of ViT-H/14 (bench/gpu/vision.py): timm's, whose weights are BF16, without an optimizer."""
    found = results["gpu_vision"]["shapes"]["ViT-H/14"]
    shape = found["shape"]
    model = find_architecture("vit-h-14", Config())
    blocks = (replace(model.blocks[0], count=shape["layers"]),)
    model = replace(model, blocks=blocks, head=0, embeddings=0, others=0)
    options = {"compile.blocks": True, "optimizer.weights": "bf16"}
    for mode, recipe in (("bf16", "bf16"), ("ours", "rowwise")):
        config = Config(recipe=recipe).change(batch=shape["batch"], context=shape["tokens"], **options)
        plan = TrainingPlan(make_setup(replace(model, fused=recipe != "bf16"), config, find_gpu("h200"), 1))
        memory = plan.memory.peak - plan.memory.optimizer - plan.memory.fp8_copies
        ms = 1e3 * (plan.time.total - plan.time.optimizer)
        yield {
            "recipe": recipe,
            **compared("ms", ms, statistics.median(found["rounds"][mode]), ".1f"),
            **compared("peak GB", memory / 1e9, found["peak_bytes"][mode] / 1e9, ".2f"),
        }


def gpt2_errors(results: dict[str, Result]) -> Rows:
    """Whole steps of GPT-2 of 124 million parameters on an H200: small matrices, and a vocabulary of 50,257."""
    for recipe in ("bf16", "rowwise"):
        runs = [run["tokens_per_second"] for run in results["gpt_parity"]["runs"] if run["mode"] == recipe]
        settings = ("--recipe", recipe, "--batch", "64", "--context", "1024", "--loss.logits", "whole")
        planned = Case("gpt2", settings).training().tokens_per_second
        yield {"recipe": recipe, **compared("tokens/s", planned, statistics.median(runs), ",.0f")}


def serving_errors(results: dict[str, Result]) -> Rows:
    for name, key, gpu, mode, scheme, batch, context, cache, attention in SERVED:
        found = results[name][key]
        layers = found.get("layers") or results[name]["layers"]
        model = find_architecture("llama-3-8b", Config())
        model = replace(model, blocks=(replace(model.blocks[0], count=layers),))
        server = Server(model, find_scheme(scheme), find_gpu(gpu), 1, batch, context, cache, attention)
        plan = plan_serving(server)
        what = f"{context:,} prompt tokens" if key == "prefill" else f"a new token of batch {batch}"
        seconds = plan.prefill_seconds if key == "prefill" else plan.step_seconds
        ms = found["ms"][mode]
        yield {
            "GPU": gpu.upper(), "blocks": str(layers), "step": what, "scheme": scheme, "keys and values": cache,
            "attention": attention,
            **compared("ms", 1e3 * seconds, ms if isinstance(ms, float) else ms["median"], ".2f"),
        }  # fmt: skip


def configurations(results: dict[str, Result]) -> Rows:
    """The rows of bench/gpu/plan.py, by the plan as it is now."""
    for measured in (row for _, result in plan_results(results) for row in result["rows"]):
        row = planned_again(measured)
        first = {name: str(row[name]) for name in ("model", "gpus", "recipe", "checkpointing")}
        if "error" in row:
            yield first | {"error": row["error"]}
            continue
        planned = row["planned"]
        yield {
            **first,
            **compared("ms", 1e3 * planned["seconds"], 1e3 * row["seconds"], ".1f"),
            "ms of the host, planned": f"{1e3 * planned['host_seconds']:.1f}",
            **({"ms of the host, measured": f"{1e3 * row['host_seconds']:.1f}"} if "host_seconds" in row else {}),
            **({"ms without a kernel": f"{row['kernels_ms']['idle']:.1f}"} if row["kernels_ms"] else {}),
            **compared("peak GB", planned["peak_bytes"] / 1e9, row["peak_bytes"] / 1e9, ".2f"),
            **earlier(measured),
        }


def configuration_machines(results: dict[str, Result]) -> str:
    """For each model, how many of its rows are within the aims, and where they were measured."""
    return "\n".join(f"- `{model}`: {_within(result)} {machine(result)}" for model, result in plan_results(results))


def _within(result: Result) -> str:
    errors = [row["errors"] for row in map(planned_again, result["rows"]) if "error" not in row]
    counts = {name: sum(abs(each[name]) <= aim for each in errors) for name, aim in AIMS.items()}
    parts = [f"{counts[name]} of {len(errors)} within {aim:.0%} of the {name}" for name, aim in AIMS.items()]
    return f"{' and '.join(parts).replace('%', ' %')}."


def plan_results(results: dict[str, Result]) -> Iterator[tuple[str, Result]]:
    """The results of bench/gpu/plan.py by model."""
    yield from ((model, results[f"gpu_plan_{model}"]) for model in MODELS if f"gpu_plan_{model}" in results)


def compared(unit: str, planned: float, measured: float, form: str) -> Row:
    return {
        f"{unit}, planned": format(planned, form),
        f"{unit}, measured": format(measured, form),
        f"error of {unit}": f"{planned / measured - 1:+.1%}",
    }


def gpus(_: dict[str, Result]) -> Iterator[Row]:
    for key, gpu in known_gpus().items():
        yield {
            "--gpu": key,
            "memory, GB": f"{gpu.memory / 1e9:.0f}",
            "bandwidth, GB/s": f"{gpu.bandwidth / 1e9:,.0f}",
            "BF16, TFLOP/s": f"{gpu.bf16 / 1e12:,.1f}",
            "FP8, TFLOP/s": f"{gpu.fp8 / 1e12:,.1f}" if gpu.fp8 else "none",
            "FP32, TFLOP/s": f"{gpu.fp32 / 1e12:,.1f}",
            "link, GB/s": f"{gpu.link / 1e9:.0f}",
            "data sheet": gpu.source,
            "measured": gpu.measured or "nothing",
        }


def presets(_: dict[str, Result]) -> Iterator[Row]:
    for name, fields in model_presets().items():
        model = find_architecture(name, Config())
        yield {
            "MODEL": name,
            "parameters": f"{model.parameters / 1e9:.2f} B",
            "blocks": str(model.depth),
            "width": f"{model.width:,}",
            "sizes from": fields["source"],
        }
