"""The source of packing: a run of `octavo train` or a Hugging Face model folder, read one tensor at a time."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.files import (
    ArtifactError,
    ShardReader,
    Spec,
    check_match,
    failing,
    is_finite,
    model_tensors,
    read_all,
    read_json,
    write_shards,
)
from octavo.checkpoint.folder import CARD, check_links, copy_description, whole_folder
from octavo.checkpoint.layouts import write_config
from octavo.checkpoint.run import RunFolder, find_model
from octavo.hf.meta_model import (
    DESCRIPTION,
    MetaModel,
    check_counts,
    fill_model,
    open_model_files,
    our_meta_model,
    transformers_meta_model,
)
from octavo.hf.stored_tensors import Conv1DReader, ExpertReader, open_tensors
from octavo.models import BUILT_IN_MODELS
from octavo.recipe import Recipe, similar_preset
from octavo.util import Progress, reading
from octavo.version import __version__


@dataclass(frozen=True, eq=False)
class Source:
    """A model whose tensors are still in its files.

    Args:
        origin: the folder with the files of tensors.
        description: the folder with its config.json and its tokenizer.
        meta_model: the model on the meta device; tensors are named as in it.
        recipe: the preset of the run, or the one most like its recipe (`octavo.recipe.similar_preset`); "" for a model
            folder.
        skip: globs of the layers that training left in BF16.
        reader: of the files.
        left_out: tensors of the files that have no place in the model.
        trained_as: the name that a layer had in training, by its name here, where the two differ.
        promoted: the layers that training moved to BF16 (`octavo.nn.selection`), and why.
    """

    origin: Path
    description: Path
    meta_model: MetaModel
    recipe: str
    skip: Sequence[str]
    reader: ShardReader
    left_out: Sequence[str] = ()
    trained_as: Mapping[str, str] = field(default_factory=dict)
    promoted: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json of the model; that of a GPT-2 of transformers as OPT's."""
        return self.meta_model.config

    def get(self, name: str) -> Tensor:
        """A tensor of the model.

        Raises:
            ArtifactError: it holds inf or NaN.
        """
        tensor = self.reader.get(name)
        if tensor.is_floating_point() and not is_finite(tensor):
            raise self._diverged(name)
        return tensor

    def get_from_file(self, name: str) -> Tensor:
        """A tensor by its name in the files, such as one matrix of one expert, which the model holds in a stack."""
        experts = self.meta_model.experts
        if isinstance(self.reader, ExpertReader):
            return self.reader.in_file(name)  # without reading the stack of all
        return self.get(name) if experts is None else experts.part(name, self.get)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """The dtype and shape of each tensor of the model in the files."""
        return {name: self.reader.specs[name] for name in model_tensors(self.meta_model.model)}

    def fill_bf16(self, device: torch.device | str = "cpu") -> Any:
        """The model with its weights, in BF16 except what transformers keeps in float32, on `device`.

        Raises:
            ArtifactError: a tensor holds inf or NaN.
        """
        place = "cpu" if isinstance(self.reader, ExpertReader) else device  # stacks need room beside their parts
        tensors = read_all(self.get_unpacked, self.specs, place)
        for name in failing({name: is_finite(t) for name, t in tensors.items() if t.is_floating_point()}):
            raise self._diverged(name)
        return fill_model(self.meta_model, tensors).to(device)

    def get_unpacked(self, name: str) -> Tensor:
        """A tensor of the model in the dtype that it has where it is not packed."""
        return self.reader.get(name).to(self.meta_model.dtypes[name])

    def _diverged(self, name: str) -> ArtifactError:
        return ArtifactError(
            f"{self.origin}: {name} holds inf or NaN: the model had diverged, take an earlier checkpoint"
        )

    def folded(self) -> dict[str, Any]:
        """The entry `folded` of octavo.json (`octavo pack --smooth`, `--rotate`): packed weights have it too."""
        path = self.description / "octavo.json"
        found = read_json(path) if path.is_file() else {}
        return {key: found[key] for key in ("folded",) if key in found}


def open_source(path: Path, step: int | None = None) -> Source:
    """Open a run or a model folder. Nothing is read but the headers of its files.

    Args:
        path: a run of `octavo train`, or a folder with a config.json and safetensors files; a GPT-2 of transformers is
            read as OPT (`octavo.hf.stored_tensors`).
        step: the checkpoint of a run; None takes the newest.

    Raises:
        FileNotFoundError, ArtifactError: the folder is not whole, not of one of these kinds, or holds pickles.
        ImportError: the model is of transformers, which is not installed.
        ValueError: a step was asked for, and the folder is no run.
    """
    described, checkpoint = find_model(path, step)
    config = read_json(path / "config.json")  # of a run: the settings of its training
    if described != path:
        return _run(RunFolder(path), config, checkpoint)
    if "quantization_config" in config:
        raise ArtifactError(f"{path} is quantized already: give the model in BF16 that it was made from")
    meta_model = transformers_meta_model(config, path)
    reader = open_model_files(path, config, meta_model)
    required = model_tensors(meta_model.model)
    stored = meta_model.split_experts({name: spec.meta() for name, spec in reader.specs.items()})
    needed = meta_model.split_experts(required)
    found = {name: tensor for name, tensor in stored.items() if name in needed}
    missing, left = sorted(needed.keys() - found.keys()), sorted(stored.keys() - found.keys())
    if missing and left:
        raise ArtifactError(
            f"{path} lacks {missing[0]} ({len(missing)} in all), and has {left[0]}, which the model lacks. "
            "transformers splits or joins tensors of some models as it loads them. If it opens this folder, save the "
            "model with the new names: model.save_pretrained(OUT, save_original_format=False)"
        )
    check_match(found, needed, f"{path} is not of the model that its config.json describes")
    left_out = sorted(reader.specs.keys() - required.keys() - meta_model.model.state_dict().keys())
    return Source(path, path, meta_model, "", (), reader, left_out)


