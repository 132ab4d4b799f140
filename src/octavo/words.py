"""Words of messages."""

from collections.abc import Sequence


def plural(count: int, noun: str) -> str:
    """`count` with its noun in the right number.

    Example:
        >>> plural(1, "linear layer"), plural(2, "linear layer")
        ('1 linear layer', '2 linear layers')
    """
    return f"{count} {noun if count == 1 else noun + 's'}"


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first names, and the number of the others.

    Example:
        >>> some_of(["q", "k", "v", "o"])
        'q, k, v and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
