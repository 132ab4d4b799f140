"""The readers: every program installed here that opens packed folders opens this one, and is compared with a reference.

The reference is the folder's bytes in float32 (`octavo.verification.layer_spec`). A reader's outputs y are at a
distance |y - reference| / |reference|. The allowed distance follows from two others, measured on the same prompts:

    unrounded   the reference with inputs that are not rounded, as some readers leave them
    bf16        the reference with BF16 between its layers

A reader in float32 may be at 1.25 times the first; transformers' emulation is at 0. A reader in BF16 may be at 1.5
times the larger: a change in the last bit of BF16 moves some inputs to the next eight-bit number. A mixture may be at 2
times the larger, since rounding decides between two experts that score almost the same. A reader that misinterprets a
scale is at about 1. Another expert changes a token by a tenth to a half of its size. Where few tokens of a mixture take
one, the reader may have some and the two references none. So a mixture that is farther away, but not beyond
sqrt(8 / T) / 2 (eight of T tokens, half wrong), is judged by the median over the tokens: 2 times the larger median.
And every expert computes the same four tokens, reached by the router or not; its y is judged by itself.

transformers with compressed-tensors rounds inputs of two dimensions with one scale, where the scheme says one a token,
so it has a reference that does the same (`round_input_by_compressed_tensors`). It widens packed experts and rounds none
of their inputs. If the folder stores scales of a KV cache, the reference rounds keys and values, as transformers does
(but not 5.24 with compressed-tensors 0.20, which looks for the cache under its old name; the note says so then).
With vLLM the cache is then in eight bits, and the limit is 2 times the larger: its attention may round more than the
cache. It gives log-probabilities, not logits, and both distances are of log-probabilities there.
"""

import io
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.files import model_tensors
from octavo.checkpoint.folder import has_tokenizer
from octavo.checkpoint.layouts import read_config
from octavo.evaluation.metrics import log_probabilities
from octavo.hf import meta_model as models
from octavo.hf.meta_model import ExpertMatrices, MetaModel, arguments_of, model_outputs, read_meta_model
from octavo.inference.opening import fill
from octavo.inference.packed_linear import PackedLinear
from octavo.nn.module_tools import computes_linearly
from octavo.util import installed, open_config, open_local, plural
from octavo.verification.checks import Required
from octavo.verification.layer_spec import LayerSpec, distance
from octavo.version import __version__

Factors = tuple[float, float]  # of the distances of `unrounded` and `bf16`; the larger product is allowed
FLOAT32, BF16, BF16_LOOSE = (1.25, 0.0), (1.5, 1.5), (2.0, 2.0)
ROUNDING = 1e-4  # added to what is allowed: float32's own rounding
_OF_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.input_scale$")  # transformers widens experts, and rounds no inputs
_OF_CACHE = re.compile(r"\.[kv]_scale$")
MOST = 0.5  # the most that is ever allowed; no right reader is as far away


@dataclass(frozen=True)
class ReaderResult:
    """A reader beside the reference."""

    name: str
    version: str
    outcome: str  # agrees, disagrees, failed, or not run
    note: str  # why it failed or was not run, and otherwise what it computed in
    distance: float | None = None  # |y - reference| / |reference|
    tolerance: float | None = None  # the largest distance that is allowed

    def describe_error(self) -> str:
        if self.distance is None:
            return self.note
        return (
            f"its outputs differ from the bytes' by {self.distance:.2%} of their size, where rounding explains "
            f"{self.tolerance:.2%} ({self.note})"
        )


