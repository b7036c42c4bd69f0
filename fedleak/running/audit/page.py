"""What an audit ends with: the gate, the page for a browser, and both in audit.json."""

from collections.abc import Sequence

from fedleak.attacks.clock import now
from fedleak.audit.answer_scores import Scored
from fedleak.audit.gate.judge import chosen, judge
from fedleak.report.html.page import Verdict
from fedleak.report.html.render import render
from fedleak.report.html.run_page import run_page
from fedleak.running import reports
from fedleak.running.audit.begin import Opened
from fedleak.store.audits import AUDIT, Audit, AuditPage
from fedleak.store.files import replace
from fedleak.store.summaries import SUMMARY


def finish(opened: Opened, scored: Sequence[Scored]) -> tuple[Audit, Verdict]:
    """Checks the gate, and writes report.html and audit.json.

    Args:
        opened: The audit.
        scored: What it read.

    Returns:
        The audit with its results, and the verdict of the page.

    Raises:
        FedleakError: A file is damaged, or cannot be written.
    """
    run, limits, audit = opened.run, opened.experiment.gate, opened.audit
    checks = judge(run, limits).checks if chosen(limits) else ()
    took = audit.seconds
    if took is None and not audit.interrupted:
        took = now() - opened.time.begun
    cut = opened.time.is_up() and bool(run.read_document(SUMMARY).missing)
    audit = audit.model_copy(update={"seconds": took, "cut": cut, "checks": tuple(checks)})
    with run.lock():
        run.write(AUDIT, audit)
        page = run_page(run, scored)
        replace(run.path / reports.NAME, render(page))
        summed_up = AuditPage(
            level=str(page.verdict.level),
            headline=page.verdict.headline,
            paragraphs={entry.word: entry.value for entry in page.verdict.paragraphs},
        )
        audit = audit.model_copy(update={"page": summed_up})
        run.write(AUDIT, audit)
    return audit, page.verdict
