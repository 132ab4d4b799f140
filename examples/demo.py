"""The main job from end to end, as a user would type it: `make demo`.

Doctor; a small Llama on the text of Python's standard library, trained in BF16 and in FP8 from the same seed and on the
same batches; both runs compared; the FP8 model packed, and its loss; text generated from the packed bytes.
"""

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

RUNS = Path("runs/demo")
SETTINGS = ["--steps", "200", "--evaluate-every", "50", "--evaluate-batches", "24", "--log-every", "25"]


def main() -> None:
    began = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    bf16, fp8, packed = (str(RUNS / name) for name in ("bf16", "rowwise", "packed"))
    octavo("doctor")
    for recipe, run in (("bf16", bf16), ("rowwise", fp8)):
        octavo("train", "--recipe", recipe, "--out", run, *SETTINGS)
    octavo("compare", bf16, fp8)
    octavo("pack", fp8, packed)
    octavo("evaluate", fp8)
    octavo("evaluate", packed, "--held-out", fp8)
    octavo("generate", packed, "--prompt", "    def ", "--count", "240", "--seed", "1")
    print(f"\nthe whole demo took {time.perf_counter() - began:.0f} s")


def octavo(*arguments: str) -> None:
    """Run a command of octavo in a process of its own, shown as one would type it."""
    print(f"\n$ octavo {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "octavo", *arguments], check=True)


if __name__ == "__main__":
    main()
