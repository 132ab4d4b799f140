"""The names of the device functions that kernels call.

Inductor writes a kernel and all device functions that it reaches into one file, each under the name of its definition.
So a name imported as another is missing there, and of two functions of one name the second replaces the first.
"""

import ast
from collections import Counter
from pathlib import Path

import octavo

ROOT = Path(octavo.__file__).parent
SOURCES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): ast.parse(path.read_text())
    for path in ROOT.rglob("*.py")
    if "@triton.jit" in path.read_text()
}
Function = tuple[str, str]  # its module and its name


def defined(module: str) -> dict[str, ast.FunctionDef]:
    functions = (node for node in SOURCES[module].body if isinstance(node, ast.FunctionDef))
    return {f.name: f for f in functions if "triton.jit" in map(ast.unparse, f.decorator_list)}


def imported(module: str) -> dict[str, Function]:
    """The functions that a module imports and Triton compiles, by their names in the module."""
    nodes = [node for node in SOURCES[module].body if isinstance(node, ast.ImportFrom) and node.module in SOURCES]
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in nodes
        for alias in node.names
        if alias.name in defined(str(node.module))
    }


def reached(function: Function) -> set[Function]:
    module, name = function
    used = {node.id for node in ast.walk(defined(module)[name]) if isinstance(node, ast.Name)}
    called = {(module, other) for other in defined(module)} | set(imported(module).values())
    return {function}.union(*(reached(other) for other in called if other[1] in used and other != function))


def test_no_device_function_is_imported_under_another_name():
    found = {module: imported(module) for module in SOURCES}
    assert sum(map(len, found.values())) > 20
    assert [(module, name) for module in found for name, (_, own) in found[module].items() if name != own] == []


def test_no_two_device_functions_of_a_kernel_have_one_name():
    for module in SOURCES:
        for name in defined(module):
            names = Counter(other for _, other in reached((module, name)))
            assert [other for other, count in names.items() if count > 1] == [], (module, name)
