"""What no local variable is called: words that do not say what it holds."""

import ast
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[1]
FOLDERS = ("fedleak", "server", "clients", "experiments", "docs", "tests")
WORDS = {
    *("asked", "each", "found", "got", "has", "it", "least", "of", "one", "ones", "said", "such"),
    *("that", "them", "these", "they", "this", "those", "told", "what", "whose"),
}
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.comprehension


def _locals(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each place that binds a local variable, and no parameter."""
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, SCOPES):
            continue
        if isinstance(scope, ast.Lambda):
            yield from ((a.lineno, a.arg) for a in ast.walk(scope.args) if isinstance(a, ast.arg))
        for node in ast.walk(scope):
            match node:
                case ast.Name(id=name, ctx=ast.Store()):
                    yield node.lineno, name
                case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                    yield node.lineno, name


def _names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yields all names of a table and of those within it."""
    yield from table.get_identifiers()
    for child in table.get_children():
        yield from _names(child)


def _wrong(source: str) -> list[tuple[int, str]]:
    """Returns the lines and names of local variables that do not say what they hold."""
    # Most files have none of the words for a name, which the compiler says in a third of the time.
    if WORDS.isdisjoint(_names(symtable.symtable(source, "", "exec"))):
        return []
    return sorted({(line, name) for line, name in _locals(source) if name in WORDS})


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_local_variable_says_what_it_holds(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in _wrong(path.read_text())
    ]
    assert not wrong, "name these by what they hold:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "statement",
    [
        "one = 1",
        "for one, _ in pairs: pass",
        "[one for one in rows]",
        "key = lambda one: one.key",
        "with rows as one: pass",
        "if (one := rows): pass",
        "try: pass\n    except OSError as one: pass",
        "match rows:\n        case [one]: pass",
    ],
)
def test_every_way_to_name_a_local_variable_is_seen(statement: str) -> None:
    assert _wrong(f"def name(rows, each):\n    {statement}\n")[0][1] == "one"
