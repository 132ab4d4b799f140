"""Files of tensors that are written and read one at a time, against the safetensors library."""

import json
import re
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from packed_examples import small_shards
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_checkpoints import flip_bit

import octavo
from octavo.checkpoint import files as module
from octavo.checkpoint.files import INDEX, SINGLE, ArtifactError, ShardReader, is_finite, open_file, write_shards
from octavo.packing import convert_layout, unpack
from octavo.verification import verify

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint64,
    torch.uint32, torch.uint16, torch.complex64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def tensors():
    """One of each dtype, of odd sizes, a scalar and an empty one."""
    torch.manual_seed(0)
    made = {f"t{i}": (torch.rand(3, 2 * i + 1) * 4 + 1).to(dtype) for i, dtype in enumerate(DTYPES)}
    return made | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4).bfloat16(), "ü.weight": torch.ones(1)}


PAIR = {"a": torch.ones(2), "b": torch.ones(2)}


def same_specs(reader, given):
    return reader.specs.keys() == given.keys() and all(module.same_spec(t, given[n]) for n, t in reader.specs.items())


def same(a, b):
    bytes_of = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bytes_of)


def test_what_is_written_is_what_the_library_reads(tmp_path, monkeypatch):
    """The header is read once, however many tensors are read."""
    given = tensors()
    write_shards(tmp_path, given, reversed(given.items()), {"format": "pt", "by": "us"})
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == given.keys()
    assert all(same(found[name], t) for name, t in given.items())
    with safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}
    opened: list[Path] = []
    monkeypatch.setattr(module, "open_file", lambda path: opened.append(path) or open_file(path))
    reader = ShardReader(tmp_path)
    assert same_specs(reader, given)
    assert all(same(reader.get(name), t) for name, t in given.items())
    found = reader.get_all("cpu")
    assert all(same(t, given[name]) for name, t in found.items())
    assert Path("/proc/self/maps").read_text().count(f"{tmp_path / SINGLE}\n") == 1
    assert opened == [tmp_path / SINGLE]


@pytest.mark.parametrize("limit", [1, 100, 10**6])
def test_shards_and_their_index(tmp_path, monkeypatch, limit):
    """A file is opened for its header and for its data, however many tensors it holds."""
    given = {f"layer.{i}": torch.full((5,), float(i)) for i in range(12)}
    opened: list[str] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r", **k: opened.append(self.name) or real(self, mode, **k))
    with small_shards(limit):
        write_shards(tmp_path, given, given.items(), {"format": "pt"})
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    count = {1: 12, 100: 3, 10**6: 1}[limit]
    assert files == [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert sorted(name for name in opened if name != INDEX) == sorted(2 * files)
    if count > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == 12 * 20
        for name, file in index["weight_map"].items():
            assert same(load_file(tmp_path / file)[name], given[name])
    reader = ShardReader(tmp_path)
    assert all(same(reader.get(name), t) for name, t in given.items())


@pytest.mark.parametrize(
    ("come", "message"),
    [
        ({"a": torch.ones(2)}, "1 tensors did not come, b among them"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "b: .*came, .* was to come"),
        ({"a": torch.ones(2), "b": torch.ones(2).half()}, "b: .*float16.*came"),
        ({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(1)}, "c: .*came, None was to come"),
    ],
)
def test_tensors_that_were_not_announced(tmp_path, come, message):
    with pytest.raises(ValueError, match=message):
        write_shards(tmp_path, PAIR, come.items(), {})


def write_file(folder, header, data, blanks=0):
    text = json.dumps(header).encode() + b" " * blanks
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)


