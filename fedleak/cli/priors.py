"""The command that trains a prior."""

from pathlib import Path
from typing import Annotated

import typer

from fedleak.cli.display import console, prior_progress
from fedleak.cli.mistakes import INTERRUPTED, end
from fedleak.util.sanitise import markup


def train_prior(
    text: Annotated[Path, typer.Option(help="A text file; a line is a paragraph.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="MODEL", help="The model whose vocabulary the prior gets.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("prior"),
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Hidden size.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    epochs: Annotated[int, typer.Option(help="Passes over the text.")] = 1,
    steps: Annotated[
        int | None, typer.Option(help="Batches to train on, in place of --epochs.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sentences in a batch.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="The highest.")] = 1e-3,
    max_length: Annotated[int, typer.Option(help="Tokens; longer sentences are cut.")] = 64,
    seed: Annotated[int, typer.Option(help="Decides all that is random.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda:0; left out: a GPU if there is one.")
    ] = None,
) -> None:
    """Train a small GPT-2 on a text, as a language-model prior for attacks."""
    from fedleak.models import prior_training

    try:
        plan = prior_training.PriorConfig(
            layers=layers,
            width=width,
            heads=heads,
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            max_length=max_length,
            seed=seed,
        )
        on = prior_training.device(device)
        with prior_training.new_folder(out) as folder:
            corpus = prior_training.read_sentences(text, tokenizer, plan)
            with prior_progress(console) as show:
                trained = prior_training.train(corpus, plan, on, show)
            prior_training.save(trained.prior, folder)
    except KeyboardInterrupt as error:
        end("stopped; nothing was kept", INTERRUPTED, error)
    console.print(
        f"{trained.nll:.2f} nats per token on {len(corpus.held_out):,} of "
        f"{len(corpus.training) + len(corpus.held_out):,} sentences, which were held back"
    )
    console.print(f"prior: {markup(out)}", soft_wrap=True)
