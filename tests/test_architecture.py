"""The rules of the architecture: which package may import which, and where imports stand.

Each line below names packages and modules of `octavo` that may import those of the lines before it, and nothing else.

The command line is a package of its own, `octavo_cli`, so that `octavo --help` needs no PyTorch: its files import
`octavo` and `torch` inside functions only, and of `octavo` only `python -m octavo` imports it.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import octavo

ROOT = Path(octavo.__file__).parent
COMMANDS = ROOT.with_name("octavo_cli")
LAYERS = [
    {"version", "words", "extras", "device", "progress"},
    {"text"},
    {"numerics"},
    {"recipe"},
    {"ops"},
    {"tracing", "int8", "observation"},
    {"nn", "tensor"},
    {"diagnosis", "dist", "flow"},
    {"models", "artifact"},
    {"telemetry"},
    {"evaluation", "hf"},
    {"calibration"},
    {"kv_cache"},
    {"generation"},
    {"train", "runtime", "folding", "gguf"},
    {"plan"},
    {"integrations", "bisection"},
    {"packing", "verification"},
    {"report"},
    {"loading"},
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


def imported(node: ast.AST, modules: set[str]) -> Iterator[str]:
    """The modules of ours that an import names; `from octavo.a import b` is octavo.a.b where that is a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "octavo")
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "octavo":
        for alias in node.names:
            below = f"{node.module}.{alias.name}"
            yield below if below in modules else str(node.module)


def imports_of(source: str, modules: set[str]) -> set[str]:
    return {name for node in ast.walk(parse(source)) for name in imported(node, modules)}


