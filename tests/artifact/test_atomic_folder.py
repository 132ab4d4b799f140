"""Folders that appear whole or not at all, tensors in safetensors files, and where a run keeps its checkpoints."""

from pathlib import Path

import pytest
import torch
from full_disk import files_of_at_most
from safetensors import safe_open

from octavo.artifact.atomic_folder import WriteError, whole_folder
from octavo.artifact.files import ArtifactError, check_match, load_tensors, save_tensors
from octavo.artifact.run import RunFolder


def listing(folder: Path) -> list[str]:
    """Everything in `folder`, hidden things too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "new parent" / "whole"
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


def test_what_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "kept").write_text("1")
    with pytest.raises(FileExistsError, match="choose another"), whole_folder(tmp_path / "whole"):
        pytest.fail("the block must not run")
    assert (tmp_path / "whole" / "kept").read_text() == "1"


def test_the_remains_of_a_killed_writer_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".whole.partial").mkdir()
    (tmp_path / ".whole.partial" / "half").write_text("1")
    with whole_folder(tmp_path / "whole") as folder:
        (folder / "a").write_text("1")
    assert listing(tmp_path) == ["whole", "whole/a"]


def test_a_write_that_the_system_refuses_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "model.safetensors").write_bytes(b"older")

    def write() -> None:
        with whole_folder(tmp_path / "step-2") as folder:
            save_tensors({"small": torch.zeros(10)}, folder / "small.safetensors")
            with files_of_at_most(65536):
                save_tensors({"large": torch.zeros(100_000)}, folder / "large.safetensors")

    with pytest.raises(WriteError, match=r"^could not write .*nothing that existed was changed"):
        write()
    assert listing(tmp_path) == ["step-1", "step-1/model.safetensors"]
    assert (tmp_path / "step-1" / "model.safetensors").read_bytes() == b"older"


def test_tensors_travel_unchanged_with_their_metadata(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "turned": torch.randn(3, 5).t(),
        "eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "count": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    save_tensors(tensors, tmp_path / "t.safetensors", {"format": "pt"})
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].double(), tensor.detach().double())
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(FileNotFoundError, match=r"t.safetensors is missing"):
        load_tensors(path)
    save_tensors({"a": torch.zeros(100)}, path)
    content = path.read_bytes()
    for damaged in (content[:-1], content[:20], b"", b"PK\x03\x04 a pickle"):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"t.safetensors is truncated or not"):
            load_tensors(path)


def test_a_mismatch_names_the_tensor() -> None:
    required = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    check_match(dict(required), required, "w")
    for found, message in (
        ({"a": required["a"]}, "w: tensor b is missing"),
        (required | {"c": torch.zeros(1)}, "w: tensor c has no place"),
        (required | {"a": torch.zeros(3, 2)}, r"w: a must have shape \[2, 3\], the file has \[3, 2\]"),
    ):
        with pytest.raises(ArtifactError, match=message):
            check_match(found, required, "w")
    with pytest.raises(ArtifactError, match="former names of octavo's GPT-2: train it again"):
        check_match({"transformer.h.0.attn.c_attn.weight": required["a"]}, {"model.decoder.w": required["a"]}, "w")


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
    for step in (100, 20, 9):
        run.checkpoint(step).mkdir()
    (tmp_path / ".step-00000200.partial").mkdir()
    assert run.newest() == run.checkpoint(100) == tmp_path / "step-00000100"
    assert run.checkpoints() == [run.checkpoint(9), run.checkpoint(20), run.checkpoint(100)]
