"""What a gate found, as continuous integration reads it: JUnit XML, and GitHub's annotations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from fedleak.audit.gate.check import Check, Outcome
from fedleak.store.files import publish
from fedleak.util.sanitise import printable


def write_junit(
    run: str, checks: Sequence[Check], properties: Mapping[str, str], path: Path
) -> None:
    """Writes checks as one test suite of JUnit XML.

    A limit that is exceeded is a failure; what was not measured well enough is an error.

    Args:
        run: The name of the run.
        checks: The checks of the gate.
        properties: What the checks rest on, by name.
        path: The file.

    Raises:
        FedleakError: The file cannot be written.
    """
    counts = {
        "failures": sum(check.outcome is Outcome.EXCEEDED for check in checks),
        "errors": sum(check.outcome is Outcome.UNTOLD for check in checks),
    }
    about = {"tests": str(len(checks)), **{name: str(count) for name, count in counts.items()}}
    suites = ElementTree.Element("testsuites", about)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": printable(run), **about})
    rests_on = ElementTree.SubElement(suite, "properties")
    for name, value in properties.items():
        ElementTree.SubElement(rests_on, "property", name=printable(name), value=printable(value))
    for check in checks:
        names = {"classname": f"fedleak.gate.{printable(run)}", "name": printable(check.name)}
        case = ElementTree.SubElement(suite, "testcase", names)
        if check.passed:
            ElementTree.SubElement(case, "system-out").text = printable(check.sentence)
        else:
            kind = "failure" if check.outcome is Outcome.EXCEEDED else "error"
            message = printable(check.sentence)
            ElementTree.SubElement(case, kind, type=check.outcome.value, message=message)
    ElementTree.indent(suites)
    publish(path, ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True))


def annotations(run: str, checks: Sequence[Check]) -> list[str]:
    """Returns a line for each check that did not pass, which GitHub shows beside a change."""
    title = _escaped(f"fedleak gate: {run}").replace(":", "%3A").replace(",", "%2C")
    return [
        f"::error title={title}::{_escaped(f'{check.name}: {check.outcome}: {check.sentence}')}"
        for check in checks
        if not check.passed
    ]


def _escaped(text: str) -> str:
    """Returns a text as GitHub's workflow commands take it; `printable` leaves no line end."""
    return printable(text).replace("%", "%25")
