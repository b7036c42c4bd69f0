"""Writes a report as one HTML file.

Every value is put through `printable` and escaped, whoever wrote it. The file's policy lets a
browser load nothing but what is in the file: its own script and style, by their hashes.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fedleak.report.html.page import Page, RunPage, SweepPage, TrendsPage
from fedleak.report.table import Table
from fedleak.util.nested import mapped
from fedleak.util.sanitise import printable
from fedleak.util.versions import VERSION, now

LONGEST_TEXT = 4_000
"""The most characters of a private text or an answer that are shown; a longer one is cut."""

MOST_COLUMNS = 12
"""The most columns of a table of attacks; more attacks are in further tables."""

POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""What a browser may load."""

FOLDER = Path(__file__).with_name("templates")

TEMPLATES = {RunPage: "run.html.j2", SweepPage: "sweep.html.j2", TrendsPage: "trends.html.j2"}


def render(page: Page) -> bytes:
    """Returns the file's content."""
    style, script = ((FOLDER / name).read_text("utf-8") for name in ("style.css", "report.js"))
    # Only the texts need the script, which shows them.
    texts = [asdict(text) for text in page.texts] if isinstance(page, RunPage) else []
    template = _environment().get_template(TEMPLATES[type(page)])
    written = template.render(
        page=page,
        texts=mapped(texts, bounded),
        version=VERSION,
        now=now(),
        # They are files of this package, and no value is in them.
        style=Markup(style),
        script=Markup(script),
        policy=POLICY.format(script=_hash(script), style=_hash(style)),
    )
    return written.encode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"code": _code, "data_url": _data_url, "parts": _parts}
    return environment


def _shown(value: Any) -> Any:
    """Makes what others wrote printable; what the templates themselves made is markup already."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _code(text: str) -> Markup:
    """Returns a sentence whose parts between backquotes are code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(printable(text)))))


def _hash(source: str) -> str:
    """Returns the mark by which a policy knows an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _data_url(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _parts(table: Table) -> Iterator[Table]:
    return table.parts(lambda part: len(part.columns) <= MOST_COLUMNS)


def bounded(value: Any) -> Any:
    """Returns a printable text, with a note if it was cut; other values stay as they are."""
    if not isinstance(value, str):
        return value
    shown = printable(value[:LONGEST_TEXT])
    if len(value) <= LONGEST_TEXT:
        return shown
    return f"{shown} [cut: the first {LONGEST_TEXT:,} of {len(value):,} characters]"
