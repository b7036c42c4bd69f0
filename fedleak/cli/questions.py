"""Five questions in a terminal, from which an experiment file is made."""

from pathlib import Path
from typing import Any

import click
import tomli_w
import typer

from fedleak.cli.display import console
from fedleak.util.errors import ConfigError
from fedleak.util.nested import merged
from fedleak.util.sanitise import markup

TEXTS = ("text", "sentence", "review", "content", "message", "body", "note", "comment")
CLASSES = ("label", "class", "category", "target", "sentiment")
"""Usual names of columns, in lower case; the user is asked about other names."""

TRAINING: dict[str, dict[str, Any]] = {
    "gradients": {
        "federation": {"algorithm": "fedsgd", "server_optimiser": "adam", "learning_rate": 5e-4}
    },
    "epochs": {"federation": {"algorithm": "fedavg", "learning_rate": 0.05}},
    "adapters": {
        "federation": {"algorithm": "fedavg", "learning_rate": 1e-3},
        "client": {"optimiser": "adamw"},
    },
}
"""How clients train: one gradient a round, local epochs of SGD, or LoRA adapters with AdamW."""

DEFENSES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "dp_sgd": [{"kind": "dp_sgd", "epsilon": 8.0}],
    "gaussian_noise": [{"kind": "gaussian_noise", "relative": 0.1}],
    "secure_sum": [{"kind": "secure_sum"}],
}

SHAPE = {"clients": 4, "rounds": 3, "batch_size": 2}
"""The shape of the federation, which the user can change in the file."""


def ask(minutes: float, data: Path | None = None) -> tuple[Path, float]:
    """Asks what is trained, how, and for how long it may be audited, and writes the file.

    Args:
        minutes: The minutes if the user enters none.
        data: The file of texts; None: it is asked for, too.

    Returns:
        The experiment file, and the minutes.

    Raises:
        ConfigError: There is no such file of texts.
    """
    if data is None:
        data = typer.prompt(
            "1. Texts that clients train on (a csv, tsv, jsonl or parquet file)",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
        )
    elif not data.is_file():
        raise ConfigError(f"{str(data)!r}: there is no such file: check the path")
    columns = _columns(data)
    start = "builtin/bert-tiny" if "label" in columns else "builtin/llama-tiny"
    model = typer.prompt("2. Model (a hub id, a folder, or a built-in)", default=start)
    training = _choice("3. How clients train", list(TRAINING))
    defense = _choice("4. Defense", list(DEFENSES))
    minutes = typer.prompt(
        "5. Minutes for the audit", default=minutes, type=click.FloatRange(min=1)
    )
    tables = {
        "name": _name(data),
        "model": _model(model, "label" in columns, training),
        "data": {"name": str(data.absolute()), **columns},
        **merged({"federation": SHAPE}, TRAINING[training]),
        "defense": DEFENSES[defense],
    }
    path = Path(f"{tables['name']}.toml")
    path.write_text(
        "# Made by `fedleak audit`. Change it to what you will run: clients, rounds, batch size.\n"
        "# docs/experiment-file.md has every key.\n" + tomli_w.dumps(tables)
    )
    console.print(f"experiment file: {markup(path)}")
    return path, minutes


def _choice(question: str, choices: list[str]) -> str:
    answer: str = typer.prompt(question, default=choices[0], type=click.Choice(choices))
    return answer


def _model(name: str, classifies: bool, training: str) -> dict[str, Any]:
    """Returns the table of the model."""
    path = Path(name)
    table: dict[str, Any] = {"name": str(path.absolute()) if path.is_dir() else name}
    if not classifies:
        table["task"] = "causal-lm"
    return table | ({"lora": {"rank": 8}} if training == "adapters" else {})


def _columns(data: Path) -> dict[str, str]:
    """Returns the columns of texts and of classes; asks if their names do not show them."""
    from fedleak.data.files import TableFile

    file = TableFile(path=data)
    header = file.header() if file.separated else []
    by_name = {name.strip().lower(): name for name in header}
    text = next((by_name[name] for name in TEXTS if name in by_name), None)
    label = next((by_name[name] for name in CLASSES if name in by_name), None)
    if text is None:
        named = f" ({', '.join(header)})" if header else ""
        text = typer.prompt(f"   Its column of texts{named}")
        label = typer.prompt("   Its column of classes; none: next-token training", default="none")
    return {"text": text} if label in (None, "none") else {"text": text, "label": label}


def _name(data: Path) -> str:
    """Returns a name, made from the name of the data, that no file has yet."""
    import re

    stem = re.sub(r"[^A-Za-z0-9._-]", "-", data.stem).lstrip("._-")[:40] or "audit"
    number = 1
    while Path(name := stem if number == 1 else f"{stem}-{number}").with_suffix(".toml").exists():
        number += 1
    return name
