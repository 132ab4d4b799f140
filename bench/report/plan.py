"""The tables of docs/plan.md: the figures of `octavo plan` beside measured ones."""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.gpu.modes import BASE, FUSED, OURS, SERVE, SERVE_FP8_ATTENTION, WIDE
from bench.gpu.plan import HOST_MODES, HOSTED, KINDS, LARGEST, MODELS, with_plan
from bench.report.filler import Fields, Result, Rows
from bench.report.performance import expert_shapes
from bench.report.scaling import gradient_bytes, rows_of, runs
from octavo.plan.cases import Case, TrainingPlan, built_in_architecture, find_architecture
from octavo.plan.serving import Server, find_scheme, plan_serving
from octavo.plan.setup import Setup, make_setup
from octavo.plan.step_time import STACKED_GATE, Pass
from octavo.rates.measured import find_gpu, grouped_seconds, known_gpus
from octavo.recipe import get_recipe
from octavo.train.config import Config

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


def compared(planned: float, measured: float) -> Fields:
    return Fields(planned=planned, measured=measured)


def training(
    name: str, recipe: str, gpu: str, world: int = 1, *, layers: int = 0, fused: bool, blocks_alone: bool = False,
    reduced_in_fp32: bool = False, **settings: Any,
) -> TrainingPlan:  # fmt: skip
    """The plan of a preset's shape, of so many layers (0: its own); `blocks_alone` has no embedding and no head."""
    model = find_architecture(name)
    if layers:
        model = replace(model, blocks=(replace(model.blocks[0], count=layers),))
    if blocks_alone:
        model = replace(model, vocabulary=0, head=0, embeddings=0, others=0)
        settings |= {"optimizer.weights": "bf16"}
    config = Config(recipe=recipe).change(**{"compile.blocks": True}, **settings)
    setup = make_setup(replace(model, fused=fused), config, find_gpu(gpu), world)
    return TrainingPlan(ReducedInFP32(**vars(setup)) if reduced_in_fp32 else setup)


def milliseconds(plan: TrainingPlan, measured: float) -> Fields:
    """The planned time of both passes, without an optimizer, beside the measured one."""
    return compared(1e3 * (plan.time.total - plan.time.parts["optimizer"]), measured)


def gigabytes(plan: TrainingPlan, measured: float) -> Fields:
    """The planned peak of both passes: each call casts the weights anew, and there is no optimizer."""
    others = plan.memory.parts["optimizer"] + plan.memory.parts["fp8_copies"]
    return compared((plan.memory.peak - others) / 1e9, measured)


class ReducedInFP32(Setup):
    """FSDP2 without `send_bf16_gradients`."""

    @property
    def sent_gradient(self) -> float:
        return 4.0


def stack_errors(results: dict[str, Result]) -> Rows:
    """Time and peak memory of the layer stack; its weights are BF16, and it has no optimizer."""
    rows = {row["mode"]: row for row in results["gpu_stack"]["modes"]}
    for mode, (recipe, fused, fitted) in STACK.items():
        shape: dict[str, Any] = {"layers": 4, "batch": 1, "context": 8192}
        plan = training("llama-3-8b", recipe, "h100", fused=fused, blocks_alone=True, **shape)
        ms, gb = milliseconds(plan, rows[mode]["median"]), gigabytes(plan, rows[mode]["peak_gb"])
        yield {"mode": mode, "fitted": fitted or "nothing", "ms": ms, "gb": gb}


def fsdp_errors(results: dict[str, Result]) -> Rows:
    """Whole steps of bench/gpu/fsdp.py. Their loss is compiled, which `octavo train` does not do."""
    for run in runs(results):
        setting, modes = run["setting"], rows_of(run)
        for mode, recipe, narrow in ((BASE, "bf16", False), (OURS, "rowwise", True), (WIDE, "rowwise", False)):
            options: dict[str, Any] = {"loss.logits": "whole", "parallel.gather_dtype": "bf16"}
            options |= {"parallel.fp8_all_gather": narrow, "batch": setting["world"], "context": setting["tokens"]}
            plan = training(
                "llama-3-8b", recipe, "h200", setting["world"], layers=setting["layers"], fused=recipe != "bf16",
                reduced_in_fp32=gradient_bytes(run, modes[mode]) == 4, **options,
            )  # fmt: skip
            yield {**setting, "mode": mode, "ms": compared(1e3 * plan.time.total, modes[mode]["median"])}


