"""What a command says of the data that it read."""

import json

import pytest

from octavo.text import read_text
from octavo.text.report import show_size


@pytest.fixture
def read(tmp_path):
    """read(**files): the report of a folder that holds these files; names have `_` for the point."""

    def report(**files):
        for name, content in files.items():
            (tmp_path / name.replace("_", ".")).write_bytes(content)
        return read_text([str(tmp_path)]).report

    return report


def test_one_file(read):
    assert read(a_txt=b"x").lines() == ["read 1 file (1 byte)"]


def test_rows_are_counted_as_documents(read):
    rows = b'{"text": "a", "id": 1}\n' * 1200
    assert read(a_jsonl=rows, b_txt=b"xy").lines() == [
        "read 1201 documents from 2 files (27.6 kB); of the rows, these fields are not read: id"
    ]


def test_what_is_skipped_is_named_by_reason(read):
    latin = {f"{letter}_txt": b"\xe9" for letter in "bcde"}
    report = read(a_txt=b"x" * 999, f_txt=b"", **latin, g_png=b"\x89\0")
    assert report.lines() == [
        "read 1 file (999 bytes); skipped 6: 4 not UTF-8 (b.txt, c.txt, d.txt, ...), 1 empty (f.txt), 1 binary (g.png)"
    ]
    assert json.loads(json.dumps(report.to_dict())) == {
        "files": 1,
        "datasets": 0,
        "documents": 1,
        "bytes": 999,
        "skipped": {
            "not UTF-8": {"count": 4, "bytes": 4, "examples": ["b.txt", "c.txt", "d.txt"]},
            "empty": {"count": 1, "bytes": 0, "examples": ["f.txt"]},
            "binary": {"count": 1, "bytes": 2, "examples": ["g.png"]},
        },
        "fields_not_read": [],
    }


@pytest.mark.parametrize(("lost", "warned"), [(9, False), (10, True), (90, True)])
def test_a_substantial_share_of_the_bytes_is_a_warning(read, lost, warned):
    lines = read(a_txt=b"x" * (100 - lost), b_txt=b"\xe9" * lost).lines()
    warning = f"warning: {lost}% of the bytes were skipped ({lost} bytes): convert the files that are not UTF-8"
    assert lines[1:] == [warning] * warned


def test_sizes_are_shown_in_the_unit_that_suits_them():
    assert [show_size(size) for size in (0, 1, 999, 1000, 3_400_000, 2_000_000_000)] == [
        "0 bytes", "1 byte", "999 bytes", "1.0 kB", "3.4 MB", "2.0 GB",
    ]  # fmt: skip
