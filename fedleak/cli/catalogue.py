"""What `fedleak list` shows: what an experiment file can name, and where each comes from."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from types import ModuleType

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from fedleak import attacks, data, defenses, detectors, models
from fedleak.attacks import server_modes
from fedleak.models import builtin
from fedleak.util.plugins import OWN, Discovered, discover
from fedleak.util.sanitise import markup

UNCHECKED = (
    "Attacks of other packages are not checked: fedleak's import contract, by which an attack "
    "cannot see the truth, covers fedleak's own files alone."
)


def show(console: Console) -> None:
    """Prints attacks, defenses, models and data sets, then what cannot be used, and why."""
    families, packages = models.found_families(), (attacks, defenses, server_modes, detectors)
    sections: dict[str, Mapping[str, str]] = {}
    for package in packages:
        sections |= _kinds_by_heading(package)
    sections |= _models(families) | {"data": _data()}
    widest = max(len(name) for lines in sections.values() for name in lines)
    for heading, lines in sections.items():
        console.print(f"[bold]{markup(heading)}[/]")
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(min_width=min(widest + 2, 30))
        for name, about in sorted(lines.items()):
            table.add_row(f"  {markup(name)}", markup(about))
        console.print(table)
    discoveries = (*map(discover, packages), families)
    if broken := dict(chain(*(discovery.broken.items() for discovery in discoveries))):
        console.print("[bold]cannot be used[/]")
        for name, reason in sorted(broken.items()):
            console.print(Padding(markup(f"{name}: {reason}"), (0, 0, 0, 2)))
    if discover(attacks).foreign():
        console.print(f"[yellow]note:[/] {markup(UNCHECKED)}")


def _kinds_by_heading(package: ModuleType) -> dict[str, dict[str, str]]:
    """Returns the kinds of a package with a line about each, under a heading for each origin."""
    discovery, section = discover(package), package.__name__.rpartition(".")[2]
    sections: dict[str, dict[str, str]] = defaultdict(dict)
    for kind, cls in discovery.kinds.items():
        sections[_heading(section, discovery.origins[kind])][kind] = _first_line(cls)
    return sections


def _models(families: Discovered) -> dict[str, dict[str, str]]:
    """Returns the built-in models and the loadable families, under a heading for each origin."""
    by_origin: dict[str, list[str]] = defaultdict(list)
    for name in models.families():
        by_origin[families.origins[name]].append(name)
    sections = {
        _heading("models", origin): {
            "HUB ID or FOLDER": f"any model of the families {', '.join(sorted(names))}"
        }
        for origin, names in by_origin.items()
    }
    own = {f"builtin/{name}": about for name, about in builtin.BUILTIN.items()}
    sections[_heading("models", OWN)] |= own
    return sections


def _data() -> Mapping[str, str]:
    return (
        {f"builtin/{name}": about for name, about in data.BUILTIN.items()}
        | {name: known.about for name, known in data.HUB.items()}
        | {"HUB ID or FILE": "any hub data set; a csv, tsv, jsonl or parquet file"}
    )


def _heading(section: str, origin: str) -> str:
    return f"{section.replace('_', ' ')} from {origin}"


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]
