"""The annex to a data-protection impact assessment (GDPR, article 35), in Markdown.

In the order of such an assessment it states what was tested, how, when, with what result, and what
is left. It has only what the redacted report and the gate have, and no private text.
"""

import html
import re
from collections.abc import Iterable, Sequence

from fedleak.audit.gate.check import Check
from fedleak.report.html.page import Entry, RunPage
from fedleak.report.markdown import lines
from fedleak.report.table import Table
from fedleak.report.words import NOT_MEASURED
from fedleak.util.sanitise import printable

LEFT = ("Not seen", "Next")
"""Paragraphs of the verdict on what is left; the others are the result."""


def annex(
    page: RunPage, personal: Sequence[Table], checks: Sequence[Check], marks: Sequence[Entry]
) -> str:
    """Returns the annex.

    Args:
        page: The redacted report.
        personal: Tables of the personal data that was read.
        checks: Checks of the gate; empty if there are no limits.
        marks: Hashes of what the annex rests on.
    """
    paragraphs = page.verdict.paragraphs
    result = [Entry("In short", page.verdict.headline)]
    result += [paragraph for paragraph in paragraphs if paragraph.word not in LEFT]
    left = [paragraph for paragraph in paragraphs if paragraph.word in LEFT]
    left += [Entry("Not complete", reason) for reason in page.missing]
    limits = [Entry(check.name, f"{check.outcome}: {check.sentence}") for check in checks]
    closed = any(not check.passed for check in checks)
    return "\n".join(
        [
            f"# {_cell(page.name)}: test of what updates of federated learning reveal",
            "",
            "Annex to a data-protection impact assessment. It reports a test, and is no opinion on "
            "whether the processing is lawful.",
            *_section("What was tested", page.setting),
            *_section("How: the attacker, and what it was told", page.threat),
            *_section("By whom, when, and with what", [Entry("tested by", ""), *page.versions]),
            *_section("Result", result),
            *(line for table in personal for line in _table(table)),
            *_section(
                f"Limits that were set: {'not kept, or not enough was measured' * closed or 'kept'}"
                if checks
                else "Limits that were set: none",
                limits,
            ),
            *_section("What is left", left),
            *_section("Marks: who has the same has the same test", marks),
            "",
        ]
    )


def _section(title: str, entries: Iterable[Entry]) -> list[str]:
    rows = [[_cell(entry.word), _cell(entry.value)] for entry in entries]
    return ["", f"## {title}", *(["", *lines(["", ""], rows)] if rows else [])]


def _table(table: Table) -> list[str]:
    """Returns a table and its notes."""
    headings = [_cell(column.heading) for column in table.columns]
    rows = [[_cell(cell.text or NOT_MEASURED) for cell in row] for row in table.rows]
    notes = [f"\n{_cell(note)}" for note in table.notes]
    return ["", f"### {_cell(table.title)}", "", *lines(headings, rows), *notes]


def _cell(text: str) -> str:
    """Returns a text that neither ends a cell nor is taken for a tag, a link or a picture."""
    return re.sub(r"([\\|]|\](?=[(\[:]))", r"\\\1", html.escape(printable(text), quote=False))
