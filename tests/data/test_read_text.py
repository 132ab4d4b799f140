"""What the reader takes, what it skips, and what it refuses."""

import json
import os
import runpy
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from octavo.data import DataError, absolute_source, chat, read_text


@pytest.fixture
def tree(tmp_path):
    """Two texts, an empty file, a binary one, one in Latin-1, and what a folder leaves out."""
    files = {
        "a.txt": b"alpha\n", "sub/b.py": "beta é\n".encode(), "empty.txt": b" \n", "nul.bin": b"ab\0cd",
        "nul": b"ab\0cd", "latin.txt": b"caf\xe9", ".hidden/c.txt": b"gamma", "sub/__pycache__/d.txt": b"delta",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def fails(sources, *essentials):
    with pytest.raises(DataError) as caught:
        read_text(sources)
    for essential in essentials:
        assert str(essential) in str(caught.value)


def files(sources):
    return read_text(sources).report.files


def skipped(reading):
    return {reason: what.examples for reason, what in reading.report.skipped.items()}


# --- Files and folders


def test_a_folder_skips_what_is_not_text_and_says_why(tree):
    reading = read_text([str(tree)])
    assert reading.texts == ["alpha\n", "beta é\n"]
    assert reading.report.files == [tree / "a.txt", tree / "sub" / "b.py"]
    expected = {"empty": "empty.txt", "not UTF-8": "latin.txt", "binary": "nul", "not text by name": "nul.bin"}
    assert skipped(reading) == {reason: [name] for reason, name in expected.items()}


def test_a_model_folder_gives_no_text(tmp_path):
    names = ["tokenizer.json", "config.json", "merges.txt", "vocab.txt", "poetry.lock", "chat_template.jinja", "a.CSV"]
    for name in [*names, "model.safetensors", "README.md"]:
        (tmp_path / name).write_text(f"text of {name}")
    reading = read_text([str(tmp_path)])
    assert reading.texts == ["text of README.md"]
    assert reading.report.skipped["not text by name"].count == len(names) + 1
    assert read_text([str(tmp_path / "*")]).texts == reading.texts
    assert read_text([str(tmp_path / "merges.txt")]).texts == ["text of merges.txt"]


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_a_structured_file_that_is_named_is_an_error(tmp_path, suffix):
    (tmp_path / f"data{suffix}").write_text('{"text": "x"}')
    fails([str(tmp_path / f"data{suffix}")], f"data{suffix} holds structured data ({suffix})", ".jsonl", "hf:FOLDER")


def test_a_large_binary_file_is_not_read_whole(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 42)  # 4 TB, which no memory holds
    assert skipped(read_text([str(tmp_path)])) == {"binary": ["sparse"]}


def test_links_that_a_folder_does_not_follow_are_said(tree):
    (tree / "linked").symlink_to(tree / "sub")
    (tree / "dangling.txt").symlink_to(tree / "nowhere")
    found = skipped(read_text([str(tree)]))
    assert (found["a link to a folder"], found["not a regular file"]) == (["linked"], ["dangling.txt"])


def test_what_cannot_be_opened_is_said(tree, monkeypatch):
    opened = Path.open

    def refuse(path, *mode):
        if path.name == "a.txt":
            raise PermissionError(13, "Permission denied")
        return opened(path, *mode)

    monkeypatch.setattr(Path, "open", refuse)
    assert skipped(read_text([str(tree)]))["unreadable"] == ["a.txt"]
    fails([str(tree / "a.txt")], "a.txt cannot be read: Permission denied")


def test_each_file_is_read_once(tree, monkeypatch):
    monkeypatch.chdir(tree)
    fails(["nul", "."], "nul", "byte 2")  # of a name, although a folder leads to it too
    assert files(["sub/b.py", "a.txt", ".", "**/*.py", str(tree / "*.txt")]) == [tree / "a.txt", tree / "sub" / "b.py"]
    os.symlink(tree / "a.txt", tree / "z.txt")
    assert files([str(tree / "*.txt")]) == [tree / "a.txt"]


def test_stdlib_is_the_modules_of_the_standard_library():
    report = read_text(["stdlib"]).report
    assert Path(sysconfig.get_path("stdlib")).resolve() / "dataclasses.py" in report.files
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in report.files)


