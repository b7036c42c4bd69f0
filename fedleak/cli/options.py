"""Options and arguments that several commands have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedleak.cli.completion import experiment_files, run_directories
from fedleak.util.shipped import shipped

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; the value is TOML."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move earlier results of this name aside.")]
Retry = Annotated[bool, typer.Option("--retry", help="Try failed attacks again.")]
Texts = Annotated[bool, typer.Option("--texts", help="Print private texts to a pipe or file, too.")]

AllowCommands = Annotated[
    bool,
    typer.Option(
        "--allow-commands",
        help="Let programs run, and a Ray cluster be used, that somebody else has named in there.",
    ),
]

# The text of a command describes its arguments: Typer 0.20 with Click 8.5 shows no help of them,
# and Flower does not allow a later Typer.
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", autocompletion=run_directories, hidden=True)
]
RunPaths = Annotated[
    list[Path], typer.Argument(metavar="RUN...", autocompletion=run_directories, hidden=True)
]
File = Annotated[Path, typer.Argument(metavar="FILE", autocompletion=experiment_files, hidden=True)]
Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE]...", autocompletion=experiment_files, hidden=True),
]

QUICKSTART = [shipped("quickstart-llama.toml"), shipped("quickstart-gpt2.toml")]
PRESET = [shipped("preset.toml")]


def by_key(changes: Sequence[str]) -> dict[str, str]:
    """Returns each change of `--set` by the key that it sets."""
    return {change.partition("=")[0].strip(): change for change in changes}


def files_or_shipped(files: Sequence[Path] | None, changes: Sequence[str]) -> Sequence[Path]:
    """Returns the files; without one, the experiment of a preset or those of the quickstart."""
    return files or (PRESET if "preset" in by_key(changes) else QUICKSTART)
