"""Training a prior from scratch: a small GPT-2 in a model's vocabulary, on sentences of a text.

Shapes: B sentences, T tokens of the longest, D width, M tokens to predict in the whole batch.
"""

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F

from fedleak.models import CAUSAL_LM, CLASSIFICATION, families, loading, pad
from fedleak.models.prior import Prior
from fedleak.util import plain_files
from fedleak.util.errors import ConfigError, FedleakError, unknown
from fedleak.util.rng import stream, stream_seed

_HELD_OUT = 0.02
_WARM_UP = 0.05
_LAST_RATE = 0.1
"""What the cosine ends at, as a part of the learning rate."""
_WEIGHT_DECAY = 0.1
_LARGEST_GRADIENT = 1.0
_BATCHES_OF_LIKE_LENGTH = 32
_TOKENISED_AT_A_TIME = 10_000


_SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))  # ends here, or with what closes after it
    (?<!\b[A-Z]\.)(?<!\b(?:Mr|Ms|Dr|St|Jr|Lt)\.)(?<!\bMrs\.)(?<!\bProf\.)
    \s+(?=["'(\[]?(?:[A-Z0-9]|<unk>))""",
    re.VERBOSE,
)
_PUNCTUATION = (
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r" ([,.;:!?%)\]]+)(?!\S)"), r"\1"),
    (re.compile(r"(?<!\S)([(\[]) "), r"\1"),
    (re.compile(r" (n't|'(?:s|re|ve|ll|d|m))\b"), r"\1"),
    (re.compile(r'(?<!\S)" ([^"]+) "(?!\w)'), r'"\1"'),
)


Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class PriorConfig:
    """How large the model is, and how it is trained.

    Attributes:
        layers, width, heads: Of the GPT-2.
        epochs: Passes over the sentences.
        steps: Batches, in place of the passes; None: whole passes.
        batch_size: Sentences in a step.
        learning_rate: AdamW's highest: it rises over the first 5 % and falls along a cosine.
        max_length: Tokens that a longer sentence is cut to, and the positions of the model.
        seed: Of the weights, the order of sentences and which are held back.
    """

    layers: Positive = 4
    width: Positive = 256
    heads: Positive = 4
    epochs: Positive = 1
    steps: Positive | None = None
    batch_size: Positive = 32
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    max_length: Annotated[int, Field(ge=2)] = 64
    seed: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(
                f"width = {self.width} cannot be divided among heads = {self.heads}: give a "
                f"multiple of {self.heads}, such as {-(-self.width // self.heads) * self.heads}"
            )


@dataclass(frozen=True)
class PriorText:
    """Sentences as a client of the model feeds them.

    Attributes:
        tokenizer: The model's.
        training: Token ids of each sentence to train on.
        held_out: Of each sentence to judge by.
    """

    tokenizer: Any
    training: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]


class PriorProgress(NamedTuple):
    """How far training is, and the mean loss of the latest batch in nats per token."""

    step: int
    steps: int
    loss: float


def sentences(text: str, *, unknown_token: str | None) -> list[str]:
    """Cuts a text into sentences, each of them once.

    A line is a paragraph; `= Headings =` are left out. A sentence ends at `.`, `!` or `?`, perhaps
    with a closing quote or bracket, before a space and a capital, a digit or an opening quote or
    bracket; but not after an initial ("J. Smith") or a short title ("Dr. Smith").

    Spaces that tokenised corpora such as WikiText have around punctuation are taken out, and
    its ` @-@ ` is `-`. A word that was replaced by `<unk>` is written as `unknown_token`; where a
    vocabulary has none (None), such sentences are left out.
    """
    kept: dict[str, None] = {}
    for line in text.splitlines():
        paragraph = line.strip()
        for spaced, written in _PUNCTUATION:  # as a writer puts it
            paragraph = spaced.sub(written, paragraph)
        if paragraph.startswith("=") and paragraph.endswith("="):
            continue
        for sentence in _SENTENCE_END.split(paragraph):
            if "<unk>" not in sentence:
                kept[sentence] = None
            elif unknown_token is not None:
                kept[sentence.replace("<unk>", unknown_token)] = None
    kept.pop("", None)
    return list(kept)


def read_sentences(text: Path, tokenizer: str, plan: PriorConfig) -> PriorText:
    """Reads a text file, and encodes its sentences as a client feeds them to a model.

    Every fiftieth sentence, and at least one, is held back at random.

    Args:
        text: In UTF-8.
        tokenizer: The model: a hub id, a folder, or `builtin/<name>`.
        plan: Has the length that sentences are cut to.

    Raises:
        ConfigError: No such model, or a text that cannot be read or has no two sentences.
    """
    named = f"--tokenizer {tokenizer!r}"
    config = loading.read_config(named, tokenizer)
    of_model = loading.read_tokenizer(named, tokenizer)
    family = families().get(config.model_type)
    if family is None:
        raise ConfigError(unknown("model family of --tokenizer", config.model_type, families()))
    try:
        content = plain_files.content(text, linked=True).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text} cannot be read ({error}): give a UTF-8 file") from error
    of_its_own = of_model.unk_token_id not in (of_model.eos_token_id, of_model.bos_token_id)
    texts = sentences(content, unknown_token=of_model.unk_token if of_its_own else None)
    if len(texts) < 2:
        raise ConfigError(
            f"--text {text} has {len(texts)} sentences: give a file with at least two, one to "
            "train on and one to hold back"
        )
    task = CAUSAL_LM if family.causal else CLASSIFICATION
    encoded = [
        tuple(ids[: plan.max_length])
        for start in range(0, len(texts), _TOKENISED_AT_A_TIME)
        for ids in family.encode(of_model, texts[start : start + _TOKENISED_AT_A_TIME], task)
    ]
    order = torch.randperm(len(encoded), generator=stream(plan.seed, "held out")).tolist()
    cut = max(1, round(_HELD_OUT * len(order)))
    return PriorText(
        of_model,
        tuple(encoded[i] for i in sorted(order[cut:])),
        tuple(encoded[i] for i in sorted(order[:cut])),
    )


