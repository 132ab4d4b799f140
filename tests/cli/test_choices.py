"""The names that help texts list are the library's."""

from octavo import FORMATS
from octavo.artifact.packed import LAYOUTS
from octavo.artifact.scheme import SCHEMES
from octavo.serve.gguf import WEIGHTS
from octavo.train.config import describe
from octavo_cli import choices


def test_help_lists_what_the_library_takes():
    assert tuple(FORMATS) == choices.FORMATS
    assert tuple(WEIGHTS) == choices.GGUF_WEIGHTS
    assert tuple(LAYOUTS) == choices.LAYOUTS
    assert tuple(SCHEMES) == choices.SCHEMES
    assert tuple(name.replace("_", "-") for name, *_ in describe()) == choices.SETTINGS