def sharded(folder):
    """Two files and an index; what the index maps."""
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    files = {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", "a\\b", ""])
def test_an_index_that_leads_elsewhere(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": sharded(tmp_path) | {"b": name}}))
    with pytest.raises(ArtifactError, match="its files must lie in the folder itself"):
        ShardReader(tmp_path)


def test_the_index_says_which_file_a_tensor_is_taken_from(tmp_path):
    sharded(tmp_path)
    save_file({"a": torch.full((3,), 7.0), "b": torch.ones(2), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    reader = ShardReader(tmp_path)  # two.safetensors, the last by name, has an older a
    assert same_specs(reader, PAIR)
    assert torch.equal(reader.get("a"), torch.ones(2))
    assert reader.strays == ["a"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ArtifactError, match=r"takes b from one.safetensors, which does not hold it \(1 in all\)"):
        ShardReader(tmp_path)


@pytest.mark.parametrize(("dtype", "size"), [("F4", 2), ("F6_E2M3", 3)])
def test_a_dtype_that_pytorch_does_not_have_is_named(tmp_path, dtype, size):
    write_file(tmp_path, {"a": {"dtype": dtype, "shape": [4, 1], "data_offsets": [0, size]}}, bytes(size))
    with pytest.raises(ArtifactError, match=rf"{SINGLE}: a has the dtype {dtype}, and F64, .* are read"):
        ShardReader(tmp_path)


def test_files_that_are_missing_or_broken(tmp_path):
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
def test_pickles_are_never_opened(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ArtifactError, match=f"{name}, a pickle"):
        ShardReader(tmp_path)


def test_a_file_that_is_removed_while_it_is_read_is_named(tmp_path):
    """As a run removes its older checkpoints."""
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / SINGLE)
    reader = ShardReader(tmp_path)
    reader.get("a")
    save_file({"a": torch.ones(2), "b": torch.zeros(4)}, tmp_path / SINGLE)
    with pytest.raises(ArtifactError, match=f"{SINGLE} was removed or changed while it was read"):
        reader.get("b")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ArtifactError, match=f"{SINGLE} was removed or changed while.*give the command again"):
        reader.get("b")


@pytest.mark.parametrize("blanks", range(8))
def test_tensors_that_are_not_aligned(tmp_path, blanks):
    """As other programs write them: a header of any length, and a tensor of bytes before wider ones."""
    wide, half = torch.rand(2, 2).double(), torch.ones(3).half()
    given = {"bytes": torch.arange(3, dtype=torch.uint8), "wide": wide, "half": half}
    header, data = {}, b""
    for (name, tensor), dtype in zip(given.items(), ("U8", "F64", "F16"), strict=True):
        place = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": place}
        data += tensor.numpy().tobytes()
    write_file(tmp_path, header, data, blanks)
    reader = ShardReader(tmp_path)
    assert all(same(reader.get(name), t) for name, t in given.items())


def test_parts_fill_a_tensor_and_are_read_from_it(tmp_path):
    """Cut along each dimension, and along two, into parts of unequal size; also an empty part."""
    given = {"cube": torch.arange(7 * 5 * 6).view(7, 5, 6), "scalar": torch.tensor(3), "empty": torch.ones(0, 2)}
    places = module.create_files(tmp_path, "part", given, {})
    parts = [((0, 0, 0), (3, 2, 6)), ((3, 0, 0), (4, 2, 6)), ((0, 2, 0), (7, 3, 5)), ((0, 2, 5), (7, 3, 1))]
    with (tmp_path / "part.safetensors").open("r+b") as file:
        for offsets, sizes in [*parts, ((7, 0, 0), (0, 5, 6))]:
            part = given["cube"][tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))]
            module.write_part(file, places["cube"], part, offsets)
        module.write_part(file, places["scalar"], given["scalar"], ())
        module.write_part(file, places["empty"], given["empty"], (0, 0))
    found = load_file(tmp_path / "part.safetensors")
    assert found.keys() == given.keys()
    assert all(same(found[name], t) for name, t in given.items())
    reader = ShardReader(tmp_path, "part")
    assert all(same(reader.get_part(name, [0] * t.ndim, t.shape), t) for name, t in given.items())
    assert torch.equal(reader.get_part("cube", (3, 1, 2), (2, 4, 3)), given["cube"][3:5, 1:, 2:5])


# ---- A flipped bit in a file is found by everything that reads it, and the file and the tensor are named


@pytest.fixture
def packed(made, tmp_path):
    return shutil.copytree(made("llama", scheme="channel"), tmp_path / "packed")


def test_a_packed_folder_records_the_crc_of_each_tensor(packed):
    recorded = json.loads((packed / "octavo.json").read_text())["checksums"]
    stored = load_file(packed / "model.safetensors")
    expected = {name: zlib.crc32(t.view(-1).view(torch.uint8).numpy().tobytes()) for name, t in stored.items()}
    assert {name: int(crc, 16) for name, crc in recorded.items()} == expected


def test_everything_that_reads_a_packed_folder_finds_a_flipped_bit(packed, tmp_path):
    convert_layout(packed, tmp_path / "converted", layout="modelopt")
    for folder in (packed, tmp_path / "converted"):
        name = flip_bit(folder / "model.safetensors")
        damaged = re.escape(f"{folder / 'model.safetensors'} is damaged: the bytes of {name} have the CRC-32")
        with pytest.raises(ArtifactError, match=damaged):
            octavo.load(folder)
        with pytest.raises(ArtifactError, match=damaged):
            unpack(folder, tmp_path / "out")
        (finding,) = verify(folder).findings
        assert (finding.kind, finding.where) == ("file", name)
        assert "is damaged: its bytes have the CRC-32" in finding.message


def test_a_file_that_another_program_wrote_since_is_not_judged(packed):
    tensors = load_file(packed / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    octavo.load(packed)
    report = verify(packed)
    assert report.ok
    (remark,) = report.remarks
    assert remark.startswith("model.norm.weight (1 such tensors) is not what Octavo wrote, by its checksum")


def test_parts_that_ranks_wrote_are_checked_wherever_they_are_read_whole(tmp_path):
    whole = torch.arange(48.0).view(6, 8)
    upper = whole[:4]
    parts = [[[0, 0], [4, 8], module.checksum(upper)], [[4, 0], [2, 8], "00000000"]]
    (tmp_path / "checksums.json").write_text(json.dumps({"model/w": parts}))
    module.save_tensors({"w": whole}, tmp_path / "model.safetensors", {"octavo_version": "1"})
    reader = ShardReader(tmp_path)

    assert torch.equal(reader.get_part("w", (0, 0), (4, 8)), upper)
    assert torch.equal(reader.get_part("w", (0, 0), (5, 8)), whole[:5])  # cuts the second part
    assert torch.equal(reader.get_part("w", (4, 2), (2, 2)), whole[4:, 2:4])
    for offsets, sizes in (((0, 0), (6, 8)), ((4, 0), (2, 8)), ((3, 0), (3, 8))):
        with pytest.raises(ArtifactError, match="the bytes of w have the CRC-32 .*, and 00000000 was written"):
            reader.get_part("w", offsets, sizes)
    with pytest.raises(ArtifactError, match="and 00000000 was written"):
        reader.get("w")


# ---- Checks of the numbers in tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_bad_number_is_found(dtype, bad):
    for at in (0, 4097, 9998):
        x = torch.linspace(-1, 1, 9999).to(dtype) * torch.finfo(dtype).max
        assert is_finite(x)
        x[at] = bad
        assert not is_finite(x)
    assert is_finite(torch.empty(3, 0, dtype=dtype))  # MobileBERT has such a matrix


def test_each_code_of_e4m3_and_integers():
    for code in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn):
        assert bool(is_finite(code.view(1))) == bool(code.float().isfinite())
    assert is_finite(torch.arange(5))
