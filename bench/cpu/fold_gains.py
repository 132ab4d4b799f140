"""The gain of smoothing and rotation on a small Llama: KL of the quantized model from its source.

The Llama is measured as `octavo train` left it, and with planted outliers, as large models have them: one channel in 17
of each norm and of `up` is 64 times larger, and the weights that read it are 64 times smaller, so that the model
computes the same. Each is smoothed, rotated or both, calibrated, and quantized in four ways. Arithmetic is in FP32:

    fp8 token    e4m3, a scale for each output channel and each token       int8 token    the same in INT8
    fp8 static   e4m3, one scale a weight, one calibrated scale an input    int8 static   INT8, a scale for each channel

Before it is quantized ("none"), every transformed model must give the logits of its source but for BF16's rounding.
"""

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bench import record
from bench.cpu.demo_run import outputs, write_model
from octavo.calibration import Calibration, calibrate
from octavo.evaluation.metrics import LogitSums, Outputs, compare_many
from octavo.evaluation.prompts import PromptOptions, open_tokenizer, read_prompts
from octavo.numerics.formats import E4M3, cast
from octavo.packing.transforms import fold
from octavo.train.config import Config
from octavo.train.trainer import start_run

ROOT = Path(__file__).parents[2]
CALIBRATION, EVALUATION = [str(ROOT / "src")], [str(ROOT / "tests")]
SIZES: dict[str, Any] = {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "mlp_width": 384, "context": 256}
STEPS = 600
PLANTED, EVERY = 64.0, 17
FOLDS = ("as it is", "smooth", "rotate", "both")
Round = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    torch.set_num_threads(1)
    results = []
    with TemporaryDirectory() as folder:
        root = Path(folder)
        trained, planted = train(root / "trained"), root / "planted"
        plant(trained, planted)
        for source in (trained, planted):
            rows = measure(source, root)
            results += rows
            for row in rows:
                print(f"{row['model']:8} {row['fold']:9} {row['cast']:11} KL {row['kl']:.3g}  ppl {row['ppl']:+.2%}")
    print(record.write("fold_gains", {"config": {**SIZES, "steps": STEPS}, "alpha": 0.5, "rows": results}))


def train(out: Path) -> Path:
    """Train a small Llama and write it as a Hugging Face folder in BF16."""
    config = Config(recipe="bf16", steps=STEPS, device="cpu", out=str(out) + " run", **SIZES)
    start_run(config, Console(quiet=True)).run()
    return write_model(Path(config.out), out)


def plant(source: Path, out: Path) -> None:
    """Write the same function with outliers in the outputs of the norms and of `up`."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    for i in range(SIZES["layers"]):
        layer = f"model.layers.{i}"
        for writer, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
            ("mlp.up_proj", ("mlp.down_proj",)),
        ):
            tensors[f"{layer}.{writer}.weight"][i::EVERY] *= PLANTED
            for reader in readers:
                tensors[f"{layer}.{reader}.weight"][:, i::EVERY] /= PLANTED
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def measure(source: Path, root: Path) -> list[dict[str, Any]]:
    """The rows of a source: every transform with every cast."""
    prompts = read_prompts(EVALUATION, open_tokenizer(source), PromptOptions(24, SIZES["context"]))
    batches = prompts.batches(8)
    calibration = calibrated(source, root)
    rows = []
    for kind in FOLDS:
        folder = source if kind == "as it is" else root / f"{source.name} {kind}"
        if kind != "as it is":
            smooth = calibration if kind != "rotate" else None
            fold(source, folder, smooth=smooth, rotate=kind != "smooth")
        found = Calibration.load(calibration if folder == source else calibrated(folder, root))
        model = open_model(folder)
        scales = {name: found.sites[site].amax for name, site in found.layers.items()}
        candidates = {"none": outputs(model), **{name: quantized(model, name, scales) for name in CASTS}}
        quality = compare_many(outputs(open_model(source)), candidates, batches, LogitSums)
        assert quality["none"].kl.value < 1e-3, f"{source.name}, {kind}: not the same model"
        for name in candidates:
            kl, ppl = quality[name].kl, quality[name].perplexity_ratio
            edges = {"kl_low": kl.low, "kl_high": kl.high}
            rows.append({"model": source.name, "fold": kind, "cast": name, "kl": kl.value, **edges, "ppl": ppl.value})
    return rows


def calibrated(folder: Path, root: Path) -> Path:
    out = root / f"{folder.name} calibrated"
    calibrate(folder, CALIBRATION, out, prompts=PromptOptions(64, SIZES["context"]))
    return out


def open_model(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


# --- Casts -----------------------------------------------------------------------------------------------------------


def fp8(x: Tensor, amax: Tensor) -> Tensor:
    """x rounded to e4m3 with the scale amax/448."""
    scale = amax.clamp(min=1e-30) / E4M3.max
    return cast(x / scale, E4M3).float() * scale


def int8(x: Tensor, amax: Tensor) -> Tensor:
    """x rounded to -127..127 with the scale amax/127."""
    scale = amax.clamp(min=1e-30) / 127
    return (x / scale).round().clamp(-127, 127) * scale


# The rounding; whether a weight has a scale for each channel; whether an input has a scale for each token.
CASTS: Mapping[str, tuple[Round, bool, bool]] = {
    "fp8 token": (fp8, True, True),
    "fp8 static": (fp8, False, False),
    "int8 token": (int8, True, True),
    "int8 static": (int8, True, False),
}


def quantized(model: nn.Module, name: str, scales: Mapping[str, float]) -> Outputs:
    """The outputs of `model` with its calibrated layers quantized by the cast `name`."""
    rounded, by_channel, by_token = CASTS[name]
    model = copy.deepcopy(model)
    for layer, amax in scales.items():
        linear: Any = model.get_submodule(layer)
        weight = linear.weight.data
        weight.copy_(rounded(weight, weight.abs().amax(1, keepdim=True) if by_channel else weight.abs().amax()))

        def cast_input(_: nn.Module, args: tuple[Tensor], amax: float = amax) -> tuple[Tensor]:
            largest = args[0].abs().amax(-1, keepdim=True) if by_token else torch.tensor(amax)
            return (rounded(args[0], largest),)

        linear.register_forward_pre_hook(cast_input)
    return outputs(model)


if __name__ == "__main__":
    main()
