"""The command that attacks one update of your own training."""

from pathlib import Path
from typing import Annotated

import typer

from fedleak.cli.display import console
from fedleak.util.errors import ConfigError, unknown
from fedleak.util.sanitise import markup


def attack_update(
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A folder or hub id with all weights it had.")
    ],
    examples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Texts that it is of; left out: as many as in --texts."),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="What FILE holds: gradient, delta or weights.")
    ] = "gradient",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the client, for delta and weights.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Local steps of the client.")] = 1,
    optimiser: Annotated[
        str, typer.Option(help="Of the client: sgd, adam, adamw or other.")
    ] = "sgd",
    weight_decay: Annotated[float, typer.Option(help="Of the client's optimiser.")] = 0.0,
    dropout: Annotated[bool, typer.Option("--dropout", help="The client had dropout on.")] = False,
    task: Annotated[
        str | None,
        typer.Option(help="sequence-classification or causal-lm; left out: as MODEL was saved."),
    ] = None,
    loss: Annotated[
        str, typer.Option(help="Of a classifier: cross-entropy or squared.")
    ] = "cross-entropy",
    attack_: Annotated[
        str, typer.Option("--attack", help="A kind of attack, as fedleak list names it.")
    ] = "auto",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the attack, in TOML."),
    ] = None,
    knows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FACT=VALUE",
            help="A fact that the attacker is granted: batch_size, labels, lengths, noise_scale.",
        ),
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
    .pth, .bin), of which nothing is run.

    The texts that it reads are private, and they are printed to a pipe or file, too.
    """
    import torch

    import fedleak
    from fedleak.api.update_files import read_update
    from fedleak.cli import own_update
    from fedleak.training.observation import GRANTABLE

    private = own_update.text_lines("--texts", texts)
    others = own_update.text_lines("--held-out", held_out)
    if examples is None and private is None:
        raise ConfigError("--examples is missing: give the number of texts that FILE is of")
    if None not in (examples, private) and examples != len(private or ()):
        raise ConfigError(
            f"--examples {examples}, but --texts has {len(private or ())}: give all texts that "
            "FILE is of, and leave --examples out"
        )
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a folder: give a file")
    facts = own_update.values("--knows", knows or ())
    if strangers := sorted(facts.keys() - GRANTABLE):
        raise ConfigError(f"--knows: {unknown('fact', strangers[0], GRANTABLE)}")
    sent = fedleak.SentUpdate(
        num_examples=len(private or ()) if examples is None else examples,
        payload=kind,
        loss=loss,
        learning_rate=lr,
        local_steps=steps,
        optimiser=optimiser,
        weight_decay=weight_decay,
        dropout=dropout,
        **facts,
    )
    torch.set_num_threads(1)  # as in a worker: sums have one order, so results are repeatable
    with own_update.working(console) as tell:
        result = fedleak.attack(
            read_update(file),
            model,
            sent=sent,
            kind=attack_,
            settings=own_update.values("--set", changes or ()),
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
