"""The gains that README shows: speeds over compiled BF16 and over torchao, with the accuracy beside them."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bench.gpu.modes import BASE, FP8_CACHE, FUSED, OCTAVO, OURS, SERVE, SERVE_TORCHAO, TORCHAO
from bench.report.filler import Result, Row, number
from bench.report.performance import GRAPHS, by_mode, figure, serve_medians
from bench.report.pretraining import mean_of
from bench.report.scaling import rows_of, runs

LLAMA = "Llama-3-8B's shape"
NOT_DECIDED = "final loss: these runs do not decide it"
FRONT = ("Llama-3-8B, 32 layers", "four layers", "experts", "Generate one text", "GPT of width")  # README's rows


class Gain(NamedTuple):
    """A row: speeds as multiples of compiled BF16's and of torchao's (None: not measured)."""

    what: str
    to_bf16: float
    to_torchao: float | None
    accuracy: str
    link: str

    def row(self, docs: str = "docs/") -> Row:
        """The cells; `docs` is the folder of the pages, as seen from the page with the table."""
        accuracy = {"accuracy against BF16": self.accuracy.replace("](", f"]({docs}")} if self.accuracy else {}
        speeds = {"speed over compiled BF16": number(self.to_bf16), "over torchao": number(self.to_torchao)}
        return {"": self.what, **speeds, **accuracy, "measured": f"[how]({docs}{self.link})"}


def front(results: dict[str, Result]) -> list[Gain]:
    """The five rows of README, the one that loses among them, without the measures of accuracy, which differ by row."""
    found = {key: gain for key in FRONT for gain in gains(results) if key in gain.what}
    return [found[key]._replace(accuracy="") for key in FRONT]


def gains(results: dict[str, Result]) -> list[Gain]:
    return [
        four_layers(results["gpu_stack"]),
        *sharded(results),
        experts(results["gpu_moe"]),
        vision(results["gpu_vision"]),
        small_gpt(results["gpt_parity"]),
        whole_llama(results["pretrain_300m"]),
        prompt(results),
        *generated(results),
    ]


def over(speeds: Mapping[str, float], ours: str, base: str = "bf16") -> tuple[float, float | None]:
    """The speed of a mode over BF16's, and over that of torchao's fastest mode."""
    torchao = [speed for mode, speed in speeds.items() if mode.startswith("torchao")]
    return speeds[ours] / speeds[base], speeds[ours] / max(torchao) if torchao else None


def four_layers(stack: Result) -> Gain:
    sqnr, best = (
        stack["sqnr"],
        min((row for row in stack["modes"] if row["mode"].startswith("torchao")), key=lambda row: float(row["median"]))[
            "mode"
        ],
    )
    accuracy = f"SQNR of the input's gradient {sqnr[FUSED][1]:.1f} dB; torchao's {sqnr[best][1]:.1f} dB"
    what = f"Train four layers of {LLAMA}, {gpu(stack)}"
    return Gain(what, *over(by_mode(stack["modes"], "ratio"), FUSED, BASE), accuracy, "performance.md#the-layer-stack")


def sharded(results: dict[str, Result]) -> Iterator[Gain]:
    """FSDP2 and tensor parallelism on two GPUs."""
    accuracy, link = "weights have the bytes and scales of one GPU", "scaling.md"
    speeds = {run["setting"]["layers"]: by_mode(list(rows_of(run).values()), "ratio") for run in runs(results)}
    layers = max(speeds)
    others = "".join(f"; {each} layers {found[OURS]:.2f}x" for each, found in speeds.items() if each != layers)
    gpus = f"two {gpu(runs(results)[-1])}s"
    what = f"Train Llama-3-8B, {layers} layers, with FSDP2 on {gpus}, weights gathered in FP8{others}"
    yield Gain(what, speeds[layers][OURS], speeds[layers][OURS] / speeds[layers][TORCHAO], accuracy, link)
    blocks = by_mode(list(rows_of(results["gpu_tensor_parallel_2_gpus"]).values()), "ratio")
    what = f"Train blocks of Llama-3-70B's shape, tensor parallel on {gpus}"
    yield Gain(what, *over(blocks, "octavo: rowwise"), accuracy, f"{link}#tensor-parallelism")


def experts(result: Result) -> Gain:
    layer = result["mixtral"]
    what = f"Train a layer of {layer['shape']['experts']} experts of Mixtral's shape, {gpu(result)}"
    accuracy = f"SQNR of y, dx and dw {min(layer['one_layer_db'].values()):.1f} dB"
    return Gain(what, *over(layer["speedup"], "ours"), accuracy, "performance.md#experts")


def vision(result: Result) -> Gain:
    blocks = result["shapes"]["ViT-H/14"]
    y, dx, dw = blocks["db"]["ours"]
    what = f"Train {blocks['shape']['layers']} blocks of ViT-H/14, {gpu(result)}"
    accuracy = f"SQNR of y {y:.1f} dB, dx {dx:.1f} dB, dw {dw:.1f} dB"
    return Gain(what, *over(blocks["speedup"], "ours"), accuracy, "vision.md")


def small_gpt(result: Result) -> Gain:
    """The GPT was measured before Octavo's GPT-2 had three layers for q, k and v."""
    speeds = {row["mode"]: 1 / row["milliseconds"] for row in result["step_times"]["steps"]}
    speed, to_torchao = over(speeds, "rowwise")
    small = ": small layers do not gain" if speed < 1 else ""
    what = f"Train a GPT of width {result['settings']['width']}, q, k and v as one layer, {gpu(result)}{small}"
    return Gain(what, speed, to_torchao, NOT_DECIDED, "performance.md#a-gpt-on-text-loss-against-bf16")


