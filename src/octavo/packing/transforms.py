"""From a model to one that computes the same and quantizes better: outliers are folded into the weights.

Smoothing (SmoothQuant, Xiao et al., arXiv:2211.10438) moves the outliers of a tensor to the weights that read it. Each
channel has a factor s; the module that writes the tensor (a norm, or the linear layer before) is divided by it:

    norm(x) w^T = (norm(x) / s) (w s)^T

Rotation (QuaRot, Ashkboos et al., arXiv:2404.00456; with learned matrices SpinQuant, arXiv:2405.16406) multiplies the
whole residual stream by a random Hadamard matrix Q, which does not change the root mean square of a token. It
multiplies each head of the values by a Hadamard matrix H of its size:

    embedding Q | weights that read a norm with the weight g: w diag(g) Q | weights that write to the stream: Q^T w
    values: H^T w_v, w_o H

The result is a model like any other: it can be calibrated and packed, and nothing is left to do when it runs. A
rotation does not pass the product before `down_proj`, so with a rotation only the input of `down_proj` is smoothed.
Weights are read, changed and written one at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.architectures import ARCHITECTURES, Architecture
from octavo.calibration.calibrator import load_calibration
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import check_absent
from octavo.hf.source import Source, WrittenModel, open_source, write_model
from octavo.models import GPT2
from octavo.numerics.scaling import block_size, hadamard
from octavo.util import Progress, no_progress

# ---- The changes of one weight by folding, exact but for one rounding at the end.
#
#     y[T,N] = x[T,K] @ w[N,K]^T        x' = x A,  y' = y B        =>        w' = B^T w A^-T
#
# A and B are diagonal or orthogonal. So a weight changes along its inputs (every row alike), along its outputs (every
# column alike, and a bias [N] as a column does), or both. Steps run in float64, on a part of the weight at a time.
# Between inputs and outputs the weight is in float32.


Step = Callable[[Tensor], Tensor]
_PART = 2**20  # elements in float64 at once: 8 MB


def scaled(factors: Tensor) -> Step:
    """Multiply the last dimension by `factors` [n]."""
    return lambda x: x * factors.to(x.dtype)


def rotated(size: int, signs: Tensor | None = None) -> Step:
    """Multiply each run of `size` along the last dimension by `signs` [size], if given, and by a Hadamard matrix.

    Sylvester's matrix of order a * b is the Kronecker product of those of a and b. So a run viewed as X [a, b] becomes
    H_a X H_b: two small GEMMs, ten times faster than a pass over the weight for each doubling.
    """
    order = block_size(size)
    a = 2 ** (order.bit_length() // 2)
    left, right = (hadamard(torch.eye(n, dtype=torch.float64)) for n in (a, order // a))

    def step(x: Tensor) -> Tensor:
        if signs is not None:
            x = (x.unflatten(-1, (-1, size)) * signs.to(x.dtype)).flatten(-2)  # type: ignore[no-untyped-call]
        turned = x.reshape(-1, order // a) @ right.to(x.dtype)
        return (left.to(x.dtype) @ turned.view(-1, a, order // a)).view(x.shape)

    return step


def random_signs(n: int, seed: int) -> Tensor:
    """Random signs, float32 [n], the same on every machine for one seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (n,), generator=generator).mul(2).sub(1).float()


