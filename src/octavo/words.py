"""Words of messages."""


def plural(count: int, noun: str) -> str:
    """`count` with its noun in the right number.

    Example:
        >>> plural(1, "linear layer"), plural(2, "linear layer")
        ('1 linear layer', '2 linear layers')
    """
    return f"{count} {noun if count == 1 else noun + 's'}"