def _run(folder: RunFolder, settings: Mapping[str, Any], checkpoint: Path) -> Source:
    config = read_json(folder.model / "config.json")
    meta_model = _meta_model(folder.model, config, settings)
    reader = open_tensors(checkpoint, config)
    found = {name: spec.meta() for name, spec in reader.specs.items()}
    check_match(found, model_tensors(meta_model.model), f"{checkpoint} is not of the model that the run describes")
    recipe, skip = settings.get("recipe", ""), settings.get("skip", ())
    if isinstance(recipe, Mapping):
        recipe = similar_preset(Recipe.from_dict(recipe))
    promoted = folder.promoted(folder.step_of(checkpoint))
    trained = reader.trained_names() if isinstance(reader, Conv1DReader) else {}
    if trained:  # the run's globs are of its own names
        skip = [ours for ours, name in trained.items() if any(fnmatchcase(name, glob) for glob in skip)]
        skip = [name for name in skip if name in meta_model.linears()]
        promoted = {ours: promoted[name] for ours, name in trained.items() if name in promoted}
    return Source(checkpoint, folder.model, meta_model, recipe, skip, reader, trained_as=trained, promoted=promoted)


def _meta_model(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> MetaModel:
    """The model as the trainer built it: a fine-tuned one is of transformers, even where the architecture is ours.

    So is a mixture, whose tensors have the names of transformers' model, and its files the names of its files.
    """
    if settings.get("model") not in BUILT_IN_MODELS or settings["model"] == "mixture":
        return transformers_meta_model(config, folder)
    check_counts(config, folder)
    with reading(folder / "config.json", DESCRIPTION, ArtifactError):
        found = our_meta_model(config)
    if found is None:
        raise ArtifactError(f"{folder / 'config.json'} must be of a {settings['model']}, the model of the run")
    return found


# ---- A model folder written from another model, one tensor at a time.


Change = Callable[[str, Tensor], Mapping[str, Tensor]]
"""(name, tensor) of the source's model -> the tensors of the new files that hold it, by their names there. A tensor on
the meta device gives tensors on the meta device."""


@dataclass(frozen=True)
class WrittenModel:
    """A folder that was written.

    Attributes:
        folder: the new folder.
        source: the folder whose tensors were read.
        left_out: tensors of the source's files that have no place in its model.
        specs: dtype and shape of every tensor of the new files.
        folder_bytes: the size of all files of the new folder.
    """

    folder: Path
    source: Path
    left_out: Sequence[str]
    specs: Mapping[str, Spec]
    folder_bytes: int


def write_model(
    source: Source,
    out: Path,
    change: Change,
    config: Mapping[str, Any],
    record: Callable[[], Mapping[str, object]],
    progress: Progress,
    doing: str,
    added: Mapping[str, Tensor] | None = None,
    card: Callable[[Mapping[str, object]], str] | None = None,
) -> WrittenModel:
    """Write the folder `out`, which appears whole or not at all.

    Args:
        source: whose tensors are read.
        out: the folder to make.
        change: from a tensor of the model to tensors of the files. It is called twice for each tensor, first on the
            meta device, which gives the headers of the files, then with the numbers.
        config: the new config.json.
        record: called when all tensors are written; octavo.json gets its entries.
        progress: called after each tensor.
        doing: the name of the work for `progress`.
        added: tensors of the files beside those of the model.
        card: makes README.md of the entries of octavo.json.

    Raises:
        FileExistsError: `out` exists.
        ArtifactError: a tensor holds inf or NaN, or a file of the source is a link out of its folder.
        WriteError: the disk refused.
    """
    for folder in {source.description, source.origin}:
        check_links(folder)
    added = added or {}
    stored = {name: tensor for key, spec in source.specs.items() for name, tensor in change(key, spec.meta()).items()}
    specs = {name: Spec.of(tensor) for name, tensor in {**added, **stored}.items()}
    digest = hashlib.sha256()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from added.items()
        for done, name in enumerate(source.specs, start=1):
            tensor = source.get(name)
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            yield from change(name, tensor).items()
            progress(done, len(source.specs), doing)

    with whole_folder(out) as partial:
        write_config(partial, config)
        copy_description(source.description, partial)
        metadata = {"format": "pt", "octavo_version": __version__, "octavo_source": source.origin.name}
        checksums = write_shards(partial, specs, tensors(), metadata)
        made = {"octavo_version": __version__, "source": source.origin.name, "source_sha256": digest.hexdigest()}
        entries = {**made, **record(), "checksums": checksums}
        (partial / "octavo.json").write_text(json.dumps(entries, indent=2) + "\n")
        if card is not None:
            (partial / CARD).write_text(card(entries), encoding="utf-8")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return WrittenModel(out, source.origin, source.left_out, specs, size)
