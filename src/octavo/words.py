"""Words of messages."""


def plural(count: int, noun: str, many: str = "") -> str:
    """`count` with its noun in the right number.

    Args:
        count: how many.
        noun: in the singular.
        many: the plural, where it is not `noun` with an s.

    Example:
        >>> plural(1, "linear layer"), plural(2, "linear layer"), plural(0, "copy", "copies")
        ('1 linear layer', '2 linear layers', '0 copies')
    """
    return f"{count} {noun if count == 1 else many or noun + 's'}"
