"""Folders that appear whole or not at all, their locks, and the files of a model folder that are copied to another."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from full_disk import files_of_at_most

from octavo.checkpoint import folder as folders
from octavo.checkpoint.files import ArtifactError, load_tensors, save_tensors
from octavo.checkpoint.folder import LockedError, RunFolder, WriteError, check_absent, locked_folder, whole_folder
from octavo.packing import convert_layout, pack, unpack
from octavo.packing.gguf_export import export_gguf
from octavo.packing.transforms import fold
from octavo.train.config import Config
from octavo.train.trainer import settle


def listing(folder: Path) -> list[str]:
    """Everything in `folder`, hidden things too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "new parent" / "whole"
    (target.parent / ".whole.partial").mkdir(parents=True)  # what a killed writer left
    (target.parent / ".whole.partial" / "half").write_text("1")
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("2")
        assert not target.exists()
    assert listing(tmp_path / "new parent") == ["whole", "whole/a", "whole/sub", "whole/sub/b"]


@pytest.mark.parametrize(("raised", "seen"), [(KeyError("k"), KeyError), (OSError(28, "No space left"), WriteError)])
def test_an_error_leaves_nothing(tmp_path: Path, raised: Exception, seen: type[Exception]) -> None:
    def fail() -> None:
        with whole_folder(tmp_path / "whole") as folder:
            (folder / "a").write_text("1")
            raise raised

    with pytest.raises(seen):
        fail()
    assert listing(tmp_path) == []


NOT_UTF8 = "r\udcfcn"  # how Python spells the byte FC in a name


@pytest.mark.parametrize("where", ["name", "parent", "working directory"])
def test_a_path_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch, where: str) -> None:
    (tmp_path / NOT_UTF8).mkdir()
    monkeypatch.chdir(tmp_path / NOT_UTF8)
    target = {"name": tmp_path / f"b{NOT_UTF8}", "parent": tmp_path / NOT_UTF8 / "a", "working directory": Path("a")}
    with pytest.raises(ValueError, match="must be a path in UTF-8, .* rename it"), whole_folder(target[where]):
        pytest.fail("the block must not run")
    with pytest.raises(ValueError, match="must be a path in UTF-8"):
        check_absent(target[where])
    with pytest.raises(ValueError, match="must be a path in UTF-8"), locked_folder(target[where]):
        pytest.fail("the block must not run")
    assert listing(tmp_path) == [NOT_UTF8]


def test_a_file_whose_path_is_not_utf8_is_not_called_damaged(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    path = (tmp_path / "a.safetensors").rename(tmp_path / f"{NOT_UTF8}.safetensors")
    with pytest.raises(ValueError, match="must be a path in UTF-8") as error:
        load_tensors(path)
    assert not isinstance(error.value, ArtifactError)


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 400 GB, of which PyTorch and safetensors say either of these, and one without permission."""
    save_tensors({"a": torch.zeros(100)}, tmp_path / "t.safetensors")
    errors = (RuntimeError("unable to mmap 40090 bytes"), OSError("Cannot allocate memory"), PermissionError("denied"))
    for where, error in zip(("octavo.checkpoint.files.safe_open",) * 2 + ("pathlib.Path.open",), errors, strict=True):
        monkeypatch.setattr(where, Mock(side_effect=error))
        with pytest.raises(OSError, match=rf"t.safetensors cannot be opened: {re.escape(str(error))}"):
            load_tensors(tmp_path / "t.safetensors")


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(ArtifactError, match="no run of octavo train"):
        run.newest()
    run.config.write_text("{}")
    with pytest.raises(ArtifactError, match="is a model folder, not a run of octavo train: give the folder that"):
        run.newest()
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no checkpoint"):
        run.newest()
    others = (".step-00000200.partial", "step-abc1", "step-12", "step-00000008.old7")
    for name in ("step-00000100", "step-00000020", "step-100000000", *others):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").write_text("a file")
    assert run.checkpoints() == [run.checkpoint(20), run.checkpoint(100), run.checkpoint(10**8)]
    assert run.newest() == run.checkpoint(10**8) == tmp_path / "step-100000000"


# ---- One writer a folder, and a second one loses nothing


HOLD = """
import sys
from pathlib import Path
from octavo.checkpoint.folder import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_is_told_who_the_first_one_is(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError) as caught, locked_folder(tmp_path / "run"):
            pytest.fail("the block must not run")
        said = rf"{tmp_path}/run is in use: process {holder.pid} on \S+ \(-c {tmp_path}/run\), since \d{{4}}-\d\d-\d\d "
        assert re.match(said, str(caught.value)), caught.value
        with pytest.raises(LockedError, match=f"process {holder.pid}"):
            check_absent(tmp_path / "new" / ".." / "run")
        holder.kill()
        holder.wait()
    assert (tmp_path / ".run.lock").exists()
    check_absent(tmp_path / "run")
    with locked_folder(tmp_path / "run"):  # what a killed program leaves behind locks nothing
        assert json.loads((tmp_path / ".run.lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_many_writers_take_turns(tmp_path):
    """The file is removed at the end of each turn: a writer that opened it just before must not think it holds it."""
    inside, most, failures = 0, 0, 0

    def work():
        nonlocal inside, most, failures
        for _ in range(50):
            try:
                with locked_folder(tmp_path / "run"):
                    inside += 1
                    most = max(most, inside)
                    inside -= 1
            except LockedError:
                failures += 1

    with ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(work) for _ in range(4)]:
            call.result()
    assert (most, inside) == (1, 0)
    assert failures < 200


def test_a_place_that_cannot_be_written_is_not_called_full(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="a part of that path is a file"), whole_folder(tmp_path / "file/new"):
        pytest.fail("the block must not run")
    for error, reason, other in (
        (OSError(30, "Read-only file system"), "cannot be written", "MB"),
        (PermissionError(13, "Permission denied"), "choose another", "make room"),
        (OSError(28, "No space left on device"), "MB are free there): make room", "other"),
        (OSError(5, "Input/output error"), "Input/output error", "MB"),
    ):
        said = str(folders.write_error(tmp_path / "a/b", error))
        assert reason in said
        assert other not in said
    for error in (OSError(27, "File too large"), OSError("8704 requested and 2432 written")):
        with files_of_at_most(512):
            said = str(folders.write_error(tmp_path / "a/b", error))
        assert "a/b: File too large: raise the limit of this shell (ulimit -f); nothing" in said


# ---- What is copied beside a model: whole folders of sentence-transformers among it


LICENSES = ("LICENSE", "LICENCE.md", "USE_POLICY.md", "Notice", "LICENSE-APACHE-2.0", "COPYING", "Terms_of_Use.pdf")
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
        "onnx/model.onnx": "another form of the weights", "license.py": "code",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        **dict.fromkeys(LICENSES, "the licence requires that it goes with the weights"),
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
    folders.copy_description(source, target)
    assert names(target) == {
        "modules.json", "sentence_bert_config.json", "vocab.txt", "1_Pooling/config.json", "2_Dense/config.json",
        "2_Dense/model.safetensors", "additional_chat_templates/tool_use.jinja", *LICENSES,
    }  # fmt: skip
    assert all((target / name).read_text() == (source / name).read_text() for name in names(target))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("{", "is not a list of modules"),
        ("3", "is not a list of modules"),
        ('[{"idx": 0}]', "is not a list of modules, each with a path"),
        ('[{"path": "../secret"}]', "names '../secret': the folders of modules must lie in the folder itself"),
        ('[{"path": "/etc"}]', "must lie in the folder itself"),
    ],
)
def test_modules_that_are_wrong(source: Path, modules: str, message: str) -> None:
    (source / "modules.json").write_text(modules)
    with pytest.raises(ArtifactError, match=message):
        folders.copy_description(source, source.with_name("target"))


