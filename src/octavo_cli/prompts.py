"""The prompts of a command: options, a file, or standard input."""

import json
import sys
from pathlib import Path
from typing import Any


def read_prompts(given: list[str] | None, file: Path | None) -> list[str]:
    """The prompts that the command line gives, or those of a file: one a line, or JSON lines with a "prompt".

    Args:
        given: the values of --prompt.
        file: that of --file; "-", or nothing where standard input is no terminal, stands for standard input.

    Raises:
        ValueError: there is no prompt, or two places name prompts, or the file is not as described above.
    """
    if given and file:
        raise ValueError("--prompt and --file both give prompts: give one of them")
    if given:
        return given
    if file is None and sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt TEXT, --file FILE, or prompts on standard input, one a line")
    if file is None or str(file) == "-":
        name, content = "standard input", sys.stdin.buffer.read()
    else:
        name = str(file)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"--file {file} cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must hold text in UTF-8, and byte {error.start} is not: convert it first") from error
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name} holds no prompt: give one a line, or --prompt TEXT")
    if not isinstance(_parse(lines[0][1]), dict):
        return [line for _, line in lines]
    return [_prompt_of(line, f"{name}, line {number}") for number, line in lines]


def _prompt_of(line: str, where: str) -> str:
    found = _parse(line)
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f'{where} must be a JSON object such as {{"prompt": "text"}}, as the first line is one')
    return prompt


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
