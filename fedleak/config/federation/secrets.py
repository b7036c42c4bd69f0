"""Secrets: made-up texts that are planted in clients' data to find out what a model gives away.

The texts that clients get and their twins, which nobody trains on, are drawn in the same way: a
model that learnt nothing of the planted texts cannot tell which they are (the null of Carlini et
al., "The Secret Sharer", 2019).
"""

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product, takewhile

import torch

from fedleak import data
from fedleak.config.experiment import Experiment
from fedleak.config.tables import PublishedTable
from fedleak.models import LanguageModel
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

FEWEST_WORDS = 50
"""The fewest words to draw secrets from: with fewer words, secrets are much alike."""

TRIES = 20
"""How many texts are drawn at most for each one needed, until enough have different beginnings."""

NOBODY = -1
"""The client of a twin: no client has it."""

_SLOT = re.compile(r"\{(word|digit)\}")
_WORD = re.compile(r"[^\W\d_]{3,12}")


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A text that begins with a prompt and goes on with a secret.

    Attributes:
        ids: Its tokens, special ones included.
        prompt: How many of them are the beginning.
        client: The client whose data contains it; `NOBODY`: no client.
        count: How many times the data contains it; 0: it is a twin.
    """

    ids: tuple[int, ...]
    prompt: int
    client: int
    count: int


def secrets(
    experiment: Experiment, held_out: Iterable[Sequence[int]], model: LanguageModel
) -> tuple[Secret, ...]:
    """Returns the secrets of an experiment, the planted ones first; none without `[published]`.

    Args:
        experiment: Sets how many, and what they look like.
        held_out: Token ids of texts that no client has; secrets are made of their words.
        model: With its tokenizer.

    Raises:
        ConfigError: Too few words, texts that begin alike, or a text that is too long.
    """
    table = experiment.published
    if table is None:
        return ()
    clients = table.clients or range(experiment.federation.clients)
    places = [*product(clients, table.counts, range(table.secrets))]
    words = sorted({word for ids in held_out for word in _WORD.findall(model.decode(ids).lower())})
    if len(words) < FEWEST_WORDS:
        raise ConfigError(
            f"published: secrets are made of words of the held-out texts, which have {len(words)} "
            f"different ones: raise data.held_out until there are {FEWEST_WORDS}"
        )
    drawn = _drawn(table, experiment.seed, words, len(places) + table.twins)
    prompts, sequences = (
        data.tokenise(texts, model.encode, limit=model.max_length, max_length=None)
        for texts in zip(*drawn, strict=True)
    )
    places += [(NOBODY, 0, 0)] * table.twins
    return tuple(
        Secret(ids=ids, prompt=_common(ids, prompt), client=client, count=count)
        for ids, prompt, (client, count, _) in zip(sequences, prompts, places, strict=True)
    )


def _drawn(
    table: PublishedTable, seed: int, words: Sequence[str], wanted: int
) -> list[tuple[str, str]]:
    """Returns pairs of a beginning and a whole text; all beginnings differ."""
    rng, among = stream(seed, "secrets"), {"word": words, "digit": string.digits}

    def draw(slot: re.Match[str]) -> str:
        choices: Sequence[str] = among[slot[1]]
        return choices[int(torch.randint(len(choices), (), generator=rng))]

    by_beginning: dict[str, str] = {}
    for _ in range(TRIES * wanted):
        beginning, secret = (_SLOT.sub(draw, text) for text in (table.beginning, table.secret))
        by_beginning.setdefault(beginning, f"{beginning} {secret}")
        if len(by_beginning) == wanted:
            return [*by_beginning.items()]
    raise ConfigError(
        f"published.beginning = {table.beginning!r} gives {len(by_beginning)} different beginnings "
        f"in {TRIES * wanted} draws, and {wanted} are needed: give it more slots"
    )


def _common(first: Iterable[int], second: Iterable[int]) -> int:
    """Returns how many tokens two texts begin with alike: what an end mark follows is not one."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
