"""The sizes that a report gives are those of the tensors in the files."""

from pathlib import Path

from tiny_models import make_model

from octavo.hf.meta_model import transformers_meta_model
from octavo.packing import pack
from octavo.verification.checks import check_folder
from octavo.verification.files import read_files
from octavo.verification.sizes import measure_sizes
from octavo.verification.streamed_model import required_by


def stored_bytes(folder: Path) -> int:
    read = read_files(folder)
    return sum(read.get(name).nbytes for name in read.shapes)


def test_sizes_of_a_folder(tmp_path: Path) -> None:
    report = pack(make_model(tmp_path / "model", "llama"), tmp_path / "out", layers={"*.o_proj": "block"})
    read = read_files(tmp_path / "out")
    sizes = measure_sizes(read, check_folder(read, required_by(transformers_meta_model(read.config, tmp_path / "out"))))
    assert (sizes.packed, sizes.packed_bf16) == (report.packed_bytes, report.bf16_bytes)
    assert sizes.whole_bf16 == stored_bytes(tmp_path / "model")
    assert sizes.whole == stored_bytes(tmp_path / "out")
