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

from octavo.checkpoint import files
from octavo.checkpoint import folder as folders
from octavo.checkpoint.files import ArtifactError, ShardReader, check_match, is_finite, model_tensors, read_json
from octavo.checkpoint.folder import BUILT_IN_MODELS, CARD, RunFolder
from octavo.checkpoint.layouts import UNQUANTIZED_DTYPE, read_config, write_config
from octavo.hf.meta_model import MetaModel, fill_model, open_model_files, read_meta_model, transformers_meta_model
from octavo.hf.stored_tensors import AdaptedReader, Conv1DReader, ExpertReader, open_tensors
from octavo.recipe import Recipe, similar_preset
from octavo.util import Progress
from octavo.version import __version__


@dataclass(frozen=True, eq=False)
class Source:
    """A model whose tensors, named as in `meta_model`, are still in its files."""

    origin: Path  # the folder with the files of tensors
    description: Path  # the folder with its config.json and its tokenizer
    meta_model: MetaModel
    recipe: str  # the preset of the run, or the one most like its recipe; "" for a model folder
    skip: Sequence[str]  # globs of the layers that training left in BF16
    reader: ShardReader
    left_out: Sequence[str] = ()  # tensors of the files that have no place in the model
    trained_as: Mapping[str, str] = field(default_factory=dict)  # the names of layers in training, where they differ
    promoted: Mapping[str, str] = field(default_factory=dict)  # the layers that training moved to BF16, and why

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json of the model; that of a GPT-2 of transformers as OPT's."""
        return self.meta_model.config

    def get(self, name: str) -> Tensor:
        """A tensor of the model. An ArtifactError if it holds inf or NaN."""
        tensor = self.read(name)
        if tensor.is_floating_point() and not is_finite(tensor):
            raise self._diverged(name)
        return tensor

    def read(self, name: str) -> Tensor:
        """A tensor as the files have it. In a buffer, such as a mask, the least float32 becomes the least of BF16."""
        tensor, narrow = self.reader.get(name), torch.finfo(UNQUANTIZED_DTYPE)
        of_buffer = name in self._buffers and tensor.is_floating_point()
        return tensor.clamp(narrow.min, narrow.max).where(tensor.isfinite(), tensor) if of_buffer else tensor

    @cached_property
    def _buffers(self) -> set[str]:
        return {name for name, _ in self.meta_model.model.named_buffers()}

    def get_from_file(self, name: str) -> Tensor:
        """A tensor by its name in the files, such as one matrix of one expert, which the model holds in a stack."""
        if isinstance(self.reader, ExpertReader) and name not in self.specs:
            return self.reader.in_file(name)  # without reading the stack of all
        return self.meta_model.experts.part(name, self.get)

    def update_of(self, layer: str) -> tuple[Tensor, Tensor] | None:
        """The weight of a layer before its adapters are merged, and what they add to it in float32; None without."""
        name = f"{layer}.weight"
        if not isinstance(self.reader, AdaptedReader) or (update := self.reader.update(name)) is None:
            return None
        return self.reader.base.get(name).float(), update

    @cached_property
    def specs(self) -> dict[str, Tensor]:
        """A tensor on the meta device for each of the model, with the dtype that it has in the files."""
        return {name: self.reader.specs[name] for name in model_tensors(self.meta_model.model)}

    def fill_bf16(self, device: torch.device | str = "cpu") -> Any:
        """The model with its weights on `device`, each in the dtype that it has where it is not packed. An
        ArtifactError if one holds inf or NaN."""
        place = "cpu" if isinstance(self.reader, ExpertReader) else device  # stacks need room beside their parts
        dtypes = self.meta_model.dtypes
        tensors = files.read_all(lambda name: self.read(name).to(dtypes[name]), self.specs, place)
        for name in files.failing({name: is_finite(t) for name, t in tensors.items() if t.is_floating_point()}):
            raise self._diverged(name)
        return fill_model(self.meta_model, tensors).to(device)

    def _diverged(self, name: str) -> ArtifactError:
        return ArtifactError(f"{self.origin}: {name} holds inf or NaN: the model diverged, take an earlier checkpoint")

    def folded(self) -> dict[str, Any]:
        """The entry `folded` of octavo.json (`octavo pack --smooth`, `--rotate`): packed weights have it too."""
        found = files.read_record(self.description)
        return {key: found[key] for key in ("folded",) if key in found}


