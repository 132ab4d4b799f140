"""How much of the library a command and a function go through: modules and lines imported, and files entered."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import one_thread, write_text  # noqa: F401, pytest finds the fixture one_thread here

FIXTURES = Path(__file__).parent / "fixtures" / "c1755f76"
MODULES, LINES = 60, 12_000  # of ours, that a command which computes little may import

# A command in a fresh process. What functions import on the way counts too, since the command has run.
COMMAND = """
import json, sys
from octavo_cli import main
sys.argv = ["octavo", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
modules = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
ours = [path for name, path in modules.items() if name.split(".")[0] in ("octavo", "octavo_cli") and path]
lines = sum(len(open(path).readlines()) for path in ours)
others = [name for name in ("transformers", "octavo.train.trainer") if name in modules]
print("\\n" + json.dumps({"modules": len(ours), "lines": lines, "others": others}))
"""
COMMANDS = {
    "report": "report RUN --html OUT/page.html",
    "plan": "plan llama-3-8b",
    "plan to serve": "plan llama-3-8b --serve",
    "compare": "compare RUN RUN",
    "doctor": "doctor",
    "inspect": "inspect PACKED",
    "formats": "formats",
}

# The distinct files of octavo in which functions are called. What runs while a module is imported does not count.
WALK = """
import sys
files, imports = set(), 0
def enter(frame, event, _):
    global imports
    code = frame.f_code
    if code.co_name == "<module>":
        imports += {"call": 1, "return": -1}.get(event, 0)
    elif event == "call" and not imports and "/octavo/" in code.co_filename:
        files.add(code.co_filename.rsplit("/octavo/")[-1])
def walk(function):
    sys.setprofile(enter)
    function()
    sys.setprofile(None)
    print("\\n" + "\\n".join(sorted(files)))
"""
LLAMA = "import torch, octavo, transformers\nmodel = transformers.LlamaForCausalLM.from_pretrained(MODEL)"
WALKS = {
    "convert": (12, LLAMA, "octavo.convert(model)"),
    "pack": (23, "from octavo.packing import pack", "pack(MODEL, OUT)"),
    "load": (16, "import octavo", "octavo.load(PACKED)"),
    "start": (
        25,
        """
from rich.console import Console
from octavo.train.config import Config
from octavo.train.trainer import start_run
settings = dict(data=(TEXT,), model=MODEL, context=32, batch=2, steps=1, warmup=0, device="cpu", out=OUT)
config, console = Config.from_dict(settings), Console(quiet=True)
""",
        "start_run(config, console)",
    ),
}


def fresh(code: str, *words: str) -> list[str]:
    """The printed lines of a fresh Python process."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_computes_little_imports_little(name, tmp_path):
    places = {"RUN": FIXTURES / "run", "PACKED": FIXTURES / "packed", "OUT": tmp_path}
    line = COMMANDS[name]
    for place, path in places.items():
        line = line.replace(place, str(path))
    found: dict[str, Any] = json.loads(fresh(COMMAND, *line.split(" "))[-1])
    assert found["others"] == []
    assert found["modules"] <= MODULES
    assert found["lines"] <= LINES


@pytest.mark.parametrize("name", WALKS)
def test_a_function_goes_through_few_files(name, made, tmp_path, tmp_path_factory):
    most, before, call = WALKS[name]
    places: dict[str, object] = {"MODEL": made("llama"), "OUT": tmp_path / "out"}
    places["TEXT"] = write_text(tmp_path_factory, 300)
    places["PACKED"] = made("llama", scheme="channel") if name == "load" else ""
    named = "\n".join(f"{place} = {str(path)!r}" for place, path in places.items())
    lines = fresh("\n".join([named, before, WALK, f"walk(lambda: {call})"]))
    files = lines[lines.index("") + 1 :]
    assert 0 < len(files) <= most, f"{len(files)} files: {files}"