@dataclass(frozen=True)
class Probe:
    """The inputs that readers run on, and the outputs of the reference for them, such as [B, T, width]."""

    folder: Path
    layers: Mapping[str, LayerSpec]
    settings: Mapping[str, Any]
    causal: bool
    logits: bool
    cache: bool  # the folder stores scales of a KV cache
    mixture: bool  # a router chooses the experts of each token
    inputs: Tensor  # such as token ids int64 [B, T]
    reference: Tensor  # the outputs of the bytes in float32
    emulated: Tensor  # with inputs rounded as transformers with compressed-tensors rounds them
    unrounded: Tensor  # with inputs that are not rounded
    bf16: Tensor  # with BF16 between the layers
    experts: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)  # tokens, and their y of all but `emulated`

    def tolerance(self, factors: Factors, measure: Callable[[Tensor, Tensor], float] = distance) -> float:
        """The largest distance of a right reader from the reference."""
        distances = (measure(other, self.reference) for other in (self.unrounded, self.bf16))
        allowed = max(factor * d for factor, d in zip(factors, distances, strict=True))
        return min(allowed + ROUNDING, MOST)

    @property
    def bf16_factors(self) -> Factors:
        """The factors for a reader in BF16."""
        return BF16_LOOSE if self.mixture else BF16

    def judge(self, name: str, version: str, actual: Tensor, factors: Factors, note: str) -> ReaderResult:
        if actual.shape != self.reference.shape:
            shapes = f"gave outputs {list(actual.shape)}, expected {list(self.reference.shape)}"
            return ReaderResult(name, version, "disagrees", shapes)
        off, allowed = distance(actual, self.reference), self.tolerance(factors)
        tokens = self.reference[..., 0].numel() if self.reference.ndim == 3 else torch.inf  # inf: vLLM gives no logits
        if self.mixture and allowed < off <= min((8 / tokens) ** 0.5 / 2, MOST):
            off, allowed = median_distance(actual, self.reference), self.tolerance(factors, median_distance)
            note += ", by the median of the tokens, since few took another expert"
        outcome = "agrees" if off <= allowed else "disagrees"  # NaN disagrees
        return ReaderResult(name, version, outcome, note, off, allowed)

    def judge_experts(self, result: ReaderResult, model: Any) -> ReaderResult:
        """`result` of a reader's `model`, or the first of its experts that disagrees."""
        if result.outcome != "agrees":
            return result
        for name, (tokens, *references) in self.experts.items():
            found = expert_outputs(model, name, tokens, len(references[0]))
            for e, (actual, y, unrounded, bf16) in enumerate(zip(found, *references, strict=True)):
                nearer = min(y, unrounded, key=partial(distance, actual))  # transformers rounds no inputs of experts
                probe = replace(self, reference=nearer, unrounded=unrounded, bf16=bf16)
                note = f"expert {e} of {name}, {result.note}"
                expert = probe.judge(result.name, result.version, actual, self.bf16_factors, note)
                if expert.outcome == "disagrees":
                    return expert
        return result


def try_readers(probe: Probe, device: str) -> Iterator[ReaderResult]:
    """Open the folder with each reader in turn. Each model is freed before the next reader runs."""
    opened_by = {"transformers": open_with_transformers, "octavo": open_with_octavo, "vllm": open_with_vllm}
    for name, open_with in opened_by.items():
        version = __version__ if name == "octavo" else installed(name) or installed(f"{name}-cpu")  # vLLM's CPU build
        if not version:
            yield ReaderResult(name, "", "not run", "not installed")
            continue
        try:
            yield open_with(probe, version, device)
        except ImportError as error:
            yield ReaderResult(name, version, "not run", f"a package is missing: {error}")
        except Exception as error:  # any failure of a reader is a result, not a crash
            yield ReaderResult(name, version, "failed", f"{type(error).__name__}: {error}")


def open_with_transformers(probe: Probe, version: str, device: str) -> ReaderResult:
    """Open the folder with transformers on the CPU, in float32 where it can."""
    if (method := probe.settings.get("quant_method")) not in ("compressed-tensors", "fp8"):
        by_torchao, by_vllm = "it runs this layout by torchao, on a GPU", "it does not read this layout; vLLM does"
        return ReaderResult("transformers", version, "not run", by_torchao if method == "torchao" else by_vllm)
    compressed = probe.settings.get("quant_method") == "compressed-tensors"
    if compressed and not installed("compressed-tensors"):
        return ReaderResult("transformers", version, "not run", "it needs compressed-tensors, which is not installed")
    # transformers widens MX, and the layout fp8 on a CPU, to BF16 whatever the model's dtype.
    float32 = compressed and not any(spec.exponents for spec in probe.layers.values())
    with models.quiet_transformers(), warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        import transformers

        config, more = open_config(probe.folder), {}
        if not compressed:  # widen the layout fp8 as it is loaded, even if transformers sees a GPU
            kept = ("modules_to_not_convert", "ignored_layers", "activation_scheme", "scale_fmt")
            given = {name: probe.settings[name] for name in kept if probe.settings.get(name)}
            given["weight_block_size"] = probe.settings.get("weight_block_size") or None
            more = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True, **given)}
        architecture = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        model, info = open_local(
            architecture or transformers.AutoModelForCausalLM, probe.folder, config=config,
            dtype=torch.float32 if float32 else "auto", use_safetensors=True, output_loading_info=True, **more,
        )  # fmt: skip
        # Experts that are not packed are in BF16.
        float32 = float32 and all(p.dtype != torch.bfloat16 for p in model.parameters())
        with torch.inference_mode():
            if not probe.logits:  # a part of it runs, and the weights are widened by a call of the whole model alone
                model.eval()(**arguments_of(model, probe.inputs[:1]))
            actual = model_outputs(model.eval(), probe.inputs, probe.logits)
    widens = compressed and probe.settings.get("dequantize")  # as it loads: it rounds no inputs, nor reads their scales
    known = re.compile(r"\.input_scale$") if widens else _OF_EXPERT
    uncached = compressed and probe.cache and not any(name.endswith(".k_scale") for name in model.state_dict())
    if uncached:
        info["unexpected_keys"] = [name for name in info["unexpected_keys"] if not _OF_CACHE.search(str(name))]
    unread = {key: [name for name in map(str, value) if not known.search(name)] for key, value in info.items()}
    if wrong := {key: sorted(names) for key, names in unread.items() if names}:
        key, names = next(iter(wrong.items()))
        return ReaderResult("transformers", version, "failed", f"{key}: {names[0]} ({len(names)} in all)")
    note = "emulated in float32" if float32 else "in BF16"
    if uncached:
        note += ", its KV scales unused"
    elif probe.cache and not float32:
        note += ", with its KV scales in BF16 too"
    if compressed:
        note += f", compressed-tensors {installed('compressed-tensors')}"
        probe = replace(probe, reference=probe.unrounded if widens else probe.emulated)
    result = probe.judge("transformers", version, actual, FLOAT32 if float32 else probe.bf16_factors, note)
    return probe.judge_experts(result, model)


