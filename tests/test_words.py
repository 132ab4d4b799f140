"""One thing, two things."""

import pytest

from octavo.words import plural


@pytest.mark.parametrize(
    ("words", "text"),
    [((1, "linear layer"), "1 linear layer"), ((0, "file"), "0 files"), ((2, "file"), "2 files")],
)
def test_a_noun_has_the_number_of_its_count(words, text):
    assert plural(*words) == text
