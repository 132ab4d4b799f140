"""From a BF16 model and text to the statistics of every tensor that would be quantized.

All prompts pass the embeddings, then the first block, then the second, and so on. Between two parts their hidden states
are on disk, so memory holds one block and one batch, and an interrupted run resumes with the part that it was in.

    part 0: the embeddings        parts 1..L: the blocks        part L+1: the last norm, pooler and the like

Disk: at most two times tokens * width * 2 bytes. A batch holds prompts of one length, without padding.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from octavo.calibration.site_statistics import KINDS, LEAVES, PERCENTILES, Observer, Statistics, check_seen
from octavo.checkpoint.files import ArtifactError, load_tensors, open_file, read_json, replace_file, save_tensors
from octavo.checkpoint.folder import WriteError, check_absent, locked_folder, whole_folder, writing
from octavo.evaluation.prompts import OnRead, PromptOptions, open_prompts
from octavo.hf.block_by_block import BlockModel
from octavo.hf.source import open_source
from octavo.nn import select_linears
from octavo.util import Progress, choose_device, no_progress, reading
from octavo.version import __version__

# ---- The result of a calibration, on disk and in memory.
#
#     OUT/
#       calibration.json           format version, the model's hash, settings, versions, prompts, tokens, and the sites:
#                                  name -> {"kind": input | norm | query | key | value, "layers": [linear, ...]}
#       calibration.safetensors    SITE.tokens  SITE.channel_amax  SITE.history  SITE.histogram  SITE.first_bin
#                                  (`octavo.calibration.site_statistics.Statistics.to_tensors`)
#
# `layers` names the linear layers that read the site. All names are those of the model's files and modules.


FORMAT_VERSION = 1
DESCRIPTION, TENSORS = "calibration.json", "calibration.safetensors"
SITES = "sites.safetensors"  # of a part that is done, in the work folder
_FIELDS = ("model_hash", "settings", "versions", "prompts", "tokens")


@dataclass(frozen=True, eq=False)
class Calibration:
    """The statistics of every site of a model, and their origin."""

    sites: Mapping[str, Statistics]  # by name, in the order of the computation
    model_hash: str  # the result of `hash_model`
    settings: Mapping[str, Any]  # of the prompts, their fingerprint, the device, and the report of the text
    versions: Mapping[str, str]  # of octavo, torch and transformers
    prompts: int  # the number of prompts that were run
    tokens: int  # the number of their tokens
    _scales: dict[tuple[str, str, float], Tensor] = field(default_factory=dict, init=False)  # that `scale` has computed

    @cached_property
    def layers(self) -> dict[str, str]:
        """The name of the site that each linear layer reads, by the name of the layer."""
        return {layer: name for name, statistics in self.sites.items() for layer in statistics.layers}

    @property
    def unseen(self) -> list[str]:
        """The matrices of experts to which no token came, by their names in the files."""
        return [layer for layer, site in self.layers.items() if not self.sites[site].tokens]

    @property
    def input_histories(self) -> dict[str, list[float]]:
        """The amax of the input in each batch, oldest first, by the linear layer's name, for `seed_scales`."""
        return {layer: self.sites[site].history for layer, site in self.layers.items()}

    @property
    def record(self) -> dict[str, object]:
        """The origin of the statistics, for octavo.json."""
        return {
            "prompts": self.prompts, "tokens": self.tokens, "settings": dict(self.settings),
            "model_hash": self.model_hash, **({"unseen_experts": self.unseen} if self.unseen else {}),
        }  # fmt: skip

    def scale(self, site: str, rule: str = "amax", percentile: float = PERCENTILES[-1]) -> Tensor:
        """A static e4m3 scale of a site, or of the input of a linear layer, see `Statistics.scale`.

        Layers that read one tensor have one scale. An expert that saw no token has the largest scale of the other
        experts of its layer. Raises a KeyError if `site` names neither a site nor a layer.
        """
        name = self.layers.get(site, site)
        if name not in self.sites:
            raise KeyError(f"{site} is no site or linear layer of this calibration: it has {list(self.sites)[:4]}")
        keys = [(site, rule, percentile) for site in self.stand_ins(name)]
        self._scales.update({key: self.sites[key[0]].scale(*key[1:]) for key in keys if key not in self._scales})
        return torch.stack([self._scales[key] for key in keys]).amax()

    def stand_ins(self, site: str) -> list[str]:
        """The sites that give a site its scale: itself, or for an expert without a token those of its layer."""
        return [site] if self.sites[site].tokens else self._seen.get(_of_any(site), [site])

    @cached_property
    def _seen(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, statistics in self.sites.items():
            if statistics.tokens:
                found.setdefault(_of_any(name), []).append(name)
        return found

    def save(self, folder: Path) -> None:
        """Write `folder`, whole or not at all. A FileExistsError if it exists, a WriteError if the disk refuses."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        described = {"format_version": FORMAT_VERSION, **fields, "sites": describe(self.sites)}
        with whole_folder(folder) as partial:
            (partial / DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
            save_tensors(to_tensors(self.sites), partial / TENSORS)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Open a folder of `octavo calibrate`. An ArtifactError if a file is damaged, or of another format version."""
        where = Path(folder) / DESCRIPTION
        if not where.is_file():
            raise FileNotFoundError(f"{where} is missing: give a folder that octavo calibrate wrote")
        described = read_json(where)
        if (version := described.get("format_version")) != FORMAT_VERSION:
            raise ArtifactError(f"{where} must have format_version {FORMAT_VERSION}, got {version!r}")
        if missing := [name for name in (*_FIELDS, "sites") if name not in described]:
            raise ArtifactError(f"{where} lacks {', '.join(missing)}: calibrate again")
        sites = from_tensors(described["sites"], load_tensors(Path(folder) / TENSORS), where)
        return cls(sites, **{name: described[name] for name in _FIELDS})


def _of_any(site: str) -> str:
    """The name of an expert's site without the number of the expert."""
    return re.sub(r"\.\d+(\.[^.]+\.input)$", r".*\1", site)


def describe(sites: Mapping[str, Statistics]) -> dict[str, Any]:
    return {name: {"kind": site.kind, "layers": site.layers} for name, site in sites.items()}


def to_tensors(sites: Mapping[str, Statistics]) -> dict[str, Tensor]:
    tensors = {name: site.to_tensors() for name, site in sites.items()}
    return {f"{name}.{leaf}": tensor for name, found in tensors.items() for leaf, tensor in found.items()}


def from_tensors(described: Any, tensors: Mapping[str, Tensor], where: Path) -> dict[str, Statistics]:
    """The inverse of `describe` and `to_tensors`. Raises an ArtifactError whose message begins with `where`."""
    sites = {}
    with reading(where, "a description of these tensors", ArtifactError):
        for name, site in described.items():
            if site["kind"] not in KINDS:
                raise ValueError(f"{name} has the unknown kind {site['kind']!r}")
            found = {leaf: tensors[f"{name}.{leaf}"] for leaf in LEAVES if f"{name}.{leaf}" in tensors}
            sites[name] = Statistics.from_tensors(name, found, site["kind"], site["layers"])
    return sites


def load_calibration(folder: str | Path, model: Path, description: Path | None = None) -> Calibration:
    """The calibration in `folder`. An ArtifactError if it is damaged, or of another model than that of
    `hash_model(model, description)`, such as another checkpoint of a run."""
    found = Calibration.load(folder)
    if found.model_hash != hash_model(model, description):
        raise ArtifactError(f"{folder} is a calibration of another model than {model}: calibrate this one")
    return found


def hash_model(folder: Path, description: Path | None = None) -> str:
    """SHA-256, in hexadecimal, of the config.json (in `description`, if that is another folder) and of every
    safetensors file of a model, by name and content. In the checkpoint of a run only those of the weights count, or of
    the adapters."""
    described = description or folder
    files = "*.safetensors" if described == folder else "*model*.safetensors"
    digest = hashlib.sha256()
    for path in [described / "config.json", *sorted(folder.glob(files))]:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


# ---- The folder beside the result in which a calibration keeps its work, so that an interrupted one resumes.
#
# The folder part-007 says that part 7 is done. It holds the sites of the part, and the hidden states after it, a file
# for each batch: part 8 starts there, and removes them when it is done.


def _claim(work: Path, fingerprint: dict[str, Any]) -> None:
    """Make the folder, or check that it is of the same model, data and settings: else an ArtifactError."""
    described = work / "settings.json"
    if described.is_file():
        before = read_json(described)
        if changed := sorted(key for key in fingerprint | before if before.get(key) != fingerprint.get(key)):
            raise ArtifactError(
                f"{work} holds a calibration that was begun with other settings ({', '.join(changed)}): continue with "
                "those, or choose another folder for the result"
            )
        return
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
        replace_file(described, json.dumps(fingerprint, indent=1))


def _load_sites(part: Path) -> dict[str, Statistics]:
    described = open_file(part / SITES).metadata() or {}
    return from_tensors(json.loads(described.get("sites", "null")), load_tensors(part / SITES), part / SITES)


# ---- From a BF16 model and text to the statistics of every tensor that would be quantized.


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
        model: a Hugging Face folder with safetensors and a tokenizer, or a run of `octavo train`.
        data: sources of text, see `octavo.data.read_text`.
        out: the folder to make. `.OUT.calibrating` beside it holds the work until then.
        prompts: which prompts are taken from `data`; 128 to 512 samples are usual.
        device: where a block runs.
        step: the checkpoint of a run. None takes the newest.
        progress: called at the start and after each part (`octavo.util`).
        on_read: called with the report of the text that was read, before anything runs.

    Raises:
        FileNotFoundError, ArtifactError: the model's folder is not whole, or is not supported; or the work folder is of
            another model, data or settings.
        DataError: an error of the data.
        ValueError: a layer that saw no token, or a site with inf or NaN.
        WriteError: the disk refused. The finished parts stay, and the same call resumes after them.
    """
    model, out = Path(model), Path(out)
    check_absent(out)
    place = choose_device(device)
    source = open_source(model, step)
    parts = BlockModel(source, place)
    chosen = open_prompts(data, source.description, prompts, parts.meta_model, on_read)
    settings: dict[str, Any] = {
        "samples": prompts.samples, "context": prompts.context, "context_used": chosen.context, "batch": prompts.batch,
        "device": place.type, "seed": prompts.seed, "prompts": chosen.fingerprint,
    }  # fmt: skip
    versions = {"octavo": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")}
    model_hash = hash_model(source.origin, source.description)
    work = out.parent / f".{out.name}.calibrating"
    with locked_folder(work):
        check_absent(out)  # the last holder of the lock may have made it
        _claim(work, {"model": model_hash, **settings, **{f"version of {k}": v for k, v in versions.items()}})
        try:
            sites = _run_all(parts, chosen.batches(prompts.batch), work, progress)
        except WriteError as error:
            raise WriteError(f"{error}. The same command continues with the part of the work that it was in") from error
        except ValueError:  # another text may be enough, and this work would refuse its settings
            shutil.rmtree(work)
            raise
        settings["data"] = chosen.report.to_dict()
        calibration = Calibration(sites, model_hash, settings, versions, len(chosen.ids), chosen.tokens)
        calibration.save(out)
        shutil.rmtree(work)
    return calibration


def _run_all(parts: BlockModel, batches: list[Tensor], work: Path, progress: Progress) -> dict[str, Statistics]:
    """Run every part that the work folder does not have yet. Returns the sites of all parts."""
    linears = [layer.name for layer in select_linears(parts.model) if not layer.reason]
    observer = Observer(parts.model, linears, parts.experts)
    count, doing = len(parts.blocks) + 2, "calibrating, block by block"
    folders = [work / f"part-{part:03d}" for part in range(count)]
    with observer.watch():
        for part in (part for part in range(count) if not folders[part].is_dir()):
            progress(part, count, doing)
            before = folders[part - 1]  # of part 0 the last, which is not there yet
            with whole_folder(folders[part]) as after:
                _run_part(parts, part, batches, observer, before, after)
                sites = observer.take()
                if 0 < part < count - 1:
                    block = parts.blocks[part - 1]
                    check_seen(sites, [name for name in linears if name.startswith(f"{block}.")], block)
                    if not any(site.kind == "key" for site in sites.values()):
                        raise ArtifactError(
                            f"{block} does not attend through the attention functions of transformers, so that its "
                            "keys and values are not seen: such a model cannot be calibrated"
                        )
                save_tensors(to_tensors(sites), after / SITES, {"sites": json.dumps(describe(sites))})
            for hidden in before.glob("hidden-*"):
                hidden.unlink()
    sites = {name: site for folder in folders for name, site in _load_sites(folder).items()}
    called = {layer for site in sites.values() for layer in site.layers}  # not what ESM predicts contacts with
    check_seen(sites, parts.outside(filter(called.__contains__, linears)), "what is in no block")
    progress(count, count, doing)
    return sites


def _run_part(
    parts: BlockModel, part: int, batches: list[Tensor], observer: Observer, before: Path, after: Path
) -> None:
    """Run a part on the hidden states in the folder `before`, and write those after it into the folder `after`."""
    parts.load_block(part - 1 if 0 < part <= len(parts.blocks) else None)
    for i, ids in enumerate(batches):
        name = f"hidden-{i:06d}.safetensors"
        hidden = load_tensors(before / name)["hidden"] if part else None
        hidden = parts.run_part(part, ids, hidden, observer.looking)
        if part <= len(parts.blocks):
            save_tensors({"hidden": hidden.to("cpu", torch.bfloat16)}, after / name)  # [B, T, width]
