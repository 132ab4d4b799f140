"""What messages advise."""

import ast
import re
from pathlib import Path

import octavo

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
ADVICE = re.compile(r"\b(remove|delete|erase) (it|its|that|this|the|those|them)\b|\brm -", re.IGNORECASE)


def advice(path: Path) -> list[str]:
    """The strings of a source, other than docstrings, that say to remove something."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docs = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, DOCUMENTED)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if text not in docs and ADVICE.search(text)]


def test_no_message_advises_to_remove_something() -> None:
    """What Octavo cannot read may be whole, and what it does not know may be dear: both can be moved elsewhere."""
    root = Path(octavo.__file__).parents[1]
    found = {str(path): advice(path) for name in ("octavo", "octavo_cli") for path in root.glob(f"{name}/**/*.py")}
    assert {path: texts for path, texts in found.items() if texts} == {}


def test_the_rule_sees_such_advice(tmp_path: Path) -> None:
    lines = ("def f(x):", "    'Remove it.'", '    raise ValueError(f"{x} is damaged: delete it")')
    (tmp_path / "a.py").write_text("\n".join(lines))
    assert advice(tmp_path / "a.py") == [" is damaged: delete it"]
