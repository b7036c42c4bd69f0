"""Scores runs and writes their reports, in the folder of the run or in a file that is named."""

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from fedleak.audit import score_files, scoring
from fedleak.audit.gate.judge import Verdict, chosen, judge
from fedleak.config.federation.lookup import stored
from fedleak.report.annex import annex
from fedleak.report.html.page import Entry, RunPage
from fedleak.report.html.render import render
from fedleak.report.html.run_page import run_page
from fedleak.report.html.sweep_page import sweep_page
from fedleak.report.tables.personal_data import personal_data_tables
from fedleak.store.files import replace
from fedleak.store.records import ScoredRows
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, SWEEP
from fedleak.util.errors import ConfigError

NAME, REDACTED = "report.html", "report-redacted.html"


def is_sweep(path: Path) -> bool:
    """Returns whether a folder holds a sweep and not a run."""
    return not Run(path).exists() and (path / SWEEP.name).is_file()


def report_run(run: Run, out: Path | None = None, *, redact: bool = False) -> Path:
    """Scores a run and writes its report, for its owner alone.

    Args:
        run: The run directory.
        out: The file; None: in the run directory.
        redact: Leave private texts out.

    Returns:
        The file.

    Raises:
        ConfigError: There is no run here.
        FedleakError: A file is missing or damaged, or the report cannot be written.
    """
    content = render(_scored_page(run, redact=redact))
    file = out or run.path / (REDACTED if redact else NAME)
    replace(file, content)
    return file


def _scored_page(run: Run, *, redact: bool) -> RunPage:
    run.info()  # refuses a folder that is no run
    with run.lock():
        return run_page(run, scoring.score_run(run), redact=redact)


def write_annex(run: Run, out: Path) -> None:
    """Scores a run and writes the annex to a data-protection impact assessment, in Markdown.

    Args:
        run: The run directory.
        out: The file; only its owner can open it.

    Raises:
        ConfigError: There is no run here.
        FedleakError: A file is missing or damaged, or the annex cannot be written.
    """
    page = _scored_page(run, redact=True)
    limits, summary = stored(run).gate, run.read_document(SUMMARY)
    verdict = judge(run, limits) if chosen(limits) else Verdict((), None)
    rows = ScoredRows.read_files(run.rows)
    marks = [
        Entry("experiment", str(run.fingerprint())),
        Entry("all figures (SHA-256)", score_files.mark(rows, summary.positive_control)),
        Entry("limits and figures", verdict.digest or "no limits were set"),
    ]
    text = annex(page, personal_data_tables(summary), verdict.checks, marks)
    replace(out, text.encode())


def report_sweep(
    path: Path,
    out: Path | None = None,
    *,
    redact: bool = False,
    tell: Callable[[Path], None] = lambda path: None,
) -> tuple[Path, list[str]]:
    """Writes the reports of a sweep's cells, then the report of the sweep, which links to them.

    Args:
        path: The folder of the sweep.
        out: The sweep's report; None: in its folder. Reports of cells are in the cells' folders.
        redact: Leave private texts out.
        tell: Called with each report that is written.

    Returns:
        The file; which cells have no report, and what is missing in the others.

    Raises:
        ConfigError: There is no sweep here.
        FedleakError: A file is missing or damaged, or a report cannot be written.
    """
    collected = Run(path).read_document(SWEEP)
    file = out or path / (REDACTED if redact else NAME)
    reports, gaps, without = {}, [], []
    for cell in collected.cells:
        if Path(cell.cell).name != cell.cell or cell.cell in ("", ".", ".."):
            raise ConfigError(
                f"{path / SWEEP.name} is damaged: {cell.cell!r} is not the name of a folder: "
                "`fedleak sweep` with the experiment's file writes it anew"
            )
        run = Run(path).inside(cell.cell)
        if cell.status != "finished" or not run.exists():
            why = "its folder is gone" if cell.status == "finished" else cell.status
            without.append(f"{cell.cell!r}: {why}")
            continue
        of_cell = report_run(run, redact=redact)
        tell(of_cell)
        # Begins with a dot, so that no name is taken for the scheme of an address.
        relative = os.path.relpath(of_cell.absolute(), file.absolute().parent)
        reports[cell.cell] = f"./{quote(relative)}"
        gaps += [f"cell {cell.cell!r}: {reason}" for reason in run.read_document(SUMMARY).wrong]
    if without:
        gaps.append(
            f"{len(without)} of {len(collected.cells)} cells have no report "
            f"({'; '.join(without)}): `fedleak sweep` with the experiment's file runs them"
        )
    replace(file, render(sweep_page(collected, reports, redact=redact)))
    return file, gaps