def test_a_module_without_settings_needs_no_folder_and_one_in_a_pickle_is_refused(source: Path) -> None:
    shutil.rmtree(source / "1_Pooling")
    folders.copy_description(source, source.with_name("target"))
    assert not (source.with_name("target") / "1_Pooling").exists()
    (source / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"pytorch_model.bin is a pickle, .* save the model with safetensors"):
        folders.copy_description(source, source.with_name("target"))


LINKS = {  # a link in the folder -> where it leads
    **dict.fromkeys(["LICENSE", "notes.txt", "tokenizer.json", "config.json", "model.safetensors"], "../secret/key"),
    "README.md": "../secret/key", "vocab.txt": "modules.json/../../secret/key", "chat.jinja": "../secret",
    "1_Pooling": "../secret", "2_Dense/notes": "../../secret/key", "2_Dense/more": "../../secret",
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_folder_is_refused(source: Path, name: str) -> None:
    (source.with_name("secret")).mkdir()
    (source.with_name("secret") / "key").write_text("private")
    shutil.rmtree(source / name) if (source / name).is_dir() else (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(LINKS[name])
    copied = source.with_name("target")
    with pytest.raises(ArtifactError, match=f"{name} must be a file of the folder itself; it is a link to .*secret"):
        folders.read_card(source) if name == "README.md" else folders.copy_description(source, copied)


def test_links_within_the_folder_and_to_the_blobs_of_a_snapshot(source: Path, tmp_path: Path) -> None:
    """The cache of the hub has models--ORG--NAME/blobs/HASH, and snapshots/COMMIT with links to them."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
        shutil.copyfile(path, blobs / str(number))
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    (snapshot / "merges.txt").symlink_to("vocab.txt")
    (tmp_path / "model").symlink_to(snapshot)
    folders.copy_description(tmp_path / "model", source.with_name("target"))
    target = source.with_name("target")
    assert (target / "merges.txt").read_text() == "a"
    assert (target / "1_Pooling" / "config.json").read_text() == '{"pooling_mode": "mean"}'
    assert not any(path.is_symlink() for path in target.rglob("*"))
    shutil.rmtree(blobs)
    blobs.symlink_to(source.with_name("secret"))  # a folder that only looks like the cache
    with pytest.raises(ArtifactError, match="it is a link to .*secret"):
        folders.copy_description(tmp_path / "model", target)


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "pack": pack,
    "fold": lambda model, out: fold(model, out, rotate=True),
    "export-gguf": export_gguf,
    "unpack": unpack,
    "convert-layout": convert_layout,
    "train": lambda model, out: settle(Config(model=str(model), out=str(out))),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_command_that_writes_a_model_refuses_such_a_link(made: Callable[..., Path], tmp_path: Path, name: str):
    packed = name in ("unpack", "convert-layout")
    model = shutil.copytree(made("llama", scheme="channel") if packed else made("llama"), tmp_path / "model")
    (tmp_path / "key").write_text("private")
    (model / "notes.txt").symlink_to("../key")
    with pytest.raises(ArtifactError, match="notes.txt must be a file of the folder itself"):
        WRITERS[name](model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
