"""Sources that mean the same from every working directory."""

from octavo.text import absolute_source, read_text


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
    assert [absolute_source(source) for source in ("stdlib", "hf:user/name?split=test")] == [
        "stdlib",
        "hf:user/name?split=test",
    ]
    assert absolute_source("hf:mine?column=code") == f"hf:{tmp_path}/mine?column=code"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute_source("~/texts") == f"{tmp_path}/texts"
