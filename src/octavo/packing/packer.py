"""From a model to a packed folder, one tensor at a time.

The weights of the chosen linear layers are cast by their schemes (`octavo.checkpoint.scheme`). All other tensors
are stored in BF16.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.checkpoint.folder import check_absent, has_tokenizer, read_card
from octavo.checkpoint.layouts import UNQUANTIZED_DTYPE, Packing, get_layout, not_for_transformers, quantization_config
from octavo.checkpoint.scheme import INPUT_SCALE_NAME, SCALE_NAME, Layout, Scheme, groups
from octavo.hf.meta_model import names_language_model
from octavo.hf.source import Source, WrittenModel, open_source, write_model
from octavo.nn.conversion_report import Leftover, find_coverage
from octavo.numerics import TENSOR, Cast, QTensor
from octavo.ops import quantize, quantize_scaled
from octavo.packing.options import ChosenLayers, PackOptions, choose_layers
from octavo.packing.scale_search import SearchedScale, cast_by, search_scale, search_shared_scale
from octavo.util import Progress, finite, no_progress


@dataclass(frozen=True)
class PackReport(WrittenModel):
    """The packed folder that `pack` wrote."""

    packed: Mapping[str, str]  # the scheme of each packed layer
    skipped: Mapping[str, str]  # why each other linear layer stays in BF16
    bf16_bytes: int  # of the packed layers' weights in BF16
    packed_bytes: int  # of these weights and their scales in the files
    gains: Mapping[str, float]  # the dB of SQNR that each weight gained by the rule mse
    ratios: Mapping[str, float]  # fused layers ("q, k, v") with scales of their own -> the largest over the smallest
    cached: int  # the number of attention layers whose keys and values have scales
    lacks_tokenizer: bool  # the model takes text, and the folder holds no tokenizer
    unpacked_expert_bytes: int  # of the experts of a mixture that stay in BF16
    not_linear: Sequence[Leftover]  # the matrices in BF16 that no linear layer holds, such as stacks of experts
    updates: Mapping[str, KeptUpdate]  # what the rounding left of adapters that were merged, for each kind of layer

    @property
    def ratio(self) -> float:
        return self.packed_bytes / self.bf16_bytes


def pack(
    source: str | Path,
    out: str | Path,
    options: PackOptions = PackOptions(),
    *,
    step: int | None = None,
    progress: Progress = no_progress,
    **fields: Any,
) -> PackReport:
    """Write a model as a packed folder, which appears whole or not at all. Memory: about one tensor.

    Args:
        source: the folder of a run of `octavo train`, or of a Hugging Face model.
        out: the folder to make.
        options: how the model is packed.
        step: the checkpoint of a run. None takes the newest.
        progress: called after each tensor (`octavo.util`).
        fields: fields of `PackOptions` that replace those of `options`.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: the source is not whole, or holds inf or NaN.
        ValueError: options that do not fit each other or the model, see `octavo.packing.options.choose_layers`.
        WriteError: the disk refused.

    Example:
        >>> pack("models/qwen", "packed/qwen", scheme="block")
    """
    source, out = Path(source), Path(out)
    check_absent(out)
    return pack_source(open_source(source, step), out, replace(options, **fields), progress)


def pack_source(
    source: Source, out: Path, options: PackOptions, progress: Progress, remarks: Mapping[str, object] | None = None
) -> PackReport:
    """`pack` for a source that is open. `remarks` are further entries of octavo.json."""
    layers = choose_layers(source, options)
    job = PackJob(source, layers, options)
    record = partial(job.record, {**source.folded(), **(remarks or {})})
    config, original = job.config(), read_card(source.description)
    card = partial(card_of, out.name, source.origin.name, config, original=original)
    written = write_model(source, out, job.change, config, record, progress, "packing", job.kv_scales, card)
    sizes = {name.removesuffix(".weight"): tensor.nbytes for name, tensor in written.specs.items()}
    return PackReport(
        **vars(written),
        packed={name: scheme.name for name, scheme in layers.schemes.items()},
        skipped=layers.skipped,
        bf16_bytes=2 * sum(written.specs[f"{name}.weight"].numel() for name in job.packing.schemes),
        packed_bytes=job.packed_bytes(written.specs),
        gains=job.weights.gains,
        ratios=job.weights.ratios,
        cached=len(job.kv_scales) // 2,
        lacks_tokenizer=source.meta_model.takes_text and not has_tokenizer(out),
        unpacked_expert_bytes=sum(sizes[name] for name in set(source.meta_model.experts.experts) - {*layers.experts}),
        not_linear=job.not_linear,
        updates=job.updates,
    )


class PackJob:
    """The packing of one model: tensors, config.json, octavo.json. `packing` and `kv_scales` have names of files."""

    def __init__(self, source: Source, layers: ChosenLayers, options: PackOptions) -> None:
        self.source, self.layers = source, layers
        in_files = {source.meta_model.file_name(name): scheme for name, scheme in layers.schemes.items()}
        keys_and_values = layers.static.keys_and_values
        self.packing = Packing(get_layout(options.layout), in_files, bool(keys_and_values))
        self.kv_scales = self.packing.to_files(keys_and_values)
        self.weights = WeightScales(source, layers, options)
        self._updates: dict[str, list[Tensor]] = {}  # |U|^2, |D|^2 and <D, U> of each layer, by kind

    @cached_property
    def not_linear(self) -> list[Leftover]:
        """The matrices that stay in BF16 because no linear layer holds them."""
        stacks = self.source.meta_model.experts.stacks.items()
        packed = [name for name, parts in stacks if all(part in self.layers.schemes for part in parts)]
        left = find_coverage(self.source.meta_model.model, [*self.layers.linears, *packed]).left
        return [entry for entry in left if entry.kind != "linear layer"]

    def change(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of the files that hold the model's tensor `name`, see `octavo.hf.source.Change`."""
        module, _, leaf = name.rpartition(".")
        in_files = self.source.meta_model.experts.split
        if leaf == "weight" and module in self.layers.schemes:
            return self.packing.to_files(in_files(self.packed(module, tensor)))
        stored, dtype = dict[str, Tensor](), self.source.meta_model.dtypes[name]
        for part, t in in_files({name: tensor}).items():
            expert = part.removesuffix(".weight")
            stored |= self.packed(expert, t.contiguous()) if expert in self.layers.experts else {part: t.to(dtype)}
        return self.packing.to_files(stored)

    def packed(self, layer: str, w: Tensor) -> dict[str, Tensor]:
        """The bytes and the scales in place of the weight of a layer or an expert."""
        w = w.float() if w.dtype == torch.float64 else w
        adapted = None if w.is_meta else self.source.update_of(layer)
        before = None if adapted is None else self.weights.quantize(layer, adapted[0])
        scheme, q = self.layers.schemes[layer], self.weights.quantize(layer, w)
        if adapted is not None and before is not None:
            u, d = adapted[1].double(), (q.dequantize() - before.dequantize()).double()
            sums = torch.stack([(u * u).sum(), (d * d).sum(), (u * d).sum()])
            self._updates.setdefault(layer.rpartition(".")[2], []).append(sums)
        stored = {f"{layer}.weight": q.data, f"{layer}.{SCALE_NAME}": scheme.stored_scale(q)}
        if scheme.static:
            stored[f"{layer}.{INPUT_SCALE_NAME}"] = self.layers.static.inputs[layer].to(w.device)
        return stored

    @property
    def updates(self) -> dict[str, KeptUpdate]:
        """What the rounding left of merged adapters, for each kind of layer: the last part of their names."""
        found = {}
        for kind, sums in self._updates.items():
            u, d, both = torch.stack(sums).sum(0).tolist()
            cosine = both / math.sqrt(u * d) if u * d else 0.0
            found[kind] = KeptUpdate(len(sums), math.sqrt(d / u) if u else 1.0, cosine)
        return found

    def config(self) -> dict[str, Any]:
        meta_model, config = self.source.meta_model, dict(self.source.config)
        linears = meta_model.linears() + meta_model.experts.unpacked(self.packing.layout, self.layers.experts)
        # vLLM looks for the names of the files, and transformers for those of its modules.
        renamed = [name for name in [*self.layers.linears, *self.layers.skipped] if meta_model.file_name(name) != name]
        of_modules = {name: self.layers.schemes[name] for name in renamed if name in self.layers.schemes}
        packing = replace(self.packing, schemes={**self.packing.schemes, **of_modules})
        config["dtype"] = str(UNQUANTIZED_DTYPE).removeprefix("torch.")
        config["quantization_config"] = quantization_config(packing, [*linears, *renamed], self.source.description)
        if self.packing.kv_cache and "num_attention_heads" in config:  # compressed-tensors needs it, OPT lacks it
            config.setdefault("num_key_value_heads", config["num_attention_heads"])
        return config

    def record(self, remarks: Mapping[str, object]) -> dict[str, object]:
        """The entries of octavo.json (docs/format.md), `remarks` last."""
        schemes = {
            each.name: {"weight": self.weights.cast(each).to_dict(), "input": each.inputs and each.inputs.to_dict()}
            for each in self.layers.schemes.values()
        }
        updates = {kind: kept._asdict() for kind, kept in self.updates.items()}
        left = {"not_linear": {entry.name: entry.share for entry in self.not_linear}} if self.not_linear else {}
        return {
            "layout": self.packing.layout.name,
            "schemes": schemes,
            "layers": {name: scheme.name for name, scheme in self.packing.schemes.items()},
            "weight_scales": self.weights.record(),
            "calibration": self.layers.static.record,
            **left,
            **({"adapters": updates} if updates else {}),
            **remarks,
        }

    def packed_bytes(self, specs: Mapping[str, Tensor]) -> int:
        """The bytes of the packed weights and their scales among the files' tensors `specs`."""
        packed = {f"{name}.weight" for name in self.packing.schemes}
        packed |= {self.packing.layout.rename(f"{name}.{SCALE_NAME}") for name in self.packing.schemes}
        return sum(specs[name].nbytes for name in packed)