def train(
    corpus: PriorText,
    plan: PriorConfig,
    device: torch.device,
    report: Callable[[PriorProgress], None] = lambda progress: None,
) -> tuple[Prior, float]:
    """Trains a GPT-2 from random weights.

    Returns:
        The prior, in the vocabulary of the corpus, and its mean negative log-likelihood of the
        sentences that were held back, in nats per predicted token.

    Raises:
        FedleakError: It diverged.
    """
    model = untrained(corpus.tokenizer, plan).to(device)
    steps = plan.steps or plan.epochs * -(-len(corpus.training) // plan.batch_size)
    decayed: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() > 1]}
    others = {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}
    optimiser = torch.optim.AdamW(
        [decayed, others], lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_at(step, steps))
    taken = batches(corpus.training, plan.batch_size, plan.seed)
    for step, batch in enumerate(itertools.islice(taken, steps), start=1):
        loss = prior_loss(model, *pad(batch, 0, device))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
        optimiser.step()
        rate.step()
        report(PriorProgress(step, steps, loss.item()))
    prior = Prior(model.eval().requires_grad_(False), corpus.tokenizer)
    nll = mean_nll(prior, corpus.held_out)
    if not math.isfinite(nll):
        raise FedleakError(
            f"training diverged with learning_rate = {plan.learning_rate}: give a smaller one"
        )
    return prior, nll


def untrained(tokenizer: Any, plan: PriorConfig) -> Any:
    """Returns the GPT-2 that training starts from.

    It has no dropout: one pass over a text that a small model cannot learn by heart needs none.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        n_embd=plan.width,
        n_layer=plan.layers,
        n_head=plan.heads,
        n_positions=plan.max_length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.cls_token_id if begin is None else begin,
        eos_token_id=tokenizer.sep_token_id if end is None else end,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        # Only this generator: torch.manual_seed would reseed the GPUs' too.
        torch.default_generator.manual_seed(stream_seed(plan.seed, "weights"))
        return GPT2LMHeadModel(config)


def mean_nll(prior: Prior, sequences: Sequence[Sequence[int]]) -> float:
    """Returns the mean negative log-likelihood over all tokens that a prior predicts in them."""
    ids_NT, mask_NT = pad(sequences, 0, prior.device)
    predicted_N = mask_NT.sum(1) - 1
    total = (prior.nll(ids_NT, mask_NT).double() * predicted_N).sum() / predicted_N.sum()
    return total.item()


def save(prior: Prior, folder: Path) -> None:
    """Writes config, weights and tokenizer as transformers does."""
    module: Any = prior.module
    module.save_pretrained(folder)
    prior.tokenizer.save_pretrained(folder)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a folder to write to; it gets its name when all is written, and is removed otherwise.

    Raises:
        ConfigError: The name is taken, or nothing can be written there.
        FedleakError: The disk is full, or fails.
    """
    if path.exists():
        raise ConfigError(f"--out {path} is there already: give another name, or remove it first")
    part = path.absolute().with_name(f".{path.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be made ({error}): give another name") from error
    try:
        yield part
        part.rename(path)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FedleakError(
            f"--out {path} cannot be written ({reason}): mend that and give the same command again"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def device(name: str | None) -> torch.device:
    """Returns the device of that name, which must work; None: the first GPU, else the CPU.

    Raises:
        ConfigError: There is no such device.
    """
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).tolist()
        return torch.device(name)
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"--device {name!r} is not on this machine: give cpu or cuda:0"
        ) from error


def batches(
    sequences: Sequence[Sequence[int]], size: int, seed: int
) -> Iterator[list[Sequence[int]]]:
    """Yields batches for ever, each pass in another order; within one, lengths are alike."""
    for epoch in itertools.count():
        rng = stream(seed, "order", epoch)
        shuffled = torch.randperm(len(sequences), generator=rng).tolist()
        window = _BATCHES_OF_LIKE_LENGTH * size
        order = [
            i
            for start in range(0, len(shuffled), window)
            for i in sorted(shuffled[start : start + window], key=lambda i: len(sequences[i]))
        ]
        starts = range(0, len(order), size)
        for batch in torch.randperm(len(starts), generator=rng).tolist():
            yield [sequences[i] for i in order[starts[batch] : starts[batch] + size]]


def prior_loss(model: Any, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns the mean loss in nats per predicted token; only those get logits."""
    # Padding comes last, so no real token sees any, and attention needs no mask.
    hidden_BTD = model.transformer(ids_BT[:, :-1], use_cache=False).last_hidden_state
    real_BT = mask_BT[:, 1:] == 1
    logits_MV = model.lm_head(hidden_BTD[real_BT])
    return F.cross_entropy(logits_MV, ids_BT[:, 1:][real_BT])


def rate_at(step: int, steps: int) -> float:
    """Returns the part of the learning rate that step 0, 1, ... of `steps` takes."""
    warm_up = max(1, round(_WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
