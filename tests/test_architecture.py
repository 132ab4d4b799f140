"""The rules of the architecture: which package may import which, and where imports stand.

Each line below names packages and modules of `octavo` that may import those of the lines before it, and nothing else.

The command line is a package of its own, `octavo_cli`, so that `octavo --help` needs no PyTorch: its files import what
needs it inside functions only, and of `octavo` only `python -m octavo` imports it.
"""

import ast
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
import sizes

import octavo

ROOT = Path(octavo.__file__).parent
COMMANDS = ROOT.with_name("octavo_cli")
LAYERS = [
    {"version", "util", "architectures"},
    {"data"},
    {"numerics"},
    {"recipe"},
    {"ops"},
    {"checkpoint"},
    {"rates"},
    {"tracing", "observation"},
    {"nn", "tensor"},
    {"scales"},
    {"distributed", "inspection"},
    {"models"},
    {"watching"},
    {"evaluation", "hf"},
    {"comparison"},
    {"calibration"},
    {"inference"},
    {"packing", "verification"},
    {"rl"},
    {"integrations"},
    {"train"},
    {"plan"},
    {"bisection"},
    {"report"},
    {"speed"},
    {""},  # octavo/__init__.py
    {"__main__"},
]
RANK = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
PACKAGES = {module_name(path) for path in ROOT.rglob("__init__.py")}
COMMAND_SOURCES = {module_name(path): path.read_text() for path in sorted(COMMANDS.rglob("*.py"))}
ALL_SOURCES = SOURCES | COMMAND_SOURCES


parse = cache(ast.parse)  # of a source; several rules look at each


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


class Import(NamedTuple):
    """Of a module, or of a name from it; `hidden` in a function, or `for_types`, below `if TYPE_CHECKING`."""

    module: str
    name: str
    hidden: bool
    for_types: bool