def open_source(path: Path, step: int | None = None) -> Source:
    """Open a run of `octavo train` (None takes the newest checkpoint) or a model folder, of which a GPT-2 is read as
    OPT. Nothing is read but the headers of its files. An ArtifactError or a FileNotFoundError if the folder is neither,
    or not whole; a ValueError for the step of a folder that is no run."""
    described, checkpoint = folders.find_model(path, step)
    config = read_json(path / "config.json")  # of a run: the settings of its training
    if described != path:
        return _run(RunFolder(path), config, checkpoint)
    if config.get("quantization_config") is not None:
        raise ArtifactError(f"{path} is quantized already: give the model in BF16 that it was made from")
    meta_model = transformers_meta_model(config, path)
    reader = open_model_files(path, config, meta_model)
    required = model_tensors(meta_model.model)
    stored = meta_model.experts.split(reader.specs)
    needed = meta_model.experts.split(required)
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
    # A fine-tuned model is of transformers, even where its architecture is ours.
    describe = read_meta_model if settings.get("model") in BUILT_IN_MODELS else transformers_meta_model
    meta_model = describe(config, folder.model)
    if settings.get("lora"):
        base = Path(settings["model"])
        folders.check_config(base, f"the model that the adapters of {folder.path} were trained around")
        reader: ShardReader = AdaptedReader(open_model_files(base, read_config(base), meta_model), checkpoint)
    else:
        reader = open_tensors(checkpoint, config)
    check_match(reader.specs, model_tensors(meta_model.model), f"{checkpoint} is not of the model of the run")
    recipe, skip = settings.get("recipe", ""), settings.get("skip", ())
    if isinstance(recipe, Mapping):
        recipe = similar_preset(Recipe.from_dict(recipe))
    found = folder.promoted(folder.step_of(checkpoint))
    promoted = {name.removesuffix(".base_layer"): why for name, why in found.items()}  # of a layer in adapters
    trained = reader.trained_names() if isinstance(reader, Conv1DReader) else {}
    if trained:  # the run's globs are of its own names
        skip = [ours for ours, name in trained.items() if any(fnmatchcase(name, glob) for glob in skip)]
        skip = [name for name in skip if name in meta_model.linears()]
        promoted = {ours: promoted[name] for ours, name in trained.items() if name in promoted}
    return Source(checkpoint, folder.model, meta_model, recipe, skip, reader, trained_as=trained, promoted=promoted)


# ---- A model folder written from another model, one tensor at a time.


Change = Callable[[str, Tensor], Mapping[str, Tensor]]
"""(name, tensor) of the source's model -> the tensors of the new files that hold it, by their names there. A tensor on
the meta device gives tensors on the meta device."""


@dataclass(frozen=True)
class WrittenModel:
    """A folder that was written."""

    folder: Path
    source: Path  # the folder whose tensors were read
    left_out: Sequence[str]  # tensors of the source's files that have no place in its model
    specs: Mapping[str, Tensor]  # of every tensor of the new files, without its data
    folder_bytes: int  # of all files of the new folder


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
    """Write the folder `out`, which appears whole or not at all, with the new `config` as its config.json.

    `change` is called twice for each tensor: first on the meta device, which gives the headers of the files, then with
    the numbers. `record` is called when all tensors are written, and gives the entries of octavo.json, of which `card`
    makes README.md. `added` are tensors of the files beside those of the model. `doing` names the work for `progress`.

    An ArtifactError if a tensor holds inf or NaN, before or after its change, or a file of the source is a link out of
    its folder.
    """
    folders.check_links(source.origin)  # `copy_description` checks the other folder
    added = added or {}
    stored = {name: tensor for key, spec in source.specs.items() for name, tensor in change(key, spec).items()}
    specs = {**added, **stored}
    digest = hashlib.sha256()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from added.items()
        for done, name in enumerate(source.specs, start=1):
            tensor = source.get(name)
            digest.update(files.bytes_of(tensor.contiguous()))
            for new, changed in change(name, tensor).items():
                if changed is not tensor and changed.dtype in files.WIDE and not is_finite(changed):
                    said = f"{name} has numbers beyond the range of {changed.dtype}, in which {new} is written"
                    raise ArtifactError(f"{source.origin}: {said}: make them smaller, or fold with --scheme fp32")
                yield new, changed
            progress(done, len(source.specs), doing)

    with folders.whole_folder(out) as partial:
        write_config(partial, {key: v for key, v in config.items() if key != "torch_dtype"})  # an older name of dtype
        folders.copy_description(source.description, partial)
        metadata = {"format": "pt", "octavo_version": __version__, "octavo_source": source.origin.name}
        checksums = files.write_shards(partial, specs, tensors(), metadata)
        made = {"octavo_version": __version__, "source": source.origin.name, "source_sha256": digest.hexdigest()}
        entries = {**made, **record(), "checksums": checksums}
        (partial / files.RECORD).write_text(json.dumps(entries, indent=2) + "\n")
        if card is not None:
            (partial / CARD).write_text(card(entries), encoding="utf-8")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return WrittenModel(out, source.origin, source.left_out, specs, size)
