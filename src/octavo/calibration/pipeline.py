"""From a BF16 model and text to the statistics of every tensor that would be quantized.

All prompts pass the embeddings, then the first block, then the second, and so on. Between two parts their hidden states
are on disk (`octavo.calibration.workdir`), so memory holds one block and one batch, and an interrupted run resumes with
the part that it was in.

    part 0: the embeddings        parts 1..L: the blocks        part L+1: the last norm, pooler and the like

Disk: at most two times tokens * width * 2 bytes. A batch holds prompts of one length, without padding.
"""

from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.atomic_folder import check_absent, locked_folder
from octavo.artifact.files import ArtifactError
from octavo.artifact.run import find_model
from octavo.calibration.folder import Calibration, hash_model
from octavo.calibration.observer import Observed, Observer, check_seen
from octavo.calibration.workdir import CalibrationWorkdir
from octavo.device import choose_device
from octavo.evaluation.prompts import OnRead, PromptOptions, open_prompts
from octavo.hf.block_by_block import BlockModel
from octavo.nn import select_linears
from octavo.progress import Progress, no_progress
from octavo.version import __version__


def calibrate(
    model: str | Path,
    data: Sequence[str],
    out: str | Path,
    *,
    prompts: PromptOptions = PromptOptions(samples=256, context=2048),
    device: str = "cpu",
    step: int | None = None,
    progress: Progress = no_progress,
    on_read: OnRead | None = None,
) -> Calibration:
    """Run a model on text in BF16, block by block, and write the statistics of its tensors.

    Args:
        model: a Hugging Face folder with safetensors (one file or shards) and a tokenizer, or a run of `octavo train`.
        data: sources of text, see `octavo.text.read_text`.
        out: the folder to make. `.OUT.calibrating` beside it holds the work until then.
        prompts: which prompts are taken from `data`; 128 to 512 samples are usual.
        device: where a block runs.
        step: the checkpoint of a run. None takes the newest.
        progress: called at the start and after each part (`octavo.progress`).
        on_read: called with the report of the text that was read, before anything runs.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: the model's folder is not whole, or is not supported; or the work folder is of
            another model, data or settings.
        DataError: an error of the data.
        ValueError: a device that is not there, a step of a folder that is no run, a layer that saw no token, or a site
            with inf or NaN.
        WriteError: the disk refused. The finished parts stay, and the same call resumes after them.
    """
    model, out = Path(model), Path(out)
    check_absent(out)
    place = choose_device(device)
    described, stored = find_model(model, step)
    parts = BlockModel(described, place, stored)
    chosen = open_prompts(data, described, prompts, parts.meta_model, on_read)
    settings: dict[str, Any] = {
        "samples": prompts.samples, "context": prompts.context, "context_used": chosen.context, "batch": prompts.batch,
        "device": place.type, "seed": prompts.seed, "prompts": chosen.fingerprint,
    }  # fmt: skip
    versions = {"octavo": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")}
    model_hash = hash_model(stored, described)
    workdir = CalibrationWorkdir(out.parent / f".{out.name}.calibrating", chosen.tokens)
    with locked_folder(workdir.path):
        workdir.claim({"model": model_hash, **settings, **{f"version of {k}": v for k, v in versions.items()}})
        observed = _run_all(parts, chosen.batches(prompts.batch), workdir, progress)
        settings["data"] = chosen.report.to_dict()
        calibration = Calibration(observed, model_hash, settings, versions, len(chosen.ids), chosen.tokens)
        calibration.save(out)
        workdir.remove()
    return calibration


def _run_all(
    parts: BlockModel, batches: list[Tensor], workdir: CalibrationWorkdir, progress: Progress
) -> dict[str, Observed]:
    """Run every part that the work folder does not have yet. Returns the sites of all parts."""
    linears = [layer.name for layer in select_linears(parts.model) if not layer.reason]
    observer = Observer(parts.model, linears, parts.experts)
    count, doing = len(parts.blocks) + 2, "calibrating, block by block"
    with observer.watch(), parts.loaded_frame():
        for part in range(workdir.done(count), count):
            progress(part, count, doing)
            with workdir.hidden(part, last=part == count - 1) as (read, write):
                _run_part(parts, part, batches, observer, read, write)
            sites = observer.take()
            if part in range(1, count - 1):
                _check_block(sites, linears, parts.blocks[part - 1])
            workdir.finish(part, sites)
    observed = {name: site for part in range(count) for name, site in workdir.load(part).items()}
    check_seen(observed, parts.outside(linears), "what is in no block")
    progress(count, count, doing)
    return observed


def _run_part(
    parts: BlockModel,
    part: int,
    batches: list[Tensor],
    observer: Observer,
    read: Callable[[torch.Size], Tensor],
    write: Callable[[Tensor], None],
) -> None:
    if part == 0:
        for ids in batches:
            write(parts.embed(ids, observer.looking))
    elif part <= len(parts.blocks):
        with parts.loaded_block(part - 1):
            for ids in batches:
                write(parts.run_block(part - 1, ids, read(ids.shape), observer.looking))
    else:
        for ids in batches:
            parts.finish(ids, read(ids.shape), observer.looking)


def _check_block(sites: dict[str, Observed], linears: list[str], block: str) -> None:
    check_seen(sites, [name for name in linears if name.startswith(f"{block}.")], block)
    if not any(observed.kind == "key" for observed in sites.values()):
        raise ArtifactError(
            f"{block} does not attend through the attention functions of transformers, so that its keys and values "
            "are not seen: such a model cannot be calibrated"
        )
