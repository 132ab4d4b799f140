"""The tensors of a model folder under the names that they have in the model.

transformers renames the tensors of some models as it loads them, by its mapping (`transformers.conversion_mapping`):

    in the files   vit.encoder.layer.0.attention.attention.query.weight
    in the model   vit.layers.0.attention.q_proj.weight

Tensors that the mapping also stacks are read by `octavo.hf.experts`, and those that it splits are not read.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.artifact.files import model_tensors
from octavo.artifact.safetensors_files import ShardReader
from octavo.hf.experts import ExpertReader, transformers_names
from octavo.hf.gpt2_as_opt import open_tensors
from octavo.hf.meta_model import MetaModel
from octavo.models.decoder import Decoder


def open_model_files(folder: Path, config: Mapping[str, Any], meta_model: MetaModel) -> ShardReader:
    """The tensors in `folder` by their names in the model; a tensor that the model does not have keeps its name.

    Args:
        folder: with safetensors files.
        config: the parsed config.json of the model, as it is stored.
        meta_model: the model that it describes.

    Raises what `ShardReader` raises.
    """
    if meta_model.experts is not None:
        return ExpertReader(folder, meta_model.experts)
    reader = open_tensors(folder, config)
    if model_tensors(meta_model.model).keys() <= reader.specs.keys():
        return reader
    renamed = _model_names(meta_model.model, reader.specs)
    return reader if renamed is None else RenamedReader(reader, renamed)


def _model_names(model: Any, names: Iterable[str]) -> dict[str, str] | None:
    """The name in the model of each tensor of the files; None if the model is not of transformers, or two tensors would
    have one name."""
    if isinstance(model, Decoder):
        return None
    loading, mapping = transformers_names()
    rules = [rule for rule in mapping.get_model_conversion_mapping(model) if not hasattr(rule, "operations")]
    found = {name: loading.rename_source_key(name, rules, [])[0] for name in names}
    return found if len(set(found.values())) == len(found) else None


class RenamedReader(ShardReader):
    """The tensors of another reader under other names.

    Args:
        reader: of the files.
        names: the new name of each of its tensors.
    """

    def __init__(self, reader: ShardReader, names: Mapping[str, str]) -> None:
        self.folder, self._reader = reader.folder, reader
        self._from = {new: name for name, new in names.items()}
        self.specs = {new: reader.specs[name] for new, name in self._from.items()}

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        return self._reader.get(self._from[name])
