"""The command that attacks one update of your own training."""

from pathlib import Path
from typing import Annotated

import typer

from fedleak.cli.display import console
from fedleak.util.errors import ConfigError
from fedleak.util.sanitise import markup


def attack_update(
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A folder or hub id with all weights it had.")
    ],
    facts: Annotated[
        list[str] | None,
        typer.Option(
            "--sent",
            metavar="KEY=VALUE",
            help="What the server knows of the update, such as num_examples=2; in TOML.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="sequence-classification or causal-lm; left out: as MODEL was saved."),
    ] = None,
    attack_: Annotated[
        str, typer.Option("--attack", help="A kind of attack, as fedleak list names it.")
    ] = "auto",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the attack, in TOML."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The private texts, one a line: scores the answer."),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts like them, one a line: what chance scores."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides all that is random.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write all of it as JSON.")
    ] = None,
) -> None:
    """Attack one update of your own training, and print what could be read of its texts.

    FILE is a file of the update, by parameter name: .safetensors, or what torch.save wrote (.pt,
    .pth, .bin), of which nothing is run. `--sent num_examples=2 --sent payload=delta --sent
    learning_rate=0.1` is what the server knows of it, by the fields of `fedleak.SentUpdate`: how
    many texts it has (left out: as many as in `--texts`), how it was made, and facts that are
    granted.

    The texts that it reads are private, and they are printed to a pipe or file, too.
    """
    import torch

    import fedleak
    from fedleak.cli import own_update
    from fedleak.config.loading import table_of
    from fedleak.running.own_update.update_files import read_update

    private = own_update.text_lines("--texts", texts)
    others = own_update.text_lines("--held-out", held_out)
    known = {"dropout": False, **table_of(facts or (), "--sent")}
    if private is not None and known.setdefault("num_examples", len(private)) != len(private):
        raise ConfigError(
            f"--sent num_examples={known['num_examples']}, but --texts has {len(private)}: give "
            "all texts that FILE is of, and leave num_examples out"
        )
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a folder: give a file")
    sent = fedleak.SentUpdate(**known)
    torch.set_num_threads(1)  # as in a worker: sums have one order, so results are repeatable
    with own_update.working(console) as tell:
        result = fedleak.attack(
            read_update(file),
            model,
            sent=sent,
            kind=attack_,
            settings=table_of(changes or ()),
            task=task,
            seed=seed,
            on_progress=tell,
        )
    scored = None
    if private is not None:
        scored = fedleak.score(result, private, held_out=others, seed=seed)
    own_update.show(result, scored, console, chance="builtin/notes" if others is None else "")
    if out is not None:
        own_update.write(result, scored, out)
        console.print(f"results: {markup(out)}", soft_wrap=True)
    own_update.refuse_failure(result)
