"""Writes the references of the files that users write from the types that check such files.

    python docs/generate.py            writes the pages below their markers
    python docs/generate.py --check    ends with status 1 if a page is not current

The pages are docs/experiment-file.md and docs/own-flower-app.md.

The keys, types, bounds and defaults come from the JSON schema of `Experiment` and of the classes of
attacks, defenses and server modes; the meanings, from their docstrings.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fedleak import attacks, defenses, detectors
from fedleak.attacks import server_modes
from fedleak.config.experiment import Experiment
from fedleak.config.tables import ServerTable
from fedleak.tap.about import About

DOCS = Path(__file__).parent
MARKER = "<!-- Below this line everything is written by `python docs/generate.py`. -->\n"

HEADINGS = "| key | value | default | meaning |\n|---|---|---|---|"

COMMON = {
    "attack": [
        ("kind", "the name of an attack", "**required**", "Which attack."),
        ("name", "text", "the kind", "What its rows are called. Two of a kind need two names."),
    ],
    "defense": [
        ("kind", "the name of a defense", "**required**", "Which defense."),
        ("clients", "list of whole numbers", "every client", "The clients that use it."),
    ],
    "detector": [
        ("kind", "the name of a detector", "**required**", "Which detector."),
        ("clients", "list of whole numbers", "every client", "The clients that use it."),
    ],
}
"""Keys that every entry of these tables has, beside its class's own."""


class UndocumentedError(Exception):
    """A key has no meaning: its field lacks a docstring."""


def experiment_file() -> str:
    """Returns the generated part of the page on the experiment file.

    Raises:
        UndocumentedError: A field has no docstring.
    """
    return "\n".join(
        [
            "\n## Reference: the tables\n",
            *tables(Experiment.model_json_schema()),
            "## Reference: settings of attacks\n",
            *plugins("attack", attacks.kinds()),
            "## Reference: settings of defenses\n",
            *plugins("defense", defenses.kinds()),
            "## Reference: settings of detectors\n",
            *plugins("detector", detectors.kinds()),
            "## Reference: settings of server modes\n",
            *server(),
        ]
    )


def about_file() -> str:
    """Returns the generated part of the page on the file beside a tap.

    Raises:
        UndocumentedError: A field has no docstring.
    """
    return "\n".join(
        ["\n## Reference: the file beside a tap\n", *tables(About.model_json_schema())]
    )


PAGES = {"experiment-file.md": experiment_file, "own-flower-app.md": about_file}
"""What is written below the marker of each page."""