def hidden_imports(source: str, modules: set[str]) -> set[str]:
    """The modules of ours that are imported inside a function."""
    functions = [
        n for n in ast.walk(parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    return {name for f in functions for node in ast.walk(f) for name in imported(node, modules)}


def loaded_at_import(source: str) -> set[str]:
    """The packages that importing a file of this source imports: neither in a function nor for a type checker alone."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
        for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found


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


REFERENCE = {
    f"octavo.verification.{module}"
    for module in ("files", "layer_spec", "numbers", "kv_cache", "reference", "checks", "weights")
}
IMPORTS = {name: imports_of(source, set(SOURCES)) for name, source in SOURCES.items()}
OPERATIONS = sorted(name for name in PACKAGES if name.startswith("octavo.ops.") or name == "octavo.int8")


def broken(rule: Callable[[str], Iterable[object]], modules: Iterable[str]) -> dict[str, object]:
    """The modules that break a rule, with what `rule(module)` finds there; a rule that holds finds nothing."""
    return {name: found for name in modules if (found := list(rule(name)))}


def test_every_package_has_its_layer():
    assert {package_of(name) for name in SOURCES} <= RANK.keys()
    assert {"octavo.numerics.codec", "octavo.ops.gemm.op", "octavo"} <= SOURCES.keys()
    assert "octavo.numerics.formats" in IMPORTS["octavo.numerics.codec"]


def test_imports_run_downward():
    assert broken(lambda name: upward(name, IMPORTS[name]), SOURCES) == {}


def test_every_import_of_ours_is_of_a_module_that_exists():
    assert broken(lambda name: imports_of(ALL_SOURCES[name], set(SOURCES)) - SOURCES.keys(), ALL_SOURCES) == {}


def test_the_command_line_loads_octavo_and_torch_inside_functions_only():
    slow = {"octavo", "torch", "numpy", "safetensors", "transformers"}
    assert broken(lambda name: loaded_at_import(COMMAND_SOURCES[name]) & slow, COMMAND_SOURCES) == {}


def test_octavo_never_imports_its_command_line():
    assert [name for name, source in SOURCES.items() if "octavo_cli" in source] == ["octavo.__main__"]


def test_there_are_no_cycles():
    # What a package's __init__ gathers is imported with it: `from octavo.a import b` waits for all of octavo.a.
    assert cycle(IMPORTS) == []


def kernels(operation: str) -> set[str]:
    """The modules of the operation that import Triton."""
    return {name for name in SOURCES if name.startswith(f"{operation}.") and name.endswith("kernel")}


def test_no_import_hides_in_a_function():
    def hidden(name: str) -> set[str]:
        # An operation imports its kernels, and with them Triton, when the first CUDA tensor comes.
        package, _, module = name.rpartition(".")
        allowed = kernels(package) if package in OPERATIONS and module == "op" else set()
        if name == "octavo.generation.forward":  # transformers is an extra, which only its own models need
            allowed = {"octavo.generation.transformers_forward"}
        return hidden_imports(SOURCES[name], set(SOURCES)) - allowed

    assert broken(hidden, SOURCES.keys() - {"octavo.loading"}) == {}


def test_imports_are_absolute():
    def relative(name: str) -> list[int]:
        nodes = ast.walk(parse(ALL_SOURCES[name]))
        return [node.lineno for node in nodes if isinstance(node, ast.ImportFrom) and node.level]

    assert broken(relative, ALL_SOURCES) == {}


def test_a_reference_and_its_kernels_share_nothing():
    """The reference is the oracle of the kernels: it imports neither them nor a module that they import."""

    def shared(operation: str) -> set[str]:
        members = {name for name in SOURCES if name.startswith(f"{operation}.")}
        reference, op = f"{operation}.reference", f"{operation}.op"
        imported = set().union(*(IMPORTS[kernel] for kernel in kernels(operation)))
        return IMPORTS[reference] & (kernels(operation) | {op} | imported & members) | imported & {reference, op}

    assert broken(shared, OPERATIONS) == {}


def test_nothing_reaches_into_an_operation():
    """Outside of an operation, its reference and kernels are not imported. (A reference may call another one.)"""
    inner = {name for operation in OPERATIONS for name in (f"{operation}.reference", *kernels(operation))}
    outside = [name for name in SOURCES if name.rpartition(".")[0] not in OPERATIONS]
    assert broken(lambda name: IMPORTS[name] & inner, outside) == {}


def test_the_reference_of_verification_shares_nothing_with_packing():
    """It reads the format a second time, so it uses no code that casts, packs or loads."""
    allowed = REFERENCE | {"octavo.evaluation.metrics", "octavo.progress"}
    assert broken(lambda name: reachable(name, IMPORTS) - allowed, REFERENCE) == {}


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


def test_no_package_holds_more_than_a_sixth_of_the_lines():
    """Of `octavo` and its command line: 16 %."""
    lines = {name: len(source.splitlines()) for name, source in ALL_SOURCES.items()}
    for package in {package_of(name) for name in SOURCES}:
        assert sum(count for name, count in lines.items() if package_of(name) == package) <= 0.16 * sum(lines.values())


def test_files_are_short():
    root = Path(__file__).parent.parent
    files = [path for folder in ("src", "tests", "bench", "examples") for path in (root / folder).rglob("*.py")]
    assert [str(path) for path in files if len(path.read_text().splitlines()) > 300] == []


def test_no_folder_of_tests_is_left_out(pytestconfig):
    """pytest does not enter folders with certain names: by default build and dist are among them."""
    folders = {path.name for path in Path(__file__).parent.rglob("*") if path.is_dir()}
    left_out = pytestconfig.getini("norecursedirs")
    assert [name for name in folders if any(fnmatchcase(name, glob) for glob in left_out)] == []


def test_names_of_test_files_are_unique():
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


# ---- the rules themselves can fail


def test_the_rules_see_what_they_forbid():
    names = ("numerics", "numerics.codec", "ops", "nn", "models", "artifact")
    modules = {"octavo", *(f"octavo.{name}" for name in names)}
    found = imports_of("from octavo.numerics import codec, Cast", modules)
    assert found == {"octavo.numerics.codec", "octavo.numerics"}
    assert imports_of("import octavo.ops\nimport torch\nfrom octavo import nn", modules) == {"octavo.ops", "octavo.nn"}
    assert upward("octavo.numerics.codec", {"octavo.ops", "octavo.numerics"}) == {"octavo.ops"}
    assert upward("octavo.models", {"octavo.artifact", "octavo.nn"}) == {"octavo.artifact"}
    assert upward("octavo.nn", {"octavo"}) == {"octavo"}
    assert hidden_imports("def f():\n    from octavo.nn import x", modules) == {"octavo.nn"}
    assert loaded_at_import("import torch.nn\nclass A:\n    from octavo import nn") == {"torch", "octavo"}
    assert loaded_at_import("def f():\n    import torch\nif TYPE_CHECKING:\n    import octavo") == set()
    assert reachable("a", {"a": {"b"}, "b": {"c", "a"}, "c": set(), "d": {"a"}}) == {"a", "b", "c"}
    assert not REFERENCE - SOURCES.keys()
    assert not reachable("octavo.verification.readers", IMPORTS) <= REFERENCE
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert broken(lambda name: {name} & {"a"}, "ab") == {"a": ["a"]}
