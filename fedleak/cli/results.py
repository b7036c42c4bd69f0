"""The commands that show, judge and pass on what a run has found."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedleak.cli.display import console, remark
from fedleak.cli.mistakes import end
from fedleak.cli.options import RunPath, RunPaths, Set
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.sanitise import markup

GATE_CLOSED = 3
"""Exit status of a gate: a limit is exceeded, or too little was measured to tell."""


def report(
    paths: RunPaths,
    open_: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave private texts out: rates and shapes only.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; left out: report.html in the folder.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML file about a run or a sweep, for a browser.

    RUN is a run directory or the folder of a sweep; each gets a file of its own. Runs are scored
    again. The report of a sweep links to the reports of its cells, which are written too.

    A report holds private texts: only its owner can open it. `--redact` leaves them out.
    """
    import webbrowser

    from fedleak.running import reports
    from fedleak.store.run import Run
    from fedleak.store.summaries import SUMMARY

    if out is not None and len(paths) > 1:
        raise ConfigError(
            f"--out {str(out)!r} is one file, and {len(paths)} folders are named: give one"
        )
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a folder: name a file, such as report.html")

    def tell(written: Path) -> None:
        console.print(f"report: {markup(written)}", soft_wrap=True)

    lacks: list[str] = []
    for path in paths:
        if reports.is_sweep(path):
            written, gaps = reports.report_sweep(path, out, redact=redact, tell=tell)
            lacks += gaps
        else:
            written = reports.report_run(Run(path), out, redact=redact)
            summary = Run(path).read_document(SUMMARY)
            lacks += summary.wrong
            remark(summary.notes)
        tell(written)
        if open_ and not webbrowser.open(written.absolute().as_uri()):
            console.print("[yellow]note:[/] no browser was found: open the file yourself")
    if lacks:
        raise FedleakError("; ".join(lacks))


def gate(
    path: RunPath,
    changes: Set = None,
    purged: Annotated[
        bool, typer.Option("--purged", help="Take the figures of a purged run as they are.")
    ] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the checks as JUnit XML.")
    ] = None,
) -> None:
    """Score a run anew, compare it with limits, and exit with status 3 if one is broken.

    RUN is a run directory; nothing is written there. Limits are those of [gate] in its experiment,
    and of `--set gate.exact=0.01`, for example. The upper end of the interval is what is compared.
    The status is 3, too, if too little was measured to tell, or if files of the run are gone or
    were changed.
    """
    from fedleak.audit.gate.judge import described, judge
    from fedleak.config.federation.lookup import stored
    from fedleak.config.federation.schedule import malicious_server
    from fedleak.config.loading import limited
    from fedleak.report import ci
    from fedleak.report.words import MALICIOUS
    from fedleak.store.run import Run

    at = Run(path)
    of_run = stored(at).gate
    limits = limited(of_run, changes or ())
    verdict = judge(at, limits, accept_purged=purged)
    rests_on = {"limits": described(limits, of_run)}
    if (malicious := malicious_server(stored(at))) is not None:
        rests_on[MALICIOUS] = malicious
    if verdict.digest is not None:
        rests_on["digest"] = f"{verdict.digest} (SHA-256 of limits and figures)"
    marks = {"within": "[green]within[/]", "exceeded": "[red]EXCEEDED[/]"}
    for check in verdict.checks:
        mark = marks.get(check.outcome, "[yellow]NOT TOLD[/]")
        console.print(f"{mark}  {markup(check.name)}: {markup(check.sentence)}", soft_wrap=True)
    for name, value in rests_on.items():
        console.print(f"{name}: {markup(value)}", soft_wrap=True)
    if junit is not None:
        ci.write_junit(path.name, verdict.checks, rests_on, junit)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in ci.annotations(path.name, verdict.checks):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    closed = [check.name for check in verdict.checks if not check.passed]
    if closed:
        end(f"the gate is closed, because of: {', '.join(closed)}", GATE_CLOSED)
    console.print("the gate is open: these attacks read no more than the limits allow")


