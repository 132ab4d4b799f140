"""Files of tensors that are written and read one at a time, against the safetensors library."""

import json
from pathlib import Path

import pytest
import torch
from packed_examples import small_shards
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from octavo.artifact.files import ArtifactError
from octavo.artifact.safetensors_files import (
    INDEX,
    SINGLE,
    ShardReader,
    Spec,
    create_files,
    write_part,
    write_shards,
)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    """One of each dtype, of odd sizes, a scalar and an empty one."""
    torch.manual_seed(0)
    made = {f"t{i}": (torch.rand(3, 2 * i + 1) * 4 + 1).to(dtype) for i, dtype in enumerate(DTYPES)}
    return made | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "ü.weight": torch.ones(1),
    }


def specs(found: dict[str, torch.Tensor]) -> dict[str, Spec]:
    return {name: Spec.of(t) for name, t in found.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bytes_of = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bytes_of)


def test_what_is_written_is_what_the_library_reads(tmp_path: Path) -> None:
    given = tensors()
    write_shards(tmp_path, specs(given), reversed(given.items()), {"format": "pt", "by": "us"})
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == given.keys()
    assert all(same(found[name], t) for name, t in given.items())
    with safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}
    reader = ShardReader(tmp_path)
    assert reader.specs == specs(given)
    assert all(same(reader.get(name), t) for name, t in given.items())


@pytest.mark.parametrize("limit", [1, 100, 10**6])
def test_shards_and_their_index(tmp_path: Path, limit: int) -> None:
    given = {f"layer.{i}": torch.full((5,), float(i)) for i in range(12)}
    with small_shards(limit):
        write_shards(tmp_path, specs(given), given.items(), {"format": "pt"})
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    count = {1: 12, 100: 3, 10**6: 1}[limit]
    assert files == [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == 12 * 20
        for name, file in index["weight_map"].items():
            assert same(load_file(tmp_path / file)[name], given[name])
    reader = ShardReader(tmp_path)
    assert all(same(reader.get(name), t) for name, t in given.items())


@pytest.mark.parametrize("limit", [200, 10**6])
def test_a_file_is_opened_for_its_header_and_its_data_however_many_tensors_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    given = {f"layer.{i}": torch.full((5,), float(i)) for i in range(30)}
    opened: list[Path] = []
    path_open = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r", **k: opened.append(self) or path_open(self, mode, **k))
    with small_shards(limit):
        write_shards(tmp_path, specs(given), given.items(), {"format": "pt"})
    written = [path.name for path in opened if path.suffix == ".safetensors"]
    assert sorted(written) == sorted(2 * [path.name for path in tmp_path.glob("*.safetensors")])


@pytest.mark.parametrize(
    ("come", "message"),
    [
        ({"a": torch.ones(2)}, "1 tensors did not come, b among them"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "b: .*came, .* was to come"),
        ({"a": torch.ones(2), "b": torch.ones(2).half()}, "b: .*float16.*came"),
        ({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(1)}, "c: .*came, None was to come"),
    ],
)
def test_tensors_that_were_not_announced(tmp_path: Path, come: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_shards(tmp_path, specs({"a": torch.ones(2), "b": torch.ones(2)}), come.items(), {})


def sharded(folder: Path) -> dict[str, str]:
    """Two files and an index; what the index maps."""
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    files = {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", "a\\b", ""])
def test_an_index_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    files = sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files | {"b": name}}))
    with pytest.raises(ArtifactError, match="its files must lie in the folder itself"):
        ShardReader(tmp_path)


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing, and so is model.safetensors.index.json"):
        ShardReader(tmp_path)
    sharded(tmp_path)
    assert ShardReader(tmp_path).specs.keys() == {"a", "b"}
    path = tmp_path / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="two.safetensors is truncated"):
        ShardReader(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="two.safetensors is missing"):
        ShardReader(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": []}')
    with pytest.raises(ArtifactError, match="must map tensors to files"):
        ShardReader(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ArtifactError, match=f"{name}, a pickle"):
        ShardReader(tmp_path)


def test_a_file_that_is_removed_while_it_is_read_is_named(tmp_path: Path) -> None:
    """As a run removes its older checkpoints."""
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / SINGLE)
    reader = ShardReader(tmp_path)
    reader.get("a")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ArtifactError, match=f"{SINGLE} was removed while it was read.*give the command again"):
        reader.get("b")


def test_parts_fill_a_tensor_and_are_read_from_it(tmp_path: Path) -> None:
    """Cut along each dimension, and along two, into parts of unequal size; also an empty part."""
    given = {"cube": torch.arange(7 * 5 * 6).view(7, 5, 6), "scalar": torch.tensor(3), "empty": torch.ones(0, 2)}
    places = create_files(tmp_path, "part", specs(given), {})
    parts = [((0, 0, 0), (3, 2, 6)), ((3, 0, 0), (4, 2, 6)), ((0, 2, 0), (7, 3, 5)), ((0, 2, 5), (7, 3, 1))]
    with (tmp_path / "part.safetensors").open("r+b") as file:
        for offsets, sizes in [*parts, ((7, 0, 0), (0, 5, 6))]:
            part = given["cube"][tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))]
            write_part(file, places["cube"], part, offsets)
        write_part(file, places["scalar"], given["scalar"], ())
        write_part(file, places["empty"], given["empty"], (0, 0))
    found = load_file(tmp_path / "part.safetensors")
    assert found.keys() == given.keys()
    assert all(same(found[name], t) for name, t in given.items())
    reader = ShardReader(tmp_path, "part")
    assert all(same(reader.get_part(name, [0] * t.ndim, t.shape), t) for name, t in given.items())
    assert torch.equal(reader.get_part("cube", (3, 1, 2), (2, 4, 3)), given["cube"][3:5, 1:, 2:5])
