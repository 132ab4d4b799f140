"""The code that Inductor generates."""

import re


def calls(codes: list[str]) -> set[str]:
    """The operations of ours that generated code calls. (Its comments name those that were inlined.)"""
    lines = (line.partition("#")[0] for code in codes for line in code.splitlines())
    return {name for line in lines for name in re.findall(r"torch\.ops\.octavo\.(\w+)", line)}
