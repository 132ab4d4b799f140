"""Chat templates. A template is a program of the model's author, so it runs in a process of its own, with bounds.

The process is this file run as a program, which imports nothing of Octavo. It reads the template, then conversations,
and answers each with its text or an error: one JSON value a line.
"""

import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SECONDS = 60  # of computing, for one conversation
MEGABYTES = 2048  # beside those of the libraries


class ChatTemplate:
    """A tokenizer's chat template: from messages, [{"role": ..., "content": ...}, ...], to their text. With `answer`
    the text has the beginning of the answer too. It raises a ValueError if the template does not take the messages, or
    takes too long or too much memory for them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, messages: Any, *, answer: bool = False) -> str:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        request = {"conversation": messages, "add_generation_prompt": answer, "tokenize": False}
        return str(_ask(self._process, request)["text"])

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", __file__]  # -P: the modules beside this file must not hide a library's
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        weakref.finalize(self, _end, process)
        template, special = self._tokenizer.get_chat_template(), self._tokenizer.special_tokens_map
        _ask(process, {"template": template, "special": special, "seconds": SECONDS, "megabytes": MEGABYTES})
        return process


def _ask(process: "subprocess.Popen[str]", request: Any) -> dict[str, Any]:
    """The answer of the process. Raises a ValueError if it is an error, or the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended, and so has its answer
        process.stdin.write(f"{json.dumps(request, default=str)}\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        took = process.wait() == -signal.SIGPROF
        raise ValueError(f"it runs for more than {SECONDS} s" if took else f"its process ended: {process.returncode}")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def _serve() -> None:
    import resource  # Windows, which imports this file too, has no such module

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that asks
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    given = json.loads(sys.stdin.readline())
    tokenizer: Any = SimpleNamespace(
        get_chat_template=lambda *args, **kwargs: given["template"], special_tokens_map=given["special"]
    )
    with suppress(OSError, ValueError):  # outside of Linux, or below a lower limit, only its time is bounded
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + given["megabytes"] * 10**6
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, given["seconds"])  # its signal ends the process at once
        try:
            text = PreTrainedTokenizerBase.apply_chat_template(tokenizer, **json.loads(line))
            answer = json.dumps({"text": text})
        except MemoryError:
            answer = json.dumps({"error": f"it needs more than {given['megabytes']} MB"})
        except Exception as error:  # a template can raise any
            answer = json.dumps({"error": str(error) or type(error).__name__})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    _serve()