@cache
def imports_in(source: str) -> list[Import]:
    found: list[Import] = []
    waiting: list[tuple[ast.AST, bool, bool]] = [(parse(source), False, False)]
    while waiting:
        node, hidden, for_types = waiting.pop()
        if isinstance(node, ast.Import):
            found += [Import(alias.name, "", hidden, for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [Import(node.module or "", alias.name, hidden, for_types) for alias in node.names]
        hidden |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_types |= isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        waiting += [(child, hidden, for_types) for child in ast.iter_child_nodes(node)]
    return found


def imports_of(source: str, modules: set[str], *, hidden: bool = False) -> set[str]:
    """The modules of ours that a source imports, or hides; `from octavo.a import b` is octavo.a.b where that is one."""
    every = [each for each in imports_in(source) if each.module.split(".")[0] == "octavo"]
    names = {(each.module, f"{each.module}.{each.name}") for each in every if each.hidden or not hidden}
    return {below if below in modules else module for module, below in names}


def names_from(source: str, module: str) -> set[str]:
    """What `from module import ...` names, in any place."""
    return {each.name for each in imports_in(source) if each.module == module}


def loaded_at_import(source: str) -> set[str]:
    """The packages that importing a file of this source imports: neither in a function nor for a type checker alone."""
    return {each.module.split(".")[0] for each in imports_in(source) if not each.hidden and not each.for_types}


@cache
def imports() -> dict[str, set[str]]:
    """What each module of `octavo` imports of ours; parsed by the first test that asks, not at import."""
    return {name: imports_of(source, set(SOURCES)) for name, source in SOURCES.items()}


def upward(module: str, imports: set[str]) -> set[str]:
    """The imports that do not run downward, or stay in the package."""
    package = package_of(module)
    return {name for name in imports if package_of(name) != package and RANK[package_of(name)] >= RANK[package]}


def reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    """The module and all modules that it imports, directly or through others."""
    found: set[str] = set()
    waiting = {module}
    while waiting:
        found |= waiting
        waiting = {name for known in waiting for name in graph[known]} - found
    return found


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


REFERENCE = {f"octavo.verification.{module}" for module in ("stored_files", "layer_spec", "checks")}
KERNELS = {name for name in SOURCES if name.startswith("octavo.ops.kernels.")}
# An operation's file has its checks, its reference and the registered function. What operations and kernels both
# import registers, launches and chooses, and holds constants, but computes nothing; the tiles are of kernels alone.
SHARED = {"octavo.ops.launching", "octavo.ops.registration", "octavo.ops.library_gemms"}
TILES = {"octavo.ops.attention_tiles"}
OPERATIONS = {
    name
    for name in SOURCES.keys() - KERNELS - SHARED - TILES - {"octavo.ops.dispatch", "octavo.ops.kernels"}
    if name.startswith("octavo.ops.")
}


def broken(rule: Callable[[str], Iterable[object]], modules: Iterable[str]) -> dict[str, object]:
    """The modules that break a rule, with what `rule(module)` finds there; a rule that holds finds nothing."""
    return {name: found for name in modules if (found := list(rule(name)))}


def test_every_package_has_its_layer():
    assert {package_of(name) for name in SOURCES} <= RANK.keys()
    assert {"octavo.numerics.scaling", "octavo.ops.gemm", "octavo"} <= SOURCES.keys()
    assert "octavo.numerics.formats" in imports()["octavo.numerics.scaling"]


def test_imports_run_downward():
    assert broken(lambda name: upward(name, imports()[name]), SOURCES) == {}


def test_the_command_line_loads_pytorch_inside_functions_only():
    slow = {"torch", "numpy", "safetensors", "transformers"}
    assert broken(lambda name: loaded_at_import(COMMAND_SOURCES[name]) & slow, COMMAND_SOURCES) == {}


def test_octavo_never_imports_its_command_line():
    assert [name for name, source in SOURCES.items() if "octavo_cli" in source] == ["octavo.__main__"]


def test_there_are_no_cycles():
    # What a package's __init__ gathers is imported with it: `from octavo.a import b` waits for all of octavo.a.
    assert cycle(imports()) == []


def test_no_import_hides_in_a_function():
    def hidden(name: str) -> set[str]:
        # An operation imports its kernels, and with them Triton, when the first CUDA tensor comes.
        allowed = KERNELS if name in OPERATIONS else set()
        if name.startswith("octavo.inference."):  # transformers is an extra, which only its own models need
            allowed = {f"octavo.inference.transformers_{leaf}" for leaf in ("cache", "generate")}
        if name.startswith("octavo.train."):  # so is PEFT, which adapters alone need
            allowed = {"octavo.integrations.peft"}
        return imports_of(SOURCES[name], set(SOURCES), hidden=True) - allowed

    assert broken(hidden, SOURCES.keys() - {"octavo"}) == {}


def of_ops(name: str) -> set[str]:
    return {found for found in imports()[name] if package_of(found) == "ops"}


def test_a_reference_and_its_kernels_share_nothing():
    """A reference, which is in its operation's file, is the oracle of the kernels: neither imports what the other does.

    What both import computes nothing (`SHARED`), and of the libraries' GEMMs a kernel takes constants alone.
    """
    assert broken(lambda name: of_ops(name) - KERNELS - SHARED - TILES, KERNELS) == {}
    assert broken(lambda name: of_ops(name) & TILES, OPERATIONS) == {}
    hidden = {name: imports_of(SOURCES[name], set(SOURCES), hidden=True) for name in OPERATIONS}
    assert broken(lambda name: (of_ops(name) & KERNELS) - hidden[name], OPERATIONS) == {}
    assert broken(lambda name: of_ops(name) - SHARED - {"octavo.ops.dispatch"}, SHARED) == {}
    taken = {name: names_from(SOURCES[name], "octavo.ops.library_gemms") for name in KERNELS}
    assert broken(lambda name: {constant for constant in taken[name] if not constant.isupper()}, KERNELS) == {}


def test_nothing_reaches_into_an_operation():
    """Outside of the operations, references and kernels are not imported. (A reference may call another one.)"""

    def inner(name: str) -> set[str]:
        references = {n for operation in OPERATIONS for n in names_from(SOURCES[name], operation) if "reference" in n}
        return imports()[name] & KERNELS | references

    assert broken(inner, SOURCES.keys() - OPERATIONS - KERNELS) == {}


def test_the_reference_of_verification_shares_nothing_with_packing():
    """It reads the format a second time, so it uses no code that casts, packs or loads."""
    allowed = REFERENCE | {"octavo.evaluation.metrics", "octavo.util"}
    assert broken(lambda name: reachable(name, imports()) - allowed, REFERENCE) == {}


def test_no_function_bears_the_name_of_its_module():
    """`import octavo.a.b` would give the function where a package exports it, and a traceback could mean either."""

    def functions(name: str) -> set[str]:
        body = parse(ALL_SOURCES[name]).body
        named = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        if name in PACKAGES:
            exports = [node for node in body if isinstance(node, ast.ImportFrom)]
            named |= {alias.asname or alias.name for node in exports for alias in node.names}
        return named & {name.rpartition(".")[2]}

    assert broken(functions, ALL_SOURCES) == {}


def test_no_package_holds_more_than_a_fifth_of_the_lines():
    """Of `octavo` and its command line."""
    lines = {name: len(source.splitlines()) for name, source in ALL_SOURCES.items()}
    for package in {package_of(name) for name in SOURCES}:
        assert sum(count for name, count in lines.items() if package_of(name) == package) <= 0.2 * sum(lines.values())


def test_files_are_short():
    """Kernels excepted: a kernel is one file with its heuristics beside it."""
    folders = ("src", "tests", "bench", "examples")
    assert [str(path) for folder in folders for path in sizes.too_long(sizes.sources(folder))] == []


def test_files_are_chapters():
    files = sizes.sources("src")
    assert len(files) <= 210
    assert len(short := sizes.short(files)) <= 30, short


# Lines of Python. They only fall, to 45,000 of src and of tests: a feature pays by removing.
BUDGETS = {"src": 48_600, "tests": 46_070, "bench": 8_740}


@pytest.mark.parametrize("folder", BUDGETS)
def test_the_house_does_not_grow(folder):
    lines = sum(sizes.sources(folder).values())
    assert lines <= BUDGETS[folder], f"{folder} has {lines:,} lines of {BUDGETS[folder]:,}: remove as many as you add"


def test_a_name_of_a_file_is_its_own():
    """Of `octavo`: a traceback names the file. An operation and its kernels have one name."""
    names = [name.rpartition(".")[2] for name in SOURCES.keys() - PACKAGES - KERNELS]
    assert sorted(names) == sorted(set(names))
    operations = {name.rpartition(".")[2] for name in OPERATIONS}
    others = {name.rpartition(".")[2] for name in KERNELS} - operations
    assert others.isdisjoint(names)


# Of a line: it looks at a clock, sleeps, frees a port for others to bind, or waits for a time that it chose.
CLOCK = re.compile(r"^\s*(import|from)\b.*\b(time|socket)\b|get[r]usage|datetime\.now|Timer\(|time(out=|delta\(0, )\d")


def test_no_test_depends_on_the_clock():
    """Other programs take a test's time, and its ports. Code that needs time to pass gets a clock from its test."""
    tests = Path(__file__).parent
    lines = {path.name: path.read_text().splitlines() for path in tests.rglob("*.py") if path.name != "patience.py"}
    assert broken(lambda name: filter(CLOCK.search, lines[name]), lines) == {}


def test_no_folder_of_tests_is_left_out(pytestconfig):
    """pytest does not enter folders with certain names: by default build and dist are among them."""
    folders = {path.name for path in Path(__file__).parent.rglob("*") if path.is_dir()}
    left_out = pytestconfig.getini("norecursedirs")
    assert [name for name in folders if any(fnmatchcase(name, glob) for glob in left_out)] == []


# ---- What messages advise

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
REMOVING = re.compile(r"\b(remove|delete|erase) (it|its|that|this|the|those|them)\b|\brm -", re.IGNORECASE)


def advice(source: str) -> list[str]:
    """The strings of a source, other than docstrings, that say to remove something or install Octavo from an index."""
    nodes = list(ast.walk(parse(source)))
    docs = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, DOCUMENTED)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if text not in docs and (REMOVING.search(text) or 'install "octavo' in text)]