@pytest.mark.parametrize(
    ("source", "essentials"),
    [
        ("absent.txt", ["absent.txt", "no such file"]),
        ("", ["''", "no such file"]),
        ("~no.such.user/x", ["~no.such.user/x", "no such file"]),
        ("*.rs", ["*.rs", "matches none"]),
        ("sub*", ["sub*", "matches none"]),  # a glob takes files, and no folders
        ("nul", ["nul", "byte 2"]),
        ("latin.txt", ["latin.txt", "UTF-8", "byte 3 is not: convert it first"]),
        ("empty.txt", ["empty.txt", "skipped 1: 1 empty (empty.txt)"]),
        ("*.bin", ["*.bin", "skipped 1: 1 not text by name (nul.bin)"]),
        (".hidden/none", [".hidden/none"]),
    ],
)
def test_bad_sources(tree, monkeypatch, source, essentials):
    monkeypatch.chdir(tree)
    fails([source], *essentials)
    fails([str(tree / "a.txt"), "absent.txt"], "absent.txt")


def test_empty_folder_and_no_source(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    fails([str(tmp_path)], tmp_path, "hold files")
    fails([], "at least one source")


# --- Rows


def write_rows(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def test_each_row_is_a_document(tmp_path):
    rows = [{"text": "one\ntwo", "id": 3}, {"prompt": "three", "completion": "four"}, {"text": " "}]
    reading = read_text([write_rows(tmp_path / "rows.jsonl", "\ufeff" + json.dumps(rows[0]), *rows[1:])])
    assert [(document.text, document.kind) for document in reading.documents] == [("one\ntwo", "row"), ("three", "row")]
    assert skipped(reading) == {"empty": ["rows.jsonl, line 3"]}
    assert reading.report.fields == {"completion", "id"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('["x"]', "a row must be an object with text or prompt or messages, got list"),
        ('{"body": "x", "id": 1}', "got the keys body, id"),
        ('{"text": 3}', "text must be a string, got int"),
        ('{"text": "ab\\ud800"}', "text must be text; character 2 is half a surrogate pair"),
        ('{"messages": "hi"}', "messages must be a list of objects"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list of objects"),
    ],
    ids=lambda text: text[:20],
)
def test_bad_rows_name_file_and_line(tmp_path, line, message):
    write_rows(tmp_path / "bad.jsonl", {"text": "fine"}, "", line)
    fails([str(tmp_path)], "bad.jsonl, line 3", message)


def test_rows_that_are_not_utf8_are_an_error_in_a_folder_too(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    fails([str(tmp_path)], "rows.jsonl", "byte 13")


# --- Data sets


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("saved")
    messages = [[{"role": "user", "content": "hi"}]] * 3
    columns = {"text": ["one", "", "three"], "code": ["x", "y", "z"], "n": [1, 2, 3], "messages": messages}
    rows = datasets.Dataset.from_dict(columns)
    rows.save_to_disk(str(folder / "flat"))
    datasets.DatasetDict({"train": rows, "test": rows.select([2])}).save_to_disk(str(folder / "split"))
    rows.select_columns(["messages", "n"]).save_to_disk(str(folder / "chat"))
    return folder


def test_hugging_face_dataset(saved, tree):
    reading = read_text([f"hf:{saved}/flat", str(tree / "a.txt")])
    assert reading.texts == ["alpha\n", "one", "three"]
    assert [document.kind for document in reading.documents] == ["text", "row", "row"]
    assert (reading.report.datasets, reading.report.files) == (1, [tree / "a.txt"])
    assert skipped(reading) == {"empty": ["flat, row 1"]}
    assert reading.report.fields == {"code", "messages", "n"}
    assert read_text([f"hf:{saved}/split?split=test&column=code"]).texts == ["z"]


def test_a_dataset_of_conversations_goes_through_the_chat_template(saved):
    fails([f"hf:{saved}/chat"], "chat, row 0", "chat template")
    reading = read_text([f"hf:{saved}/chat"], lambda messages: messages[0]["content"])
    assert [(document.text, document.kind) for document in reading.documents] == [("hi", "chat")] * 3


@pytest.mark.parametrize(
    ("query", "essentials"),
    [
        ("flat?column=body", ["column body", "text, code, n"]),
        ("flat?column=n", ["row 0", "n must be a string", "int"]),
        ("flat?split=train", ["single"]),
        ("flat?columns=n", ["config, split and column", "columns"]),
        ("split?split=dev", ["split dev", "train, test"]),
        ("absent", ["absent", "is not a data set that the package datasets reads"]),
    ],
)
def test_bad_dataset(saved, query, essentials):
    fails([f"hf:{saved}/{query}"], *essentials)
    for source in ("hf:", "hf:?split=test"):
        fails([source], "must name a data set of the hub, or a folder: hf:NAME")


def test_a_pickle_in_a_dataset_is_not_run(tmp_path):
    """The members of a webdataset's tar are decoded by their suffix."""
    pytest.importorskip("datasets")
    member = tmp_path / "0.pth"
    member.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    (tmp_path / "set").mkdir()
    with tarfile.open(tmp_path / "set" / "a.tar", "w") as tar:
        tar.add(member, "0.pth")
    fails([f"hf:{tmp_path}/set"], "set is not a data set that the package datasets reads")


# --- What a command says of the data that it read


@pytest.fixture
def read(tmp_path):
    """read(**files): the report of a folder that holds these files; names have `_` for the point."""

    def report(**files):
        for name, content in files.items():
            (tmp_path / name.replace("_", ".")).write_bytes(content)
        return read_text([str(tmp_path)]).report

    return report


def test_what_is_skipped_is_named_by_reason(read):
    latin = {f"{letter}_txt": b"\xe9" for letter in "bcd"} | {"e_txt": "é".encode("utf-16")}
    report = read(a_txt=b"x" * 999, f_txt=b"", **latin, g_png=b"\x89\0")
    skipped = {
        "not UTF-8": {"count": 4, "bytes": 7, "examples": ["b.txt", "c.txt", "d.txt"]},
        "empty": {"count": 1, "bytes": 0, "examples": ["f.txt"]},
        "binary": {"count": 1, "bytes": 2, "examples": ["g.png"]},
    }
    counts = {"files": 1, "datasets": 0, "documents": 1, "bytes": 999, "fields_not_read": []}
    assert json.loads(json.dumps(report.to_dict())) == counts | {"skipped": skipped}


@pytest.mark.parametrize(("lost", "warned"), [(9, False), (10, True), (90, True)])
def test_a_substantial_share_of_the_bytes_is_a_warning(read, lost, warned):
    lines = read(a_txt=b"x" * (100 - lost), b_txt=b"\xe9" * lost).lines()
    warning = f"warning: {lost}% of the bytes were skipped ({lost} bytes): convert the files that are not UTF-8"
    assert lines[1:] == [warning] * warned


# --- Sources that mean the same from every working directory


def test_sources_are_the_same_from_another_directory(tmp_path, monkeypatch):
    here = tmp_path / "a[b]*"  # characters of a glob, in the name of a folder
    (here / "texts").mkdir(parents=True)
    (here / "texts" / "one.txt").write_text("one")
    (here / "texts" / "two.txt").write_text("two")
    monkeypatch.chdir(here)
    sources = ["texts", "texts/one.txt", "texts/*.txt", "../a[[]b]*/texts/t*"]
    found = [read_text([source]).texts for source in sources]
    absolute = [absolute_source(source) for source in sources]
    monkeypatch.chdir("/")
    assert [read_text([source]).texts for source in absolute] == found
    assert [absolute_source(source) for source in absolute] == absolute


def test_names_that_are_no_paths_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for source in ("stdlib", "hf:user/name?split=test"):
        assert absolute_source(source) == source
    assert absolute_source("hf:mine?column=code") == f"hf:{tmp_path}/mine?column=code"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute_source("~/texts") == f"{tmp_path}/texts"


def test_chat_is_imported_on_windows_which_has_no_such_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    runpy.run_path(chat.__file__)