def whole_llama(result: Result) -> Gain:
    """The Llama whose steps were timed over a whole training."""
    speeds = {run["mode"]: mean_of(result, run["mode"])["tokens_per_second"] for run in result["runs"]}
    size = f"{result['runs'][0]['parameters'] / 1e6:.0f}M parameters, {result['settings']['width']:,} wide"
    return Gain(f"Train a Llama of {size}, {gpu(result)}", *over(speeds, "rowwise"), NOT_DECIDED, "pretraining.md")


def prompt(results: dict[str, Result]) -> Gain:
    serve, ms = results["gpu_serve"], serve_medians(results, "prefill")
    db, tokens = serve["prefill"]["sqnr"], serve["prefill"]["tokens"]
    accuracy = f"SQNR of the logits {db[SERVE]:.1f} dB; torchao's {db[SERVE_TORCHAO]:.1f} dB"
    speeds = ms[BASE] / ms[SERVE], ms[SERVE_TORCHAO] / ms[SERVE]
    return Gain(
        f"Read a prompt of {tokens:,} tokens, {LLAMA}, {gpu(serve)}", *speeds, accuracy, "performance.md#serving"
    )


def generated(results: dict[str, Result]) -> Iterator[Gain]:
    """`generate`: its decoding steps beside those of BF16, both compiled and captured as a CUDA graph."""
    packed = results["packing_quality"]["schemes"]["channel"]["perplexity_ratio"]["value"]
    cached = results["kv_cache_quality"]["caches"]["fp8, calibrated"]["perplexity_ratio"]["value"]
    accuracy, found = f"perplexity of a small Llama {packed:+.2%}", results["gpu_generate"]
    for what, batch, way, more in (
        ("one text", 1, OCTAVO, ""),
        ("64 texts with an FP8 KV cache", 64, FP8_CACHE, f", and {cached:+.2%} for the cache"),
    ):
        rates = found[f"graphs {batch}"]["tokens_per_second"]
        loop = figure(results, f"decode {batch}", way, "tokens_per_second_speedup")
        where = (
            f"{LLAMA}, CUDA graphs of both, {gpu(found)}; `generate` is {number(loop)} over transformers' loop in BF16"
        )
        speed = rates[GRAPHS[way]] / rates[BASE]
        yield Gain(f"Generate {what}, {where}", speed, None, f"{accuracy}{more}", "performance.md#generating-text")


def gpu(result: Result) -> str:
    """The GPU's short name, H100 of "NVIDIA H100 80GB HBM3"."""
    name = str(result["machine"]["gpu"])
    short = re.search(r"\b[A-Z]\d00\b", name)
    return short[0] if short else name