def compare(
    runs: RunPaths,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Compare runs with the first one, text by text: does the server read more after a change?

    RUN is a run directory, two or more. Only the same texts of the same client and round are
    compared; texts without a partner are counted. If the sampling of DP-SGD drew other texts, the
    figures of both runs stand side by side.

    One RUN that is a folder of runs is shown as a whole, over their dates and over rounds. The same
    is in trends.html in that folder.
    """
    from fedleak.audit.comparison import compare as pair
    from fedleak.report.html.render import render
    from fedleak.report.html.trends_page import trends_page
    from fedleak.report.tables.comparison import comparison_table
    from fedleak.report.tables.trends import Dated, trend_tables
    from fedleak.report.terminal.table import print_table
    from fedleak.store.files import replace
    from fedleak.store.run import Run

    if len(runs) < 2:
        inside = [Run(path) for path in sorted(runs[0].glob("*/"))]
        dated, without = [], list[str]()
        for run in filter(Run.exists, inside):
            try:
                dated.append(Dated.read(run))
            except FedleakError as error:
                without.append(f"not shown: {error}")
                console.print(f"[yellow]not shown[/]: {markup(error)}", soft_wrap=True)
        if not dated:
            raise ConfigError("one run has nothing to be compared with: name two or more")
        if as_json:
            raise ConfigError("--json is for runs that are compared: name two or more")
        for table in trend_tables(dated):
            print_table(console, table)
        page = runs[0] / "trends.html"
        replace(page, render(trends_page(runs[0].absolute().name, dated, without)))
        console.print(f"page: {markup(page)}", soft_wrap=True)
        return
    comparisons = pair(Run(runs[0]), [Run(path) for path in runs[1:]])
    if as_json:
        shown = [comparison.model_dump(mode="json") for comparison in comparisons]
        for written, comparison in zip(shown, comparisons, strict=True):
            for row, difference in zip(written["differences"], comparison.differences, strict=True):
                row["direction"] = difference.direction
        console.print_json(data=shown)
        return
    for comparison in comparisons:
        print_table(console, comparison_table(comparison))
        for reason, count in comparison.unpaired.items():
            console.print(f"not compared: {count} texts: {markup(reason)}", soft_wrap=True)


def export(
    path: RunPath,
    to: Annotated[
        str,
        typer.Option(
            metavar="TO", help="A csv, parquet or md file, mlflow[:PLACE] or tensorboard[:FOLDER]."
        ),
    ],
    texts: Annotated[
        bool, typer.Option("--texts", help="Also write the private texts, and what was read.")
    ] = False,
) -> None:
    """Write the scores of a run for other programs.

    RUN is a run directory. A csv or parquet file has a row per update and attack, and only the
    owner can open it. A file that ends in .md is the annex to a data-protection impact assessment:
    what was tested, how, when, with what result, and what is left, without private texts.

    MLflow gets settings, figures by round and the report, without private texts. PLACE is a
    tracking server, a database or a folder; left out, what MLflow is set to. TensorBoard gets
    figures and settings.
    """
    from fedleak.store.run import Run

    tracker, _, place = to.partition(":")
    if tracker == "mlflow":
        from fedleak.running.tracking import export_to_mlflow

        run_id = export_to_mlflow(Run(path), place or None, texts=texts)
        console.print(f"MLflow has it as run {markup(run_id)}", soft_wrap=True)
    elif tracker == "tensorboard":
        from fedleak.running.tracking import export_to_tensorboard

        if texts:
            raise ConfigError("TensorBoard gets figures and no texts: leave out --texts")
        folder = export_to_tensorboard(Run(path), place or None)
        console.print(f"for TensorBoard: {markup(folder)}", soft_wrap=True)
    elif Path(to).suffix.lower() == ".md":
        from fedleak.running.reports import write_annex

        if texts:
            raise ConfigError("the annex has no private texts: leave out --texts")
        write_annex(Run(path), Path(to))
        console.print(f"annex: {markup(to)}", soft_wrap=True)
    else:
        from fedleak.running.export import export as write

        count = write(Run(path), Path(to), texts=texts)
        private = ", with private texts" if texts else ""
        console.print(f"{count} rows{private}: {markup(to)}", soft_wrap=True)