def open_with_octavo(probe: Probe, version: str, device: str) -> ReaderResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unused scales, which are among the report's remarks
        model, _ = fill(read_meta_model(read_config(probe.folder), probe.folder), probe.folder, torch.device(device))
    with torch.inference_mode():
        actual = model_outputs(model, probe.inputs.to(device), probe.logits)
    weight_only = sum(isinstance(layer, PackedLinear) and layer.input_cast is None for layer in model.modules())
    path = f", {plural(weight_only, 'layer')} weight-only" if weight_only else ""
    result = probe.judge("octavo", version, actual, probe.bf16_factors, f"in BF16, on {device}{path}")
    return probe.judge_experts(result, model)


def open_with_vllm(probe: Probe, version: str, device: str) -> ReaderResult:
    """Open the folder with vLLM. It returns no logits, so log-probabilities of the prompts' tokens are compared."""
    if not probe.causal:
        return ReaderResult("vllm", version, "not run", "it is compared by the logits of a language model")
    if not has_tokenizer(probe.folder):
        return ReaderResult("vllm", version, "not run", "it needs a tokenizer, and the folder has none")
    import vllm

    rows = probe.inputs.tolist()
    engine = vllm.LLM(model=str(probe.folder), dtype="bfloat16", enforce_eager=True, max_model_len=len(rows[0]) + 1)
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    results = engine.generate([{"prompt_token_ids": row} for row in rows], sampling)
    found = [
        [entry[token].logprob for entry, token in zip(result.prompt_logprobs[1:], row[1:], strict=True)]
        for result, row in zip(results, rows, strict=True)
    ]
    factors, note = BF16_LOOSE if probe.cache else probe.bf16_factors, "in BF16, log-probabilities of the prompts"
    logits = (probe.reference, probe.unrounded, probe.bf16)
    reference, unrounded, bf16 = (log_probabilities(y[:, :-1], probe.inputs[:, 1:]).cpu() for y in logits)
    probe = replace(probe, reference=reference, unrounded=unrounded, bf16=bf16)
    return probe.judge("vllm", version, torch.tensor(found), factors, note)


def median_distance(actual: Tensor, expected: Tensor) -> float:
    """The median over the tokens of the distance of their outputs [B, T, width]."""
    tokens = zip(actual.flatten(0, 1), expected.flatten(0, 1), strict=True)
    return float(torch.tensor([distance(*pair) for pair in tokens]).median())


# ---- The reference: a model of transformers in float32 whose linear layers and experts read a weight when they run.
#
# Memory holds embeddings, norms and one layer's weight, whatever the size of the model. `StreamedModel` runs MODEL, the
# bytes of a packed folder, and the INT8 baseline, which differ only in what a linear layer computes.


LinearFn = Callable[[str, Tensor], Tensor]
"""name of the layer in files, x [..., K] -> y [..., N] in float32, without bias"""


class StreamedLinear(nn.Module):
    """Replaces a linear layer: y = compute(name, x) + bias."""

    def __init__(self, name: str, linear: nn.Linear, compute: LinearFn) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=linear.weight.dtype)  # some models cast an input to its dtype
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._name, self._compute = name, compute

    def forward(self, x: Tensor) -> Tensor:
        y = self._compute(self._name, x).to(x.dtype)
        return y if self.bias is None else y + self.bias


