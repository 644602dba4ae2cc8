"""Reads the source of the user's code, as Python's parser sees it: nothing of it is run."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterator

from .whose_code import text_of


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> ast.Module | None:
    lines = linecache.getlines(file)
    try:
        return ast.parse("".join(lines)) if lines and text_of(file, 1) + text_of(file, 2) + text_of(file, 3) else None
    except (SyntaxError, ValueError):
        return None


def definition_of(code: types.CodeType) -> ast.AST | None:
    """The source of a function, or of a module; None: it is not known."""
    tree = _parsed(code.co_filename)
    if tree is None or code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    lambdas = [one for one in ast.walk(tree) if isinstance(one, ast.Lambda) and one.lineno == code.co_firstlineno]
    return lambdas[0] if code.co_name == "<lambda>" and len(lambdas) == 1 else None


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """What a function's body has, without the bodies of functions and classes in it."""
    rest: list[ast.AST] = list(ast.iter_child_nodes(node))
    while rest:
        one = rest.pop()
        yield one
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            rest += ast.iter_child_nodes(one)