def tables(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields a section for the top of the file and for each of its tables, inner ones behind."""
    inner = {key: name for key, field in schema["properties"].items() if (name := _table_of(field))}
    top = {key: field for key, field in schema["properties"].items() if key not in inner}
    yield "### Top of the file\n"
    yield from _rows(top, schema["required"], "the experiment")
    waiting = list(inner.items())
    while waiting:
        path, name = waiting.pop(0)
        table = schema["$defs"][name]
        fields, below = {}, []
        for key, field in table["properties"].items():
            if (table_name := _table_of(field)) is not None:
                below.append((f"{path}.{key}", table_name))
            else:
                fields[key] = field
        yield f"### `[{path}]`\n\n{_about(table['description'])}\n"
        yield from _rows(fields, table.get("required", ()), path)
        waiting = [*below, *waiting]


def plugins(table: str, kinds: Mapping[str, type]) -> Iterator[str]:
    """Yields a section for what all entries have, and one for each kind."""
    yield f"Keys of every `[[{table}]]`:\n\n{HEADINGS}"
    yield from (_row(*row) for row in COMMON[table])
    yield ""
    yield from settings(kinds)


def server() -> Iterator[str]:
    """Yields a section for the keys that `[server]` has in every mode, and one for each mode."""
    schema = ServerTable.model_json_schema()
    yield f"### `[server]`\n\n{_about(schema['description'])}\n"
    yield from _rows(schema["properties"], (), "server")
    yield from settings(server_modes.kinds())


def settings(kinds: Mapping[str, type]) -> Iterator[str]:
    """Yields a section for each kind."""
    for kind, cls in sorted(kinds.items()):
        schema = TypeAdapter(cls).json_schema()
        fields = {
            key: {**field, "description": meanings(cls).get(key)}
            for key, field in schema.get("properties", {}).items()
        }
        about = (cls.__doc__ or "").strip().splitlines()[0]
        yield f"### `{kind}`\n\n{about}\n"
        if fields:
            yield from _rows(fields, schema.get("required", ()), kind)
        else:
            yield "It has no settings.\n"


def meanings(cls: type) -> dict[str, str]:
    """Returns what the section "Attributes" of a class and of its bases says of each field."""
    meaning_of: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, section = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {6,}.*)*)", section, re.MULTILINE)
        for names, text in entries:
            # A setting that is None in the code is one that a file leaves out.
            text = re.sub(r"\bNone:", "left out:", " ".join(text.split()))
            meaning_of |= dict.fromkeys(names.split(", "), re.sub(r"\. left", ". Left", text))
    return meaning_of


def value(schema: Mapping[str, Any]) -> str:
    """Returns what a value of a schema may be, in words."""
    if "anyOf" in schema:
        kinds = [value(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in schema or "const" in schema:
        return ", ".join(
            f"`{json.dumps(choice)}`" for choice in schema.get("enum", [schema.get("const")])
        )
    if schema["type"] == "array":
        items = re.sub("^(whole number|number|text|table)", r"\1s", value(schema["items"]))
        some = ", not empty" if schema.get("minItems") else ""
        return f"list of {items}{some}"
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true` or `false`",
        "object": "table",
    }[schema["type"]]
    bounds = {
        "minimum": "at least {:,}",
        "exclusiveMinimum": "above {:,}",
        "maximum": "at most {:,}",
        "exclusiveMaximum": "below {:,}",
        "maxLength": "at most {:,} characters",
    }
    limits = [text.format(schema[key]) for key, text in bounds.items() if key in schema]
    return ", ".join([words, *limits])


def _table_of(field: Mapping[str, Any]) -> str | None:
    """Returns the name of the table that a field holds, or None."""
    refs = [option["$ref"] for option in (field, *field.get("anyOf", ())) if "$ref" in option]
    return refs[0].rpartition("/")[2] if refs else None


def _rows(fields: Mapping[str, Any], required: Any, where: str) -> Iterator[str]:
    yield HEADINGS
    for key, field in fields.items():
        if not field.get("description"):
            raise UndocumentedError(f"{where}: {key} has no docstring")
        default = "**required**" if key in required else _default(field.get("default"))
        yield _row(key, value(field), default, field["description"])
    yield ""


def _row(key: str, values: str, default: str, meaning: str) -> str:
    cells = (f"`{key}`", values, default, " ".join(meaning.split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(default: Any) -> str:
    if default is None:
        return "left out"
    if isinstance(default, list) and default and isinstance(default[0], dict):
        return f"`[{', '.join(_inline(table) for table in default)}]`"
    return f"`{json.dumps(default)}`"


def _inline(table: Mapping[str, Any]) -> str:
    return (
        "{ " + ", ".join(f"{key} = {json.dumps(setting)}" for key, setting in table.items()) + " }"
    )


def _about(description: str) -> str:
    """Returns the description of a table without its own name, which is the heading."""
    text = " ".join(description.split())
    text = re.sub(r"^`\[[\w.]+\]`: ", "", text)
    return text[0].upper() + text[1:]


def main() -> None:
    """Writes the pages, or checks them."""
    for name, reference in PAGES.items():
        page = DOCS / name
        written, marker, current = page.read_text().partition(MARKER)
        if not marker:
            sys.exit(f"{page} has no line {MARKER.strip()!r}: put it where the reference begins")
        new = reference()
        if "--check" not in sys.argv[1:]:
            page.write_text(written + MARKER + new)
        elif current != new:
            sys.exit(f"{name} is not current: run `python docs/generate.py`")


if __name__ == "__main__":
    main()
