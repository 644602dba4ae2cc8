"""Which statements of a script a definition needs. Pure: nothing is executed."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator, Mapping, Set
from types import CodeType
from typing import Any


def needed(tree: ast.Module, names: Set[str], known: Set[str] = frozenset()) -> list[ast.stmt]:
    """The statements at the top of a script that define these names, and all that they use in turn, in their order.

    Names that are ``known`` have values already. What is below ``if __name__ == "__main__"`` is not looked at.
    """
    statements = [one for one in tree.body if not _is_main_guard(one)]
    binds = [_bound(one) for one in statements]
    imports = [(number, one) for number, one in enumerate(statements) if isinstance(one, ast.ImportFrom)]
    chosen = {number for number, one in imports if one.names[0].name == "*"}
    wanted, seen = set(names), set(known)
    for number in chosen:
        wanted |= set(used_by(statements[number]))
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for number, bound in enumerate(binds):
            if name in bound and number not in chosen:
                chosen.add(number)
                wanted |= set(used_by(statements[number])) - seen
    chosen |= {number for number, one in imports if one.module == "__future__"}
    return [statements[number] for number in sorted(chosen)]


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module gives a value."""
    return {one.argval for one in dis.get_instructions(_compiled(statement)) if one.opname == "STORE_NAME"}


def _compiled(statement: ast.stmt) -> CodeType:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as in a notebook's cell
    code: CodeType = compile(ast.Module([statement], []), "<script>", "exec", flags, dont_inherit=True)
    return code


def used_by(statement: ast.stmt) -> Iterator[str]:
    """The global names that a statement reads, also in functions and classes below it. Their own local names are no such."""
    yield from _globals_read_by(_compiled(statement))
    for node in ast.walk(statement):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value  # an annotation in quotes, or __all__: too much does no harm


def definition_of(form: Mapping[str, Any], text: str) -> Any:
    """The node of a function, lambda or class that has no name of its own in its module; None if it is no longer there.

    Args:
        form: of ``encoding``; ``text``: of the module.
    """
    node: Any = ast.parse(text)
    if form["is"] == "function":
        return next((one for one in reversed([*ast.walk(node)]) if _is_function_at(one, form)), None)
    for part in [part for part in form["name"].split(".") if part != "<locals>"]:
        node = next((one for one in ast.walk(node) if getattr(one, "name", "") == part and one is not node), None)
        if node is None:
            return None
    return node


def _is_function_at(node: ast.AST, form: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.FunctionDef):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        return (first, node.name) == (form["line"], form["name"])
    if not isinstance(node, ast.Lambda) or node.lineno != form["line"]:
        return False
    return bool(form["column"] < 0 or node.col_offset <= form["column"] <= (node.end_col_offset or 0))


def _globals_read_by(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_read_by(constant)


def _is_main_guard(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.If):
        return False
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))
