"""From a model to a packed folder, one tensor at a time.

The weights of the chosen linear layers are cast by their schemes (`octavo.artifact.packed.scheme`). All other tensors
are stored in BF16. The way of a model through the files, each of which is entered at most twice:

    open_source     hf/source.py               config.json, the modules on the meta device, the shapes of tensors
    choose_layers   packing/chosen_layers.py   the scheme of each linear layer, or the reason why it stays in BF16
    PackJob         packing/pack_job.py        the config.json of the packed folder
    write_model     hf/model_writer.py         takes each tensor through
      Source.get      hf/source.py               which reads it,
      PackJob.change  packing/pack_job.py        which casts it, by packing/weight_scales.py, and
      write_shards    artifact/safetensors_files.py, which writes it
    PackReport      packing/report.py          the sizes, and the layers in BF16
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from octavo.artifact.atomic_folder import check_absent
from octavo.evaluation.prompts import has_tokenizer
from octavo.hf.model_writer import write_model
from octavo.hf.source import Source, open_source
from octavo.packing.chosen_layers import choose_layers
from octavo.packing.options import PackOptions
from octavo.packing.pack_job import PackJob
from octavo.packing.report import PackReport
from octavo.progress import Progress, no_progress


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
        progress: called after each tensor (`octavo.progress`).
        fields: fields of `PackOptions` that replace those of `options`.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: the source is not whole, or holds inf or NaN.
        ValueError: options that are unknown or do not fit each other or the model, see `PackOptions` and
            `octavo.packing.chosen_layers.choose_layers`.
        WriteError: the disk refused.

    Example:
        >>> pack("models/qwen", "packed/qwen", scheme="block")
    """
    source, out = Path(source), Path(out)
    check_absent(out)
    options = replace(options, **fields)
    return pack_source(open_source(source, step), out, options, progress)


def pack_source(
    source: Source, out: Path, options: PackOptions, progress: Progress, remarks: Mapping[str, object] | None = None
) -> PackReport:
    """`pack` for a source that is open. `remarks` are further entries of octavo.json."""
    layers = choose_layers(source, options)
    job = PackJob(source, layers, options)
    record = partial(job.record, {**source.folded(), **(remarks or {})})
    written = write_model(source, out, job.change, job.config(), record, progress, "packing", job.kv_scales)
    return PackReport(
        **vars(written),
        packed={name: scheme.name for name, scheme in {**layers.schemes, **layers.experts}.items()},
        skipped=layers.skipped,
        bf16_bytes=job.bf16_bytes,
        packed_bytes=job.packed_bytes(written.specs),
        gains=job.weights.gains,
        ratios=job.weights.ratios,
        cached=len(job.kv_scales) // 2,
        lacks_tokenizer=source.meta_model.takes_text and not has_tokenizer(out),
        unpacked_expert_bytes=job.unpacked_expert_bytes,
        not_linear=job.not_linear,
    )
