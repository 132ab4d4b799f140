"""Errors met while a file of the user is read name it; others stay what they are."""

import pytest

from octavo.checkpoint.files import ArtifactError
from octavo.util import check_kinds, parse_object, reading


class PanicException(BaseException):
    """As pyo3 raises it where a parser in Rust fails."""


@pytest.mark.parametrize(
    ("fault", "essential"),
    [
        (KeyError("nope"), "KeyError: 'nope'"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (TypeError("a\n  b"), "TypeError: a b"),
        (ValueError("no such type"), "no such type"),
        (OSError(36, "File name too long"), "File name too long"),
        (RecursionError("maximum depth"), "it is nested too deeply"),
        (PanicException("regex"), "PanicException: regex"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_a_fault_in_a_file_names_it(fault, essential):
    def read():
        with reading("model/config.json", "the description of a model", ArtifactError):
            raise fault

    with pytest.raises(ArtifactError) as caught:
        read()
    assert str(caught.value) == f"model/config.json is not the description of a model ({essential})"
    assert caught.value.__cause__ is fault


@pytest.mark.parametrize(
    "fault",
    [
        ValueError("model/config.json: heads must be 1 or more"),
        FileNotFoundError(2, "No such file", "model/config.json"),
        ImportError("transformers is needed"),
        MemoryError(),
        KeyboardInterrupt(),
        SystemExit(),
    ],
)
def test_what_names_the_file_or_is_no_fault_of_it_is_raised_as_it_is(fault):
    def read():
        with reading("model/config.json", "the description of a model"):
            raise fault

    with pytest.raises(type(fault)) as caught:
        read()
    assert caught.value is fault


@pytest.mark.parametrize("form", ["JSON", "TOML"])
def test_damaged_text_is_refused_and_a_byte_order_mark_is_not(form):
    text, deep = {"JSON": ('{"a": 1}', "[" * 100_000), "TOML": ("a = 1", "a = " + "[" * 100_000)}[form]
    for given in (text, text.encode(), text.encode("utf-8-sig")):
        assert parse_object(given, "f", toml=form == "TOML") == {"a": 1}
    for damaged in (b"{", b"\xff", deep.encode()):
        with pytest.raises(ArtifactError, match=rf"^f is not valid {form} \(.+\)$"):
            parse_object(damaged, "f", ArtifactError, toml=form == "TOML")


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "shown"),
    [
        (int, [0, 10**30], [True, 1.0, "1", None], "a whole number"),
        (float, [0, 1.5, float("nan")], [False, "1", None], "a number"),
        (bool, [True], [1, None], str(bool)),
        (float | None, [None, 1], ["x", [None]], "a number or null"),
        (dict[str, str], [{}, {"a": "b"}], [{"a": 1}, [], None], "an object"),
    ],
)
def test_each_value_is_of_its_kind(kind, right, wrong, shown):
    for value in right:
        check_kinds({"a": value, "b": 3}, {"a": kind})
    for value in wrong:
        with pytest.raises(ArtifactError) as caught:
            check_kinds({"a": value}, {"a": kind}, "f: ", ArtifactError)
        assert str(caught.value) == f"f: a must be {shown}, got {value!r}"
