"""The result of a calibration, on disk and in memory.

    OUT/
      calibration.json           format version, the model's hash, settings, versions, prompts, tokens, and the sites:
                                 name -> {"kind": input | norm | query | key | value, "layers": [linear, ...]}
      calibration.safetensors    SITE.tokens  SITE.channel_amax  SITE.history  SITE.histogram  SITE.first_bin
                                 (`octavo.calibration.statistics.Statistics.to_tensors`)

`layers` names the linear layers that read the site. All names are those of the model's files and modules.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from octavo.artifact.atomic_folder import whole_folder
from octavo.artifact.files import ArtifactError, load_tensors, read_json, save_tensors
from octavo.calibration.observer import KINDS, Observed
from octavo.calibration.statistics import PERCENTILES, Statistics

FORMAT_VERSION = 1
DESCRIPTION, TENSORS = "calibration.json", "calibration.safetensors"
_FIELDS = ("model_hash", "settings", "versions", "prompts", "tokens", "sites")


@dataclass(frozen=True, eq=False)
class Calibration:
    """The statistics of every site of a model, and their origin.

    Attributes:
        observed: the sites by name, in the order of the computation.
        model_hash: the result of `hash_model`.
        settings: samples, context (requested and used), batch, device, seed and the fingerprint of the prompts; `data`
            is the report of the text that was read (`octavo.text.ReadReport.to_dict`).
        versions: of octavo, torch and transformers.
        prompts, tokens: the numbers of prompts and tokens that were run.
    """

    observed: Mapping[str, Observed]
    model_hash: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    prompts: int
    tokens: int

    @property
    def sites(self) -> dict[str, Statistics]:
        """The statistics by the name of the site."""
        return {name: observed.statistics for name, observed in self.observed.items()}

    @property
    def layers(self) -> dict[str, str]:
        """The name of the site that each linear layer reads, by the name of the layer."""
        return {layer: name for name, observed in self.observed.items() for layer in observed.layers}

    @property
    def unseen(self) -> list[str]:
        """The matrices of experts to which no token came, by their names in the files."""
        return [layer for layer, site in self.layers.items() if not self.observed[site].statistics.tokens]

    @property
    def input_histories(self) -> dict[str, list[float]]:
        """The amax of the input in each batch, oldest first, by the name of the linear layer (`octavo.seed_scales`)."""
        return {layer: self.observed[site].statistics.history for layer, site in self.layers.items()}

    @property
    def record(self) -> dict[str, object]:
        """The origin of the statistics, for octavo.json."""
        settings = dict(self.settings)
        unseen = {"unseen_experts": self.unseen} if self.unseen else {}
        origin = {"prompts": self.prompts, "tokens": self.tokens, "settings": settings, "model_hash": self.model_hash}
        return origin | unseen

    def scale(self, site: str, rule: str = "amax", percentile: float = PERCENTILES[-1]) -> Tensor:
        """A static e4m3 scale of a site, or of the input of a linear layer, see `Statistics.scale`.

        Layers that read one tensor have one scale. An expert that saw no token has the largest scale of the other
        experts of its layer. Raises a KeyError if `site` names neither a site nor a layer.
        """
        name = self.layers.get(site, site)
        if name not in self.observed:
            raise KeyError(
                f"{site} is no site and no linear layer of this calibration, which has {list(self.observed)[:4]}"
            )
        found = [self.observed[name].statistics]
        if not found[0].tokens:
            found = [s for other, s in self.sites.items() if s.tokens and _of_any(other) == _of_any(name)] or found
        return torch.stack([statistics.scale(rule, percentile) for statistics in found]).amax()

    def save(self, folder: Path) -> None:
        """Write `folder`, which appears whole or not at all.

        Raises:
            FileExistsError: the folder exists.
            WriteError: the disk refused.
        """
        described = {
            "format_version": FORMAT_VERSION,
            **{name: getattr(self, name) for name in _FIELDS if name != "sites"},
            "sites": describe(self.observed),
        }
        with whole_folder(folder) as partial:
            (partial / DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
            save_tensors(to_tensors(self.observed), partial / TENSORS)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Open a folder of `octavo calibrate`.

        Raises:
            FileNotFoundError: a file is missing.
            ArtifactError: a file is damaged, or of another version of the format.
        """
        where = Path(folder) / DESCRIPTION
        if not where.is_file():
            raise FileNotFoundError(f"{where} is missing: give a folder that octavo calibrate wrote")
        described = read_json(where)
        if described.get("format_version") != FORMAT_VERSION:
            raise ArtifactError(
                f"{where} must have format_version {FORMAT_VERSION}, got {described.get('format_version')!r}"
            )
        if missing := [name for name in _FIELDS if name not in described]:
            raise ArtifactError(f"{where} lacks {', '.join(missing)}: calibrate again")
        tensors = load_tensors(Path(folder) / TENSORS)
        observed = from_tensors(described["sites"], tensors, where)
        return cls(observed, **{name: described[name] for name in _FIELDS if name != "sites"})


def _of_any(site: str) -> str:
    """The name of an expert's site without the number of the expert."""
    return re.sub(r"\.\d+(\.[^.]+\.input)$", r".*\1", site)


def describe(observed: Mapping[str, Observed]) -> dict[str, Any]:
    return {name: {"kind": site.kind, "layers": site.layers} for name, site in observed.items()}


def to_tensors(observed: Mapping[str, Observed]) -> dict[str, Tensor]:
    return {
        f"{name}.{leaf}": tensor
        for name, site in observed.items()
        for leaf, tensor in site.statistics.to_tensors().items()
    }


def from_tensors(described: Any, tensors: Mapping[str, Tensor], where: Path) -> dict[str, Observed]:
    """The inverse of `describe` and `to_tensors`. Raises an ArtifactError whose message begins with `where`."""
    observed = {}
    leaves = Statistics("").to_tensors().keys()
    try:
        for name, site in described.items():
            if site["kind"] not in KINDS:
                raise ValueError(f"{name} has the unknown kind {site['kind']!r}")
            found = {leaf: tensors[f"{name}.{leaf}"] for leaf in leaves if f"{name}.{leaf}" in tensors}
            observed[name] = Observed(site["kind"], Statistics.from_tensors(name, found), list(site["layers"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{where}: the sites and their tensors do not fit together ({error})") from error
    return observed


def load_calibration(folder: str | Path, model: Path, description: Path | None = None) -> Calibration:
    """The calibration in `folder`, which must be of a model.

    Args:
        model, description: as of `hash_model`.

    Raises:
        FileNotFoundError: a file is missing.
        ArtifactError: a file is damaged; or the calibration is of another model, or of another checkpoint of a run.
    """
    found = Calibration.load(folder)
    if found.model_hash != hash_model(model, description):
        raise ArtifactError(f"{folder} is a calibration of another model than {model}: calibrate this one")
    return found


def hash_model(folder: Path, description: Path | None = None) -> str:
    """SHA-256, in hexadecimal, of the config.json and of every safetensors file of a model, by name and content.

    Args:
        folder: with the safetensors files. Of the checkpoint of a run, those of the weights count.
        description: the folder with the config.json; None if it is the same.
    """
    described = description or folder
    files = "*.safetensors" if described == folder else "model*.safetensors"
    digest = hashlib.sha256()
    for path in [described / "config.json", *sorted(folder.glob(files))]:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
