"""How much of the library a command and a function go through; and `import octavo` is cheap and changes nothing."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import use_server
from tiny_runs import one_thread, write_text  # noqa: F401, pytest finds the fixture one_thread here

import octavo

FIXTURES = Path(__file__).parent / "fixtures" / "c1755f76"
MODULES, LINES = 60, 12_000  # of ours, that a command which computes little may import

# Commands, each list of them in a fork of a process that has imported PyTorch, which all of them do. What functions
# import on the way counts too, since the command has run.
COMMAND = """
import json, os, sys, torch
for lines in json.loads(sys.argv[1]):
    if os.fork():
        assert not os.wait()[1], lines
        continue
    from octavo_cli import main
    for line in lines:
        sys.argv = ["octavo", *line]
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
        modules = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
        ours = [path for name, path in modules.items() if name.split(".")[0] in ("octavo", "octavo_cli") and path]
        count = sum(len(open(path).readlines()) for path in ours)
        others = [n for n in ("transformers", "octavo.train.trainer", "torch._inductor.lowering") if n in modules]
        print("\\n=" + json.dumps({"modules": len(ours), "lines": count, "others": others}), flush=True)
    os._exit(0)
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
OWN = {  # commands on a model of ours, which needs none of the extras, one after another in one process
    "train": "train --steps 1 --layers 1 --width 32 --context 32 --device cpu --data TEXT --out OUT/run",
    "generate": "generate OUT/run --prompt a --count 1 --device cpu",
    "evaluate": "evaluate OUT/run --device cpu",
    "pack": "pack OUT/run OUT/packed",
    "generate from packed": "generate OUT/packed --prompt a --count 1 --device cpu",
}

LLAMA = "import torch, octavo, transformers\nmodel = transformers.LlamaForCausalLM.from_pretrained(MODEL)"
WALKS = {
    "convert": (12, LLAMA, "octavo.convert(model)"),
    "pack": (23, "from octavo.packing import pack", "pack(MODEL, OUT)"),
    "load": (16, "import octavo", "octavo.load(PACKED)"),
    "start": (
        19,
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


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command has imported when it has run."""
    places = {"RUN": FIXTURES / "run", "PACKED": FIXTURES / "packed", "OUT": tmp_path_factory.mktemp("out")}
    places["TEXT"], commands = write_text(tmp_path_factory, 300), COMMANDS | OWN
    lines = [re.sub("|".join(places), lambda place: str(places[place[0]]), line).split() for line in commands.values()]
    processes = [*([line] for line in lines[: len(COMMANDS)]), lines[len(COMMANDS) :]]
    done = subprocess.run([sys.executable, "-c", COMMAND, json.dumps(processes)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("=")]
    return dict(zip(commands, found, strict=True))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_computes_little_imports_little(name, imported):
    found = imported[name]
    assert found["others"] == []
    assert found["modules"] <= MODULES
    assert found["lines"] <= LINES


@pytest.mark.parametrize("name", OWN)
def test_a_model_of_ours_needs_no_transformers_and_no_compiler(name, imported):
    assert not {"transformers", "torch._inductor.lowering"} & set(imported[name]["others"])


def walk(before: str, call: str, places: dict[str, str], out: Path) -> None:
    """Write the distinct files of octavo in which functions are called, other than while a module is imported."""
    files, importing, root = set(), 0, f"{Path(octavo.__file__).parent}/"

    def enter(frame: Any, event: str, _: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing and code.co_filename.startswith(root):
            files.add(code.co_filename.removeprefix(root))

    names: dict[str, Any] = dict(places)
    exec(before, names)
    function = eval(f"lambda: {call}", names)
    sys.setprofile(enter)
    function()
    sys.setprofile(None)
    out.write_text("\n".join(sorted(files)))


@pytest.mark.parametrize("name", WALKS)
def test_a_function_goes_through_few_files(name, made, tmp_path, tmp_path_factory):
    most, before, call = WALKS[name]
    places = {"MODEL": made("llama"), "OUT": tmp_path / "out", "TEXT": write_text(tmp_path_factory, 300)}
    places["PACKED"] = made("llama", scheme="channel") if name == "load" else Path()
    words = {place: str(path) for place, path in places.items()}
    walked = use_server().Process(target=walk, args=(before, call, words, tmp_path / "files.txt"))
    walked.start()
    walked.join()
    assert walked.exitcode == 0
    files = (tmp_path / "files.txt").read_text().splitlines()
    assert 0 < len(files) <= most, f"{len(files)} files: {files}"


# ---- `import octavo`


LOOK = """
import json, os, random, signal, sys, warnings
calls = [0]
def count(*_):
    calls[-1] += 1
sys.setprofile(count)
import torch
sys.setprofile(None)
SET = ["TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS"]  # docs/decisions.md says why the operations set it
def state():
    return {
        "environment": {key: value for key, value in os.environ.items() if key not in SET},
        "warnings": [str(each) for each in warnings.filters],
        "hooks": [str(each) for each in (sys.excepthook, sys.displayhook, signal.getsignal(signal.SIGINT))],
        "torch": [
            torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32, torch.random.get_rng_state().sum().item(),
        ],
        "random": str(random.getstate()),
    }
before, modules = state(), set(sys.modules)
calls.append(0)
sys.setprofile(count)
import octavo
presets = len(octavo.recipe.PRESETS)  # a package is an attribute without an import of its own
octavo.convert, octavo.quantize, octavo.watch, octavo.load
sys.setprofile(None)
changed = [name for name, value in state().items() if value != before[name]]
loaded = sorted(sys.modules.keys() - modules)
found = {"changed": changed, "cuda": torch.cuda.is_initialized(), "modules": loaded, "presets": presets}
print(json.dumps(found | {"calls": calls}))
"""
# What only the command line, Hugging Face's formats, plots and FP8 competitors need.
LEFT_ALONE = (
    "transformers", "tokenizers", "datasets", "compressed_tensors", "gguf", "rich", "typer", "tensorboard",
    "matplotlib", "torch._inductor", "torch.utils.tensorboard", "octavo_cli", "octavo.train", "octavo.evaluation",
    "octavo.hf", "octavo.calibration", "octavo.packing",
)  # fmt: skip


@pytest.fixture(scope="module")
def looked() -> dict[str, Any]:
    """An import of octavo in a fresh interpreter: the changes, the modules, and Python's calls and returns."""
    return json.loads(subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True, text=True).stdout)


def test_nothing_is_changed_and_nothing_optional_is_loaded(looked):
    assert looked["changed"] == []
    assert looked["cuda"] is False
    assert [name for name in LEFT_ALONE if name in looked["modules"]] == []
    assert "octavo.nn.linear" in looked["modules"]


def test_only_public_names_are_offered_and_each_once():
    assert dir(octavo) == sorted(octavo.__all__)
    assert len(octavo.__all__) == len(set(octavo.__all__)) <= 14
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)


def test_costs_little_more_than_torch(looked):
    torch_alone, octavo_beside_it = looked["calls"]
    assert octavo_beside_it < 0.2 * torch_alone


def test_each_public_name_is_imported_from_the_module_that_type_checkers_see():
    tree = ast.parse(Path(octavo.__file__).read_text())
    for_types = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [n for n in for_types.body if isinstance(n, ast.ImportFrom) and str(n.module).startswith("octavo")]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == octavo._MODULE_OF
    assert {*seen, "load", "__version__"} == set(octavo.__all__)


def test_a_package_is_an_attribute_without_an_import_of_its_own(looked):
    assert looked["presets"] == len(octavo.recipe.PRESETS)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        octavo.quantise  # noqa: B018