# ---- What the rounding to eight bits leaves of the update U = B A alpha / r of merged adapters.
#
#     D = Q(W + U) - Q(W)        norm = |D| / |U|        cosine = <D, U> / (|D| |U|)
#
# An update far below the step of the format moves few elements, each by a whole step: then D is mostly noise. Its norm
# may exceed the update's, and its cosine is low.


class KeptUpdate(NamedTuple):
    """The update of the layers of one kind after the rounding: its norm over that before, and the cosine of both."""

    layers: int
    norm: float
    cosine: float


# ---- The scales of the weights of packed layers.
#
#     amax     amax/448 of each block, or the scale in the history of a run (delayed scaling)
#     mse      the scale of least mean squared error near that (`octavo.packing.scale_search`)
#
# Layers that readers run as one GEMM (q, k and v; gate and up) need one scale if a scale is of a whole tensor: vLLM
# takes the largest and casts the other weights again, which loses precision. So these layers share the largest scale
# before they are cast. A run that was trained with a scale for each of these tensors keeps them, because sharing would
# change its bytes, unless the option `share` is set.


class WeightScales:
    """Casts the weights of a source, one at a time. `gains` is the dB of SQNR that each weight gained over the rule
    amax, if the rule is mse."""

    def __init__(self, source: Source, layers: ChosenLayers, options: PackOptions) -> None:
        self.source, self.schemes, self.options = source, layers.schemes, options
        # These recipes train with one scale for a weight.
        keeps = source.recipe in ("tensorwise", "delayed") and options.weights == "amax" and not options.pow2
        self.own = layers.static.weights if keeps else {}
        self._shares = not keeps if options.share is None else options.share
        self.gains: dict[str, float] = {}
        self._used: dict[str, float] = {}

    def cast(self, scheme: Scheme) -> Cast:
        rounds = self.options.pow2 and not scheme.weight.power_of_two
        return replace(scheme.weight, scale="pow2") if rounds else scheme.weight

    def quantize(self, module: str, w: Tensor) -> QTensor:
        """Cast the weight `w` [N, K] of a layer. A weight on the meta device gives one there."""
        cast = self.cast(self.schemes[module])
        if w.is_meta:
            return quantize(w, cast)
        if (scale := self._shared.get(module, self.own.get(module))) is not None:
            q = quantize_scaled(w, scale, cast)[0]
        else:
            q = quantize(w, cast)
            if self.options.weights == "mse":
                searched = search_scale(w, q.scale.float(), cast)
                self._note([module], searched)
                q = replace(cast_by(w, searched.scale, cast), scale=searched.scale.to(q.scale.dtype))
        if cast.granularity == TENSOR:
            self._used[module] = float(q.scale)
        return q

    @property
    def ratios(self) -> dict[str, float]:
        """The largest scale over the smallest of layers that readers fuse and that keep their own scales, unless it is
        1. It is known once the weights are cast."""
        used = {", ".join(group): [self._used[name] for name in group] for group in self._groups()}
        return {names: max(scales) / min(scales) for names, scales in used.items() if min(scales) != max(scales)}

    def record(self) -> dict[str, object]:
        """The entry "weight_scales" of octavo.json (docs/format.md)."""
        gains = {"sqnr_gain_db": finite(self.gains)} if self.options.weights == "mse" else {}
        return {"rule": self.options.weights, "pow2": self.options.pow2, **gains}

    @cached_property
    def _shared(self) -> dict[str, Tensor]:
        """The scales that layers share, by the name of each. Their weights are read to find them."""
        if not self._shares:
            return {}
        return {name: scale for group in self._groups() for scale in [self._one_scale(group)] for name in group}

    def _groups(self) -> list[tuple[str, ...]]:
        wholes = [module for module, how in self.schemes.items() if how.weight.granularity == TENSOR]
        return [group for group in groups(wholes) if len(group) > 1]

    def _one_scale(self, group: tuple[str, ...]) -> Tensor:
        cast = self.cast(self.schemes[group[0]])
        if all(name in self.own for name in group):
            return torch.stack([self.own[name] for name in group]).amax(0)
        scale = torch.stack([quantize(self._weight(name), cast).scale for name in group]).amax(0)
        if self.options.weights == "amax":
            return scale
        searched = search_shared_scale((self._weight(name) for name in group), scale, cast)
        self._note(group, searched)
        return searched.scale

    def _weight(self, module: str) -> Tensor:
        name = f"{module}.weight"
        return self.source.get(name) if name in self.source.specs else self.source.get_from_file(name)  # of an expert

    def _note(self, modules: Sequence[str], searched: SearchedScale) -> None:
        for module, before, after in zip(modules, searched.before.tolist(), searched.after.tolist(), strict=True):
            self.gains[module] = 0.0 if before == after else 10 * math.log10(before / after) if after else math.inf