def test_no_message_advises_to_remove_something_or_to_install_from_an_index() -> None:
    """A file that Octavo cannot read may be whole, and one that it does not know may be dear: both can be moved
    elsewhere. And pip finds no distribution of the name octavo."""
    assert broken(lambda name: advice(ALL_SOURCES[name]), ALL_SOURCES) == {}


# ---- the rules themselves can fail


def test_the_rules_see_what_they_forbid():
    names = ("numerics", "numerics.codec", "ops", "nn", "models", "artifact")
    modules = {"octavo", *(f"octavo.{name}" for name in names)}
    found = imports_of("from octavo.numerics import codec, Cast", modules)
    assert found == {"octavo.numerics.codec", "octavo.numerics"}
    assert imports_of("import octavo.ops\nimport torch\nfrom octavo import nn", modules) == {"octavo.ops", "octavo.nn"}
    assert upward("octavo.numerics.codec", {"octavo.ops", "octavo.numerics"}) == {"octavo.ops"}
    assert upward("octavo.models", {"octavo.train", "octavo.nn"}) == {"octavo.train"}
    assert upward("octavo.nn", {"octavo"}) == {"octavo"}
    assert imports_of("import octavo.ops\ndef f():\n    import octavo.nn", modules, hidden=True) == {"octavo.nn"}
    assert loaded_at_import("import torch.nn\nclass A:\n    from octavo import nn") == {"torch", "octavo"}
    assert loaded_at_import("def f():\n    import torch\nif TYPE_CHECKING:\n    import octavo") == set()
    assert reachable("a", {"a": {"b"}, "b": {"c", "a"}, "c": set(), "d": {"a"}}) == {"a", "b", "c"}
    for line in ("import os, time", "from time import sleep", f"child.wait(timeout={60})"):
        assert CLOCK.search(line)
    assert not CLOCK.search("from datetime import timedelta")
    assert not REFERENCE - SOURCES.keys()
    assert not reachable("octavo.verification.readers", imports()) <= REFERENCE
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert broken(lambda name: {name} & {"a"}, "ab") == {"a": ["a"]}
    faulty = 'def f(x):\n    "Remove it."\n    raise ValueError(f"{x} is damaged: delete it")'
    assert advice(faulty) == [" is damaged: delete it"]