class StreamedModel:
    """A model of transformers (of `transformers_meta_model`, changed in place), to run. `get` reads a tensor to the CPU
    by its name in the files, which hold `stored`. `compute` computes a linear layer, `rounds` has a function for each
    layer that rounds keys and values; both are set before a call. `logits`: its outputs are those of tokens."""

    def __init__(
        self,
        meta_model: MetaModel,
        get: Callable[[str], Tensor],
        stored: Collection[str],
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model: Any = meta_model.model.to(dtype)
        known = models.expert_matrices(meta_model)
        experts = {n: m for n, m in known.items() if all(f"{part}.weight" in stored for each in m for part in each)}
        if meta_model.experts.stacks:
            get, stored = meta_model.experts.by_model_names(get, stored)
        model.config.use_cache = False
        self.device, self.logits = torch.device(device), models.predicts_tokens(model)
        self.compute: LinearFn
        self.rounds: Sequence[Callable[[Tensor, Tensor], Sequence[Tensor]]] = ()
        self.experts: dict[str, StreamedExperts] = {}  # each module of them, by its name
        tied = models.tied_names(model)
        for name, module in list(model.named_modules()):
            weight = f"{name}.weight"
            # State-space layers read the weight of dt_proj without a call; the router of Llama 4 is no linear layer.
            called = isinstance(module, nn.Linear) and computes_linearly(module) and not name.endswith(".dt_proj")
            if called and weight in stored and len(tied.get(weight, [])) < 2:
                layer = StreamedLinear(meta_model.file_name(name), module, lambda layer, x: self.compute(layer, x))
                model.set_submodule(name, layer)
        for name, matrices in experts.items():
            act: Any = model.get_submodule(name).act_fn
            self.experts[name] = StreamedExperts(matrices, act, lambda layer, x: self.compute(layer, x))
            model.set_submodule(name, self.experts[name])
        metas = model_tensors(model)
        found = {name: [each for each in tied.get(name, [name]) if each in stored] for name in metas}
        tensors = {name: get(names[0]).to(metas[name].dtype) for name, names in found.items() if names}
        self.model = models.fill_model(meta_model, tensors).to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs float32 (`octavo.hf.meta_model.model_outputs`) of token ids int64 [B, T] or of images."""
        # cuDNN convolves float32 with the 10 bits of TF32 unless it is told not to.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return model_outputs(self.model, inputs.to(self.device), self.logits, self.rounds)


def required_by(meta_model: MetaModel) -> Required:
    """The tensors that the files of a model must hold."""
    model = meta_model.model
    shapes = {name: tuple(tensor.shape) for name, tensor in meta_model.experts.split(model.state_dict()).items()}
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    linears = [*map(meta_model.file_name, modules), *meta_model.experts.experts]
    in_file = meta_model.experts.file_name
    tied = {in_file(name): [in_file(each) for each in names] for name, names in models.tied_names(model).items()}
    return Required(shapes, linears, tied, modules)


# ---- The experts of a mixture, one after another, each with its own matrices: y = down(act(gate(x)) * up(x)).


class StreamedExperts(nn.Module):
    """Replaces a module of experts. Each matrix is computed by `compute` for the tokens of its expert."""

    def __init__(self, experts: Sequence[ExpertMatrices], act: Callable[[Tensor], Tensor], compute: LinearFn) -> None:
        super().__init__()
        self.matrices, self._act, self._compute = experts, act, compute
        self.tokens: Tensor | None = None  # [4, K], the first of the last call

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The output [T, K] of x [T, K]; index and weights are [T, top_k]."""
        x, out, self.tokens = hidden_states, hidden_states.new_zeros(hidden_states.shape), hidden_states[:4].bfloat16()
        for e, names in enumerate(self.matrices):
            token, slot = (top_k_index == e).nonzero(as_tuple=True)
            if len(token):
                gate, up = (self._compute(name, x[token]).to(x.dtype) for name in (names.gate, names.up))
                y = self._compute(names.down, self._act(gate) * up).to(x.dtype)
                out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(x.dtype))
        return out


@torch.inference_mode()
def expert_outputs(model: Any, name: str, tokens: Tensor, count: int) -> Tensor:
    """What each of the `count` experts of the module `name` computes for the same tokens [T, K], whatever the router
    would choose: y float32 [count, T, K] on the CPU."""
    device = next(model.parameters()).device
    x = tokens.repeat(count, 1).to(device, model.dtype)  # [count * T, K]
    index = torch.arange(count, device=device).repeat_interleave(len(tokens)).unsqueeze(1)
    y = model.get_submodule(name)(x, index, torch.ones_like(index, dtype=x.dtype))
    return y.float().cpu().view(count, *tokens.shape)