# ---- The model card of a packed folder, README.md: how it is packed, how to open it, and what is known of its quality.
#
# The card of the model itself stays, with its front matter, below what is said here. Two comments delimit this part,
# so that a folder made of a packed one has it once.

_BEGIN, _END = "<!-- written by octavo pack -->", "<!-- end -->"


def card_of(
    name: str, source: str, config: Mapping[str, Any], record: Mapping[str, Any], original: tuple[str, str]
) -> str:
    """README.md of the folder `name`, which was packed from the model called `source`. `config` and `record` are its
    config.json and octavo.json; `original` is the front matter and the text of the source's card, each or ""."""
    counts = Counter(record["layers"].values())
    schemes = ", ".join(f"{count} by `{scheme}`" for scheme, count in counts.items())
    quality = f"`octavo verify {name} --against MODEL --data TEXT` measures what packing cost."
    if budget := record.get("budget"):
        measured = ", ".join(f"{each['measure']} {each['measured']:.3g}" for each in budget["limits"])
        quality = f"Against the model in BF16, on {budget['data']['prompts']} prompts: {measured}."
    part = [
        _BEGIN,
        f"# {name}",
        f"Packed in eight bits by Octavo from `{source}`: linear layers {schemes}, in the layout {record['layout']}.",
        *_opening(name, config, get_layout(record["layout"]), list(counts)),
        quality,
        _END,
    ]
    head = original[0] or "---\ntags: [octavo, quantized]\n---\n"
    rest = re.sub(f"{_BEGIN}.*?{_END}\n*", "", original[1], flags=re.DOTALL)
    return "\n\n".join([head.rstrip(), *part, rest.strip()]).rstrip() + "\n"


def _opening(name: str, config: Mapping[str, Any], layout: Layout, schemes: Sequence[str]) -> list[str]:
    architecture = str((config.get("architectures") or [""])[0])
    writes = names_language_model(architecture)
    shell = [f'octavo generate {name} --prompt "Once"'] if writes else []
    if writes and not any(scheme.startswith("group") for scheme in schemes):  # float32 groups are not for vLLM
        shell.insert(0, f"vllm serve {name}")
    python = [] if not_for_transformers(layout, config) else [
        f"from transformers import {architecture}  # and pip install {layout.needs}\n",
        f'model = {architecture}.from_pretrained("{name}", dtype="auto")\n',
    ]  # fmt: skip
    python += ["import octavo  # computes with the packed bytes\n", f'model = octavo.load("{name}")']
    fenced = [("bash", shell)] if shell else []
    return ["\n".join([f"```{kind}", *lines, "```"]) for kind, lines in [*fenced, ("python", python)]]