@dataclass(eq=False)
class Change:
    """The steps of one tensor: a weight [N, K], or a vector [N] (a bias, a norm's weight), which has only outputs."""

    inputs: list[Step] = field(default_factory=list)
    outputs: list[Step] = field(default_factory=list)

    def apply(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The changed tensor, of the same shape, in `dtype`."""
        if tensor.ndim == 1:
            return _in_parts(tensor[None], self.outputs, dtype)[0]
        between = torch.float32 if self.outputs else dtype
        changed = _in_parts(tensor, self.inputs, between)
        return _in_parts(changed.t(), self.outputs, dtype).t().contiguous() if self.outputs else changed


def _in_parts(tensor: Tensor, steps: Sequence[Step], dtype: torch.dtype) -> Tensor:
    """Apply `steps` along the last dimension of tensor[M, n], some rows at a time."""
    out = torch.empty(tensor.shape, dtype=dtype)
    rows = max(1, _PART // max(tensor.shape[1], 1))
    for part, into in zip(torch.split(tensor, rows), torch.split(out, rows), strict=True):
        wide = part.double()
        for step in steps:
            wide = step(wide)
        into.copy_(wide)
    return out


def smoothing_factors(x_amax: Tensor, w_amax: Tensor, alpha: float) -> Tensor:
    """SmoothQuant's s = x_amax^alpha / w_amax^(1 - alpha), float32 [n], each rounded to a power of two.

    A power of two changes exponents and no mantissa, so the folded model is the same to the bit. `x_amax` is the amax
    of each channel of the tensor, and `w_amax` of each column of the weights that read it, float32 [n]. `alpha`, 0 to
    1, is the part of the outliers that moves to the weights. A channel that is 0 in either gets the factor 1.
    """
    log2 = alpha * x_amax.double().log2() - (1 - alpha) * w_amax.double().log2()
    return torch.where((x_amax > 0) & (w_amax > 0), log2.round().exp2(), torch.ones_like(log2)).float()


# ---- From a model to one that computes the same and quantizes better: outliers are folded into the weights.


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class FoldReport(WrittenModel):
    """The model that `fold` wrote."""

    smoothed: Mapping[str, tuple[float, float]]  # the smallest and the largest factor of a pair, by its writer
    rotated: tuple[int, int] | None  # the orders of the Hadamard blocks of the residual stream and of values' heads
    untied: bool  # the head, which shared the embedding's weight, has its own now
    changed: int  # the number of tensors that changed


def fold(
    model: str | Path,
    out: str | Path,
    *,
    smooth: str | Path | None = None,
    alpha: float = 0.5,
    rotate: bool = False,
    seed: int = 0,
    dtype: str = "bfloat16",
    step: int | None = None,
    progress: Progress = no_progress,
) -> FoldReport:
    """Write the Hugging Face folder `out`, a model that computes the same as a run or a folder, with outliers folded
    into its weights. Memory: about one tensor.

    `smooth` is the calibration of the model, by which the part `alpha` of the outliers, 0 to 1, moves to the weights.
    `rotate` turns the residual stream and the values, with signs by `seed`; then only `down_proj`'s input is smoothed.
    The new weights are in `dtype`, bfloat16 or float32. Raises the errors of `octavo.packing.pack`, and an
    ArtifactError if the architecture cannot be folded.
    """
    model, out = Path(model), Path(out)
    check_absent(out)
    if smooth is None and not rotate:
        raise ValueError("fold needs --smooth with a calibration of the model, --rotate, or both")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be an integer from 0 to 2^63 - 1; got {seed}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    source = open_source(model, step)
    job = FoldJob(source, DTYPES[dtype], rotates=rotate)
    if smooth is not None:
        job.smooth(Path(smooth), alpha)
    if rotate:
        job.rotate(seed)
    record = {"dtype": dtype, "folded": job.record_of}
    config = {**source.config, "dtype": dtype, **({"tie_word_embeddings": False} if job.untied else {})}
    written = write_model(source, out, job.change, config, lambda: record, progress, "folding")
    return FoldReport(
        **vars(written), smoothed=job.smoothed, rotated=job.rotated, untied=job.untied, changed=len(job.changes)
    )


# ---- The places in an architecture where folding is possible: the module that writes a tensor, and all that read it.
#
#     residual -> input_layernorm -> q, k, v     v -> attention -> o -> residual
#     residual -> post_attention_layernorm -> gate, up      up -> (* act(gate)) -> down -> residual
#
# The computation between the writer and the readers of a pair commutes with a factor for each channel: attention mixes
# tokens, and a gate multiplies elementwise. ReLU commutes with positive factors. GELU does not, so there is no pair
# across it. A norm whose output is also a residual (BERT, and OPT with norms after its layers) is in no pair, because
# not all of its readers are linear layers.


class Pair(NamedTuple):
    """A norm or linear layer `writer`, and the linear layers `readers` of its output, through attention heads or not.

    `head` is the width of a head if several query heads share one that the writer writes, else 0.
    """

    writer: str
    readers: tuple[str, ...]
    head: int = 0


def _find_architecture(source: Source, *, rotates: bool) -> Architecture:
    """The architecture of `source`. An ArtifactError, which says why, if it cannot be folded, or not rotated."""
    where = source.description / "config.json"
    named = str((source.config.get("architectures") or ["of no named architecture"])[0])
    named = "octavo's GPT-2" if isinstance(source.meta_model.model, GPT2) else named
    rotated = ", ".join(f"{each.name}ForCausalLM" for each in ARCHITECTURES.values() if each.fusable)
    known = ARCHITECTURES.get("Bert" if named.startswith("Bert") else named.removesuffix("ForCausalLM"))
    if known is None or not known.block.up:
        supported = f"{rotated}; and to smooth, OPTForCausalLM and BERT-like encoders"
        raise ArtifactError(f"{where}: {named} cannot be folded; supported are {supported}")
    if rotates and not known.block.rms:
        raise ArtifactError(
            f"{where}: {named} has LayerNorm, whose mean and bias a rotation does not leave in place: only "
            f"models with RMSNorm are rotated ({rotated})"
        )
    return known


class FoldJob:
    """The steps that change each tensor of a model by its name, and `record_of`, the entry "folded" of octavo.json. An
    ArtifactError, which says why, if the model cannot be folded, or not rotated."""

    def __init__(self, source: Source, dtype: torch.dtype, *, rotates: bool) -> None:
        self.source, self.dtype, self._rotates = source, dtype, rotates
        self._architecture = _find_architecture(source, rotates=rotates)
        self._block, values = self._architecture.block, self._architecture.block.qkv[2]
        self._width = int(source.config["hidden_size"])
        self._head_dim = int(source.config.get("head_dim") or self._width // source.config["num_attention_heads"])
        names = (name for name, _ in source.meta_model.model.named_modules())
        self._layers = [name.removesuffix(values) for name in names if name.endswith(f".{values}")]  # with a dot
        for what, size in (("width", self._width), ("head width", self._head_dim)) if rotates else ():
            if size % 2:
                where = source.description / "config.json"
                raise ArtifactError(f"{where}: its {what} {size} is odd, and there is no Hadamard rotation for that")
        self._embedding, self._head = f"{self._architecture.embeddings[0]}.weight", f"{self._architecture.head}.weight"
        self.changes: dict[str, Change] = defaultdict(Change)  # by the tensor's name
        self.record_of: dict[str, Any] = {"smooth": None, "rotate": None}
        self.smoothed: dict[str, tuple[float, float]] = {}
        self.rotated: tuple[int, int] | None = None

    def _norms(self) -> list[Pair]:
        """The norms in front of linear layers alone, and these."""
        config, block = self.source.config, self._block
        before = config.get("do_layer_norm_before", True) and config.get("layer_norm_elementwise_affine", True)
        groups = list(zip(block.norms if before else (), (block.qkv, block.up), strict=False))
        return [Pair(at + norm, tuple(at + name for name in read)) for at in self._layers for norm, read in groups]

    def _pairs(self) -> list[Pair]:
        """The pairs whose tensor can be smoothed: beside a rotation those alone that it does not turn."""
        block, head = self._block, self._head_dim if self._architecture.fusable else 0
        across = block.rms or (block.norms and self.source.config.get("activation_function", "relu") == "relu")
        values = [Pair(at + block.qkv[2], (at + block.o,), head) for at in self._layers]
        return [
            *([] if self._rotates else [*self._norms(), *values]),
            *(Pair(at + block.up[-1], (at + block.down,)) for at in self._layers if across),
        ]

    def smooth(self, folder: Path, alpha: float) -> None:
        """For each pair, divide the writer by a factor for each channel, and multiply the readers by it."""
        calibration = load_calibration(folder, self.source.origin, self.source.description)
        for pair in self._pairs():
            (site,) = {calibration.layers[reader] for reader in pair.readers}  # layers that read one tensor share it
            self._smooth_pair(pair, calibration.sites[site].channel_amax, alpha)
        self.record_of["smooth"] = {"alpha": alpha, "factors": self.smoothed, "calibration": calibration.record}

    def _smooth_pair(self, pair: Pair, x_amax: Tensor, alpha: float) -> None:
        weights = [self.source.get(f"{reader}.weight").float().abs().amax(0) for reader in pair.readers]
        w_amax = torch.stack(weights).amax(0)
        channels = self.source.specs[f"{pair.writer}.weight"].shape[0]
        head = pair.head or channels
        heads = (channels // head, -1, head)  # heads of the writer, heads of the readers for each, channels
        x_amax_of, w_amax_of = (amax.view(heads).amax(1).flatten() for amax in (x_amax, w_amax))
        factors = smoothing_factors(x_amax_of, w_amax_of, alpha)
        shared = len(x_amax) // channels
        read = factors.view(-1, 1, head).expand(-1, shared, -1).flatten()
        for reader in pair.readers:
            self.changes[f"{reader}.weight"].inputs.append(scaled(read))
        self._on_outputs(pair.writer, scaled(1 / factors))
        self.smoothed[pair.writer] = (float(factors.min()), float(factors.max()))

    def _on_outputs(self, module: str, step: Step) -> None:
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in self.source.specs:
                self.changes[name].outputs.append(step)

    def rotate(self, seed: int) -> None:
        """Absorb the weights of norms, and rotate the residual stream and the values."""
        block, last = self._block, Pair(self._architecture.norm, (self._architecture.head,))
        turn = rotated(self._width, random_signs(self._width, seed))
        turn_head = rotated(self._head_dim)
        for norm, readers, _ in [*self._norms(), last]:
            gain = self.source.get(f"{norm}.weight").double()
            for reader in readers:
                self.changes[f"{reader}.weight"].inputs += [scaled(gain), turn]
            self._on_outputs(norm, torch.ones_like)
        self.changes[self._embedding].inputs.append(turn)
        for layer in self._layers:
            for writer in (block.o, block.down):
                self._on_outputs(layer + writer, turn)
            self._on_outputs(layer + block.qkv[2], turn_head)
            self.changes[f"{layer}{block.o}.weight"].inputs.append(turn_head)
        stream, head = self.rotated = block_size(self._width), block_size(self._head_dim)
        self.record_of["rotate"] = {"seed": seed, "stream_block": stream, "head_block": head}

    @property
    def untied(self) -> bool:
        """True if the head, which shared the embedding's weight, gets its own."""
        return self._head in self.changes and self._head not in self.source.specs

    def change(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of the new files that hold the tensor `name`, see `octavo.hf.source.Change`."""
        names = (name, self._head) if name == self._embedding and self.untied else (name,)
        return {name: self._changed(name, tensor) for name in names}

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        if name not in self.changes or tensor.is_meta:
            return tensor.to(dtype)
        return self.changes[name].apply(tensor, dtype)
