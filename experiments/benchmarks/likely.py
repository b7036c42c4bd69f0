"""How often `auto` calls a text likely that is not in the update, and one that is.

    python experiments/benchmarks/likely.py [--kinds noise other] [--models bert-tiny] [--updates 8]

`likely` says that a guess explains more of an update than any text does by chance. Updates that
hold nothing of the guessed kind:

  noise     Gaussian noise alone, as large as a gradient
  shuffled  a real gradient, the numbers of each tensor in a random order
  other     the gradient of a model with other weights, on two and four real texts; both embedding
            gradients give a single one away, whatever the weights
  hidden    a real gradient under noise of 300 root mean squares of it
  lora      adapters of rank 4 in round 1, when half of the matrices are zero, as they are sent:
            they hold something of their texts, but what `auto` reads is not the texts

Updates that hold their texts, under noise of so many root mean squares: `noise-0.3`, `noise-1`, ...
Those say with what power a text is called likely that was read, or nearly: ROUGE-L of 90 and more.

Texts are notes (built-in models) and CoLA sentences (MiniLM), one, two and four in a batch; lengths
and labels are granted, so that the attack has guesses where it else would abstain. It has
`--seconds` of CPU time. Prints a line per kind: how many guesses there were, and the share that is
called likely, of all, of those that were read, and of the others, with Wilson's 95 % interval. An
answer without a guess says nothing of any text, and counts as so many texts that are not likely.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from arguments import parser_of, with_assets
from material import gradient_of, keep, model_of, root_mean_square, save_random, timed
from subspace_attacks import read_corpus

from fedleak import data
from fedleak.attacks import clock
from fedleak.attacks.auto.attack import Auto
from fedleak.audit.metrics.intervals import wilson
from fedleak.audit.metrics.rouge import rouge
from fedleak.data.notes import notes
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel, builtin
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation
from fedleak.util.rng import stream

NULL = ("noise", "shuffled", "other", "lora", "hidden")
POWER = ("noise-0.1", "noise-0.3", "noise-1", "noise-3", "noise-10")
MODELS = {
    "bert-tiny": CLASSIFICATION,
    "gpt2-tiny": CAUSAL_LM,
    "llama-tiny": CAUSAL_LM,
    "minilm": CLASSIFICATION,
}
SIZES = (1, 2, 4)
HIDDEN = 300.0
READ = 90.0
TEXTS = 400


class Text(NamedTuple):
    """A text of an answer.

    Attributes:
        kind, model, number: Of the update.
        likely: What is said of it.
        rougeL: Its best with a text of the batch, in per cent; None: there was no guess.
        compared: It was compared with random texts: there was time for it.
        seconds: CPU time of the attack on the update.
    """

    kind: str
    model: str
    number: int
    likely: bool
    rougeL: float | None
    compared: bool
    seconds: float


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", default=[*NULL, *POWER])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--updates", type=int, default=10, help="of each kind and model")
    parser.add_argument("--first", type=int, default=0, help="number of the first update")
    parser.add_argument("--seconds", type=float, default=3.0, help="for an update")
    parser.add_argument("--json", type=Path, help="keep the texts in this file")
    args = with_assets(parser)
    torch.set_num_threads(1)
    clock.now = time.process_time
    texts: list[Text] = []
    for name in args.models:
        for kind in args.kinds:
            client = load(name, kind == "other", kind == "lora", args)
            server = load(name, False, kind == "lora", args) if kind == "other" else client
            for number in range(args.first, args.first + args.updates):
                texts += ask(kind, name, number, client, server, args)
                keep(texts, args.json)
            print(
                line(kind, name, [t for t in texts if (t.kind, t.model) == (kind, name)]),
                flush=True,
            )
    for kinds, held in ((NULL, "nothing"), (POWER, "its texts")):
        some = [text for text in texts if text.kind in kinds]
        if some:
            print(line(f"holds {held}", "all", some))


def load(name: str, other: bool, lora: bool, args: Any) -> LanguageModel:
    """Returns a model, with other weights or with adapters if they are wanted."""
    source = (
        builtin.folder(name) if name in builtin.BUILTIN else args.assets / "models/minilm-l6-h384"
    )
    with TemporaryDirectory() as folder:
        if other:
            save_random(source, folder, MODELS[name], seed=12345)
        adapters = Lora(rank=4, alpha=8.0) if lora else None
        return model_of(folder if other else source, MODELS[name], int(other), adapters)


def corpus(name: str, args: Any) -> Sequence[str]:
    """Returns texts."""
    if name in builtin.BUILTIN:
        return [note.text for note in notes(TEXTS, seed=3)]
    return read_corpus(args.assets, 3, TEXTS).texts


def observed(
    kind: str, name: str, number: int, model: LanguageModel, args: Any
) -> tuple[Observation, list[str]]:
    """Returns what the server sees of a batch, and its texts."""
    sizes = SIZES[1:] if kind == "other" else SIZES
    size = sizes[number % len(sizes)]
    drawn, rng = corpus(name, args), stream(number, kind, name)
    batch = [drawn[(4 * number + i) % len(drawn)] for i in range(size)]
    ids = data.tokenise(batch, model.encode, limit=model.max_length, max_length=24)
    sent = local_update_(model, ids, [i % 2 for i in range(size)], gradient_of(size), seed=number)
    rms = root_mean_square(sent.tensors)

    def noise(value: torch.Tensor) -> torch.Tensor:
        drawn: torch.Tensor = rms * torch.randn(value.shape, generator=rng)
        return drawn

    def shuffled(value: torch.Tensor) -> torch.Tensor:
        return value.flatten()[torch.randperm(value.numel(), generator=rng)].view(value.shape)

    if kind == "noise":
        sent = sent.changed(noise)
    elif kind == "shuffled":
        sent = sent.changed(shuffled)
    elif kind == "hidden":
        sent = sent.changed(lambda value: value + HIDDEN * noise(value))
    elif kind.startswith("noise-"):
        scale = float(kind.removeprefix("noise-"))
        sent = sent.changed(lambda value: value + scale * noise(value))
    order = sorted(range(size), key=lambda i: -len(ids[i]))
    known = Knowledge(
        local_steps=1,
        dropout=False,
        lengths=tuple(len(ids[i]) for i in order),
        labels=tuple(i % 2 for i in order) if model.task == CLASSIFICATION else None,
    )
    return Observation(round=1, client=number, update=sent, knowledge=known), batch


def ask(
    kind: str, name: str, number: int, client: LanguageModel, server: LanguageModel, args: Any
) -> list[Text]:
    """Attacks an update, and returns the texts of the answer."""
    seen, batch = observed(kind, name, number, client, args)
    answer, seconds = timed(Auto(seconds=args.seconds), seen, server, stream(number, "auto"))
    likely = answer.diagnostics.get("likely", [False] * seen.update.num_examples)
    guesses = (answer.sequences or ((),) * seen.update.num_examples)[: len(likely)]
    return [
        Text(
            kind,
            name,
            number,
            is_likely,
            max(rouge(server.decode(ids), text).rougeL for text in batch) if ids else None,
            "nats" in answer.diagnostics,
            seconds,
        )
        for ids, is_likely in zip(guesses, likely, strict=True)
    ]


def line(kind: str, name: str, texts: Sequence[Text]) -> str:
    """Returns how many texts are called likely, of all and of those that were read."""

    def share(some: Sequence[Text]) -> str:
        if not some:
            return "-"
        count = sum(text.likely for text in some)
        rate = wilson(count, len(some))
        return f"{count}/{len(some)} [{100 * rate.low:.0f}, {100 * rate.high:.0f}]"

    guesses = [text for text in texts if text.rougeL is not None]
    read = [text for text in guesses if text.rougeL is not None and text.rougeL >= READ]
    others = [text for text in texts if text not in read]
    return (
        f"{kind:<16} {name:<10} {len(guesses):>4} guesses, "
        f"{sum(text.compared for text in guesses):>4} compared  likely {share(texts):<20} "
        f"of those read {share(read):<20} of the others {share(others)}"
    )


if __name__ == "__main__":
    main()
