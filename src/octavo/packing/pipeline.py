"""From a model to a packed folder, one tensor at a time.

The weights of its linear layers are cast as their scheme says (`octavo.artifact.packed.scheme`), everything else is
stored in BF16. Activations are scaled when the model runs, but for the scheme `static`, whose scales come from a
calibration (`octavo.calibration.pipeline`) or from a run that was trained with `delayed`. The scheme that a run has by
its recipe is the very cast of its forward GEMM (`SCHEME_OF`), so the bytes are those that training multiplied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from octavo.artifact.atomic_folder import check_absent, whole_folder
from octavo.artifact.packed.description import copy_description
from octavo.artifact.packed.layouts import (
    UNQUANTIZED_DTYPE,
    PackedFolder,
    Packing,
    check_layout,
    quantization_config,
    write_config,
)
from octavo.artifact.packed.scales import INPUT_SCALE_NAME, SCALE_NAME
from octavo.artifact.packed.scheme import Scheme, get_scheme
from octavo.artifact.safetensors_files import SHARD_BYTES, Spec, write_shards
from octavo.calibration.folder import load_calibration
from octavo.evaluation.prompts import has_tokenizer
from octavo.hf.fused_groups import check_groups, groups
from octavo.hf.source import Source, open_source
from octavo.nn import convert
from octavo.nn.coverage import find_coverage
from octavo.packing.report import PackReport
from octavo.packing.static_scales import StaticScales, calibrated_scales, check_cache, check_rule, trained_scales
from octavo.packing.tensor_parallel import check_degrees
from octavo.packing.weight_scales import WeightRule, WeightScales
from octavo.progress import Progress, no_progress
from octavo.version import __version__

# Whose forward pass a scheme repeats bit for bit; for tensorwise all but its inputs' scales, which are of tokens here.
SCHEME_OF = {
    "rowwise": "channel", "rowwise_dw_bf16": "channel", "blockwise": "block", "mxfp8": "mx", "groupwise": "group64",
    "delayed": "static", "tensorwise": "tensor",
}  # fmt: skip


def pack(
    source: Path,
    out: Path,
    *,
    scheme: str | None = None,
    layers: Mapping[str, str] | None = None,
    layout: str = "compressed-tensors",
    skip: Sequence[str] = (),
    calibration: Path | None = None,
    rule: str | None = None,
    weights: str = "amax",
    pow2: bool = False,
    share: bool | None = None,
    kv_cache: str | None = None,
    tensor_parallel: Sequence[int] = (),
    step: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    remarks: Mapping[str, object] | None = None,
    progress: Progress = no_progress,
) -> PackReport:
    """Write a model as a packed folder, which appears whole or not at all. Memory: about one tensor.

    Args:
        source: the folder of a run of `octavo train`, or of a Hugging Face model.
        out: the folder to make.
        scheme: of the packed layers: channel, tensor, static, block, mx, group32, group64 or group128. None takes for
            a run that of its recipe (`SCHEME_OF`), and else channel.
        layers: other schemes for some, by globs of their names; the first that matches counts.
        layout: compressed-tensors, or one that holds fewer schemes: fp8 (block alone), modelopt (static, channel or
            block), autofp8 (static or tensor).
        skip: globs of layers to leave in BF16, beside output heads, routers and what the run skipped. As of `layers`,
            all or none of those that consumers run as one (`octavo.hf.fused_groups`).
        calibration: the folder that `octavo calibrate` made of this model, for `kv_cache` and the scheme static, where
            a run that was trained with `delayed` needs none.
        rule: what the scales from it are of: amax (as None), percentile (99.99) or mse.
        weights: what the scales of weights are of: amax, or mse, the least squared error
            (`octavo.packing.mse_search`).
        pow2: round the scales of weights up to powers of two.
        share: one scale for layers that consumers fuse, where scales are of whole tensors. None: unless the source is a
            run that was trained with scales of its own, whose bytes that would change (`octavo.packing.weight_scales`).
        kv_cache: "fp8" stores scales for a cache of keys and values in e4m3, one each for every attention layer.
        tensor_parallel: numbers of devices that consumers shall be able to split the model over.
        step: the checkpoint of a run; None takes the newest.
        shard_bytes: the largest file of tensors.
        remarks: what octavo.json shall say beside its own.
        progress: called after each tensor (`octavo.progress`).

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: the source is not whole, or holds inf or NaN.
        ValueError: an unknown scheme, layout, rule or cache, a scheme that the layout does not hold, a layer whose
            sizes the scheme cannot have or that cannot be split, static scales without a calibration of this model, or
            a rule without a calibration.
        WriteError: the disk refused.
    """
    check_absent(out)
    rule = check_rule(rule, calibration)
    opened = open_source(source, step)
    conversion = convert(opened.meta_model.model, "rowwise", skip=(*opened.skip, *skip))
    scheme = SCHEME_OF.get(opened.recipe, "channel") if scheme is None else scheme
    schemes = _choose(conversion.converted, scheme, layers or {})
    check_layout(layout, schemes.values(), check_cache(kv_cache))
    static, unscaled = _static_scales(opened, schemes, calibration, rule, kv_cache)
    check_groups((row.name for row in conversion.rows), schemes)
    own = {} if static is None else static.weights
    plan = _Plan(opened, schemes, layout, static, WeightScales(opened, schemes, WeightRule(weights, pow2, share), own))
    plan.check_split(tensor_parallel)
    plan.write(out, shard_bytes, remarks or {}, progress)
    return plan.report(out, conversion.skipped | dict.fromkeys(unscaled, "training left it in BF16"))


def _static_scales(
    source: Source, schemes: dict[str, Scheme], calibration: Path | None, rule: str, kv_cache: str | None
) -> tuple[StaticScales | None, list[str]]:
    """The stored scales that are needed; the layers for which there are none are taken out of `schemes`."""
    static = [name for name, how in schemes.items() if how.static]
    if not static and kv_cache is None:
        if calibration is not None:
            load_calibration(calibration, source)  # nothing of it is stored, but a wrong folder is an error
        return None, []
    if source.recipe != "delayed" or calibration is not None or kv_cache is not None:
        return calibrated_scales(calibration, rule, source, static, kv_cache), []
    scales = trained_scales(source, static)
    unscaled = [name for name in static if name not in scales.inputs]
    for name in unscaled:
        del schemes[name]
    return scales, unscaled


def _choose(names: Sequence[str], scheme: str, layers: Mapping[str, str]) -> dict[str, Scheme]:
    """The scheme of each layer."""
    for glob in layers:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(f"{glob!r} matches no packed layer: they are {', '.join(names[:8])}, ...")
    return {
        name: get_scheme(next((own for glob, own in layers.items() if fnmatchcase(name, glob)), scheme))
        for name in names
    }


class _Plan:
    """What goes into the folder's files, known before a number is read."""

    def __init__(
        self,
        source: Source,
        schemes: Mapping[str, Scheme],
        layout: str,
        static: StaticScales | None,
        weights: WeightScales,
    ) -> None:
        self.source, self.schemes, self.static, self.weights = source, schemes, static, weights
        disks = {source.meta_model.file_name(name): how for name, how in schemes.items()}
        self.packing = Packing(layout, disks, static is not None and bool(static.keys_and_values))
        left = find_coverage(source.meta_model.model, schemes).left
        self.not_linear = [entry for entry in left if entry.kind != "linear layer"]
        self.specs = {name: Spec.of(scale) for name, scale in self._kv_scales().items()}
        for name, spec in source.specs.items():
            meta = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            self._check_fit(name, spec)
            self.specs |= {disk: Spec.of(t) for disk, t in self._stored(name, meta).items()}

    def write(self, out: Path, shard_bytes: int, remarks: Mapping[str, object], progress: Progress) -> None:
        """Make the folder."""
        digest = hashlib.sha256()
        with whole_folder(out) as partial:
            _describe(self, PackedFolder(partial))
            metadata = {"format": "pt", "octavo_version": __version__, "octavo_source": self.source.origin.name}
            write_shards(partial, self.specs, self.tensors(digest, progress), metadata, shard_bytes)
            record = self.record(digest.hexdigest()) | self.source.folded() | dict(remarks)
            (partial / "octavo.json").write_text(json.dumps(record, indent=2) + "\n")

    def tensors(self, digest: hashlib._Hash, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the files, as it is read and cast; `digest` takes in the source's bytes."""
        self.weights.prepare()
        yield from self._kv_scales().items()
        for done, name in enumerate(self.source.specs, start=1):
            tensor = self.source.get(name)
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            yield from self._stored(name, tensor).items()
            progress(done, len(self.source.specs), "packing")

    def report(self, out: Path, skipped: Mapping[str, str]) -> PackReport:
        """What was made in the folder `out`."""
        leaves = [f"{disk}.{leaf}" for disk in self.packing.schemes for leaf in ("weight", SCALE_NAME)]
        return PackReport(
            folder=out,
            source=self.source.origin,
            packed={name: how.name for name, how in self.schemes.items()},
            skipped=skipped,
            left_out=self.source.left_out,
            bf16_bytes=sum(2 * self.source.specs[f"{name}.weight"].numel for name in self.schemes),
            packed_bytes=sum(self.specs[self.packing.scale_on_disk(leaf)].nbytes for leaf in leaves),
            folder_bytes=sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
            gains=self.weights.gains,
            ratios=self.weights.ratios,
            cached=len(self._kv_scales()) // 2,
            has_tokenizer=has_tokenizer(out),
            not_linear=self.not_linear,
        )

    def record(self, digest: str) -> dict[str, object]:
        """What octavo.json says: docs/format.md."""
        return {
            "octavo_version": __version__,
            "source": self.source.origin.name,
            "source_sha256": digest,
            "layout": self.packing.layout,
            "schemes": {
                how.name: {"weight": self.weights.rule.cast(how).to_dict(), "input": how.inputs.to_dict()}
                for how in self.schemes.values()
            },
            "layers": {name: how.name for name, how in self.packing.schemes.items()},
            "weight_scales": self.weights.record(),
            "calibration": None if self.static is None else self.static.record,
            **({"not_linear": {entry.name: entry.share for entry in self.not_linear}} if self.not_linear else {}),
        }

    def check_split(self, degrees: Sequence[int]) -> None:
        """Raise a ValueError unless the layers can be split over each of so many devices."""
        sizes = {name: (spec.shape[0], spec.shape[1]) for name in self.packing.schemes if (spec := self._weight(name))}
        check_degrees(self.packing.schemes, sizes, self.source.config, degrees)

    def _weight(self, disk: str) -> Spec:
        return self.specs[f"{disk}.weight"]

    def _kv_scales(self) -> dict[str, Tensor]:
        return {} if self.static is None else self.packing.on_disk(self.static.keys_and_values)

    def _stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of the files that hold the model's tensor `name`."""
        module, _, leaf = name.rpartition(".")
        on_disk = self.source.meta_model.on_disk
        if leaf != "weight" or module not in self.schemes:
            return on_disk({name: tensor.to(UNQUANTIZED_DTYPE) if tensor.is_floating_point() else tensor})
        how = self.schemes[module]
        q = self.weights.quantize(module, tensor)
        stored = {name: q.data, f"{module}.{SCALE_NAME}": how.stored_scale(q)}
        if self.static is not None and how.static:
            stored[f"{module}.{INPUT_SCALE_NAME}"] = self.static.inputs[module].to(tensor.device)
        return self.packing.on_disk(on_disk(stored))

    def _check_fit(self, name: str, spec: Spec) -> None:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in self.schemes:
            n, k = spec.shape
            if reason := self.schemes[module].misfit(n, k):
                mates = next(group for group in groups(self.schemes) if module in group)
                options = " ".join(f"--layer '{mate}=channel'" for mate in mates)
                raise ValueError(f"{module}: {reason} ({options}), or leave it in BF16 (--skip)")


def _describe(plan: _Plan, target: PackedFolder) -> None:
    """config.json, and beside it what else describes the model: the tokenizer."""
    folder = plan.source.description
    config = dict(plan.source.config)
    config.pop("torch_dtype", None)  # the older name of "dtype"
    disks = plan.source.meta_model.linears()
    if (experts := plan.source.meta_model.experts) is not None:
        disks += experts.unpacked(plan.packing.layout)
    config |= {
        "dtype": str(UNQUANTIZED_DTYPE).removeprefix("torch."),
        "quantization_config": quantization_config(plan.packing, disks),
    }
    if plan.packing.kv_cache and "num_attention_heads" in config:  # compressed-tensors reads it; OPT does not state it
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    write_config(target.path, config)
    copy_description(folder, target.path)