def expert_errors(results: dict[str, Result]) -> Rows:
    """Layers of experts with routing: grouped GEMMs, SwiGLU, and the order of rows."""
    gpu = find_gpu("h200")
    for cell in expert_shapes(results["gpu_moe"]):
        experts, width, hidden, top_k, tokens = cell["shape"].values()
        rows = tokens * top_k
        for mode, recipe in (("bf16", "bf16"), ("ours", "rowwise")):
            up, down = (
                grouped_seconds(gpu, get_recipe(recipe), (rows // experts, *size), experts)
                for size in ((width, hidden), (hidden, width))
            )
            moved = rows * (6 * hidden + 16 * width) / gpu.copy_rate  # the activation forward, and the order of rows
            gradient = rows * Pass(12 * hidden, STACKED_GATE * hidden if recipe == "bf16" else 0.0).seconds(gpu)
            planned = 1e3 * (2 * up + down + moved + gradient)
            yield {**cell, "recipe": recipe, "ms": compared(planned, cell["ms"][mode])}


def tensor_parallel_errors(results: dict[str, Result]) -> Rows:
    """One block of Llama-3-70B on two GPUs (bench/gpu/tensor_parallel.py), its weights BF16, without an optimizer."""
    found = results["gpu_tensor_parallel_2_gpus"]
    setting, modes = found["setting"], {row["mode"]: row["median"] for row in found["modes"]}
    for mode, recipe in (("bf16", "bf16"), ("octavo: rowwise", "rowwise")):
        plan = training(
            "llama-3-70b", recipe, "h200", setting["world"], layers=setting["layers"], fused=recipe != "bf16",
            blocks_alone=True, batch=1, context=setting["tokens"], **{"parallel.tp": setting["world"]},
        )  # fmt: skip
        yield {**setting, "recipe": recipe, "ms": milliseconds(plan, modes[mode])}


def image_errors(results: dict[str, Result]) -> Rows:
    """Blocks of ViT-H/14 (bench/gpu/vision.py): timm's, whose weights are BF16, without an optimizer."""
    found = results["gpu_vision"]["shapes"]["ViT-H/14"]
    shape = found["shape"]
    for mode, recipe in (("bf16", "bf16"), ("ours", "rowwise")):
        plan = training(
            "vit-h-14", recipe, "h200", layers=shape["layers"], fused=recipe != "bf16", blocks_alone=True,
            batch=shape["batch"], context=shape["tokens"],
        )  # fmt: skip
        ms, gb = milliseconds(plan, statistics.median(found["rounds"][mode])), found["peak_bytes"][mode] / 1e9
        yield {"recipe": recipe, "ms": ms, "gb": gigabytes(plan, gb)}


def gpt2_errors(results: dict[str, Result]) -> Rows:
    """Whole steps of GPT-2 of 124 million parameters on an H200: small matrices, and a vocabulary of 50,257."""
    for recipe in ("bf16", "rowwise"):
        runs = [run["tokens_per_second"] for run in results["gpt_parity"]["runs"] if run["mode"] == recipe]
        settings = {"recipe": recipe, "batch": 64, "context": 1024, "loss.logits": "whole"}
        planned = Case("gpt2", settings).training().tokens_per_second
        yield {"recipe": recipe, "rate": compared(planned, statistics.median(runs))}


def serving_errors(results: dict[str, Result]) -> Rows:
    for name, key, gpu, mode, scheme, batch, context, cache, attention in SERVED:
        found = results[name][key]
        layers = found.get("layers") or results[name]["layers"]
        model = find_architecture("llama-3-8b")
        model = replace(model, blocks=(replace(model.blocks[0], count=layers),))
        server = Server(model, find_scheme(scheme), find_gpu(gpu), 1, batch, context, cache, attention)
        plan = plan_serving(server)
        what = f"{context:,} prompt tokens" if key == "prefill" else f"a new token of batch {batch}"
        seconds = plan.prefill_seconds if key == "prefill" else plan.step_seconds
        ms = found["ms"][mode]
        time = compared(1e3 * seconds, ms if isinstance(ms, float) else ms["median"])
        facts = {"scheme": scheme, "cache": cache, "attention": attention, "ms": time}
        yield {"gpu": gpu.upper(), "layers": layers, "step": what, **facts}


def whole_runs(results: dict[str, Result]) -> Rows:
    """The rows of bench/gpu/plan.py, by the plan as it is now."""
    for row in (with_plan(row) for _, result in plan_results(results) for row in result["rows"]):
        case = {key: row[key] for key in ("model", "gpus", "recipe", "checkpointing")}
        for name in ("seconds", "peak_bytes", "host_seconds"):
            case |= {f"{name}, planned": row["planned"][name], f"{name}, measured": row.get(name)}
        yield {**case, "idle_ms": row.get("kernels_ms", {}).get("idle"), "commit": row.get("machine", {}).get("commit")}


def largest_batches(results: dict[str, Result]) -> Rows:
    """The largest batch in 80 GB, and the peak of 8 sequences, of Llama-3.2-1B's shape as `octavo train` trains it."""
    found = results["gpu_largest_batch"]
    for recipe, row in found["recipes"].items():
        settings = {"batch": 8, "context": found["context"], **LARGEST}
        plan = training("llama-3.2-1b", recipe, "h100", fused=recipe != "bf16", **settings)
        peak = compared(plan.memory.peak / 1e9, row["peak_bytes"]["8"] / 1e9)
        yield {"recipe": recipe, "batch": compared(plan.largest_batch, row["largest_batch"]), "gb": peak}


def host_errors(results: dict[str, Result]) -> Rows:
    """Whole steps with masters on the host (bench/gpu/plan.py), until the last weight is updated."""
    for row in results["gpu_offload"]["rows"]:
        for kind, (settings, _) in KINDS.items():
            found, config = row[kind], HOSTED.change(**HOST_MODES[row["mode"]], **settings)
            plan = TrainingPlan(make_setup(built_in_architecture(config), config, find_gpu("h200"), 1))
            gb = compared(plan.memory.peak / 1e9, found["peak_bytes"] / 1e9)
            host = compared(plan.memory.offloaded / 1e9, row["host_bytes"] / 1e9)
            s = compared(plan.time.total, found["seconds"])
            yield {**found, "recipe": config.recipe, "kind": kind, "s": s, "gb": gb, "host": host}


def largest_error(result: Result, name: str) -> float:
    """By how many percent the plan of a model is off in "memory" or "time"."""
    return max(100 * abs(with_plan(row)["errors"][name]) for row in result["rows"])


def plan_results(results: dict[str, Result]) -> Iterator[tuple[str, Result]]:
    """The results of bench/gpu/plan.py by model."""
    yield from ((model, results[f"gpu_plan_{model}"]) for model in MODELS if f"gpu_plan_{model}" in results)


def gpus() -> Rows:
    yield from ({"key": key, **vars(gpu)} for key, gpu in known_gpus().items())
