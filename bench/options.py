"""Options of a benchmark on its command line."""

import sys


def option(name: str, default: str) -> str:
    """The word after `name`, or the default."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
