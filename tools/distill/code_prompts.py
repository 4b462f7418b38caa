"""Prompts for code completion: signatures and docstrings of the installed standard library's functions.

Only the source text is read; nothing is imported. The bodies are left out: the target writes its own.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_LEADS = (
    "",
    "",
    "Complete the following Python function.\n\n",
    "Write the body of this Python function:\n\n",
    "Implement this function:\n\n",
)
_MOST_CHARACTERS = 700
_FEWEST_DOC_CHARACTERS = 40


def code_prompts(count: int, *, seed: int) -> list[str]:
    """Up to `count` prompts, the same for the same seed and Python."""
    draw = random.Random(f"code {seed}")
    signatures = sorted(set(_signatures()))
    draw.shuffle(signatures)
    return [draw.choice(_LEADS) + signature for signature in signatures[:count]]


def _signatures() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                text = _signature(node)
                if text is not None:
                    yield text


def _signature(node: ast.FunctionDef) -> str | None:
    """`def ...:` with its docstring, as a prompt of code completion has it."""
    doc = ast.get_docstring(node)
    if doc is None or len(doc) < _FEWEST_DOC_CHARACTERS or node.name.startswith("__"):
        return None
    head = f"def {node.name}({ast.unparse(node.args)})"
    if node.returns is not None:
        head += f" -> {ast.unparse(node.returns)}"
    lines = "\n".join(f"    {line}" if line else "" for line in doc.splitlines())
    text = f'{head}:\n    """\n{lines}\n    """\n'
    return text if len(text) <= _MOST_CHARACTERS else None
