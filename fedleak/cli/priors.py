"""The command that trains a prior."""

from pathlib import Path
from typing import Annotated

import typer

from fedleak.cli.display import console, prior_progress
from fedleak.cli.mistakes import INTERRUPTED, end
from fedleak.cli.options import Set
from fedleak.util.sanitise import markup


def train_prior(
    text: Annotated[Path, typer.Option(help="A text file; a line is a paragraph.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="MODEL", help="The model whose vocabulary the prior gets.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("prior"),
    changes: Set = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda:0; left out: a GPU if there is one.")
    ] = None,
) -> None:
    """Train a small GPT-2 on a text, as a language-model prior for attacks.

    `--set KEY=VALUE` changes how large it is (layers, width, heads) and how it is trained: epochs,
    or steps in their place; batch_size, in sentences; learning_rate, the highest; max_length, in
    tokens, to which longer sentences are cut; seed.
    """
    from fedleak.config.components import build
    from fedleak.config.loading import table_of
    from fedleak.models import prior_training

    plan = build("prior", prior_training.PriorConfig, table_of(changes or ()))
    try:
        on = prior_training.device(device)
        with prior_training.new_folder(out) as folder:
            corpus = prior_training.read_sentences(text, tokenizer, plan)
            with prior_progress(console) as show:
                prior, nll = prior_training.train(corpus, plan, on, show)
            prior_training.save(prior, folder)
    except KeyboardInterrupt as error:
        end("stopped; nothing was kept", INTERRUPTED, error)
    console.print(
        f"{nll:.2f} nats per token on {len(corpus.held_out):,} of "
        f"{len(corpus.training) + len(corpus.held_out):,} sentences, which were held back"
    )
    console.print(f"prior: {markup(out)}", soft_wrap=True)
