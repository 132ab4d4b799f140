"""One thing, two things."""

import pytest

from octavo.util import plural, some_of


@pytest.mark.parametrize(
    ("words", "text"),
    [((1, "linear layer"), "1 linear layer"), ((0, "file"), "0 files"), ((2, "file"), "2 files")],
)
def test_a_noun_has_the_number_of_its_count(words, text):
    assert plural(*words) == text


@pytest.mark.parametrize(("names", "text"), [("", ""), ("abc", "a, b, c"), ("abcde", "a, b, c and 2 more")])
def test_the_first_of_many_names(names, text):
    assert some_of(list(names)) == text
