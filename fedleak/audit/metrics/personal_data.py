"""Finds personal data in private texts, and which of it an attack read.

Rules find what has a typical form: mail and web addresses, dates, numbers, streets. Names have no
such form, least of all in texts that a tokenizer has put in lower case: they are looked for only
with a given list, or by Presidio with a model of spaCy. Texts are searched as the tokenizer decodes
their tokens, which may put a space between a word and the full stop or sign behind it.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedleak.config.tables import AuditTable
from fedleak.models import LanguageModel
from fedleak.util.errors import ConfigError
from fedleak.util.plain_files import MOST_SETTINGS, content

_TLD = r"(?:(?:co|ac|org|gov) ?\. ?(?:uk|jp|nz|za|in)|com|org|net|edu|gov|info|biz|[a-z]{2})\b"
_MONTH = (
    r"(?:jan(?:uary|uar)?|feb(?:ruary|ruar)?|mar(?:ch)?|märz|apr(?:il)?|may|mai|june?|juni|july?"
    r"|juli|aug(?:ust)?|sept?(?:ember)?|o[ck]t(?:ober)?|nov(?:ember)?|de[cz](?:ember)?)\b\.?"
)
_NO_STREET = r"(?!(?:the|an?|this|that|each|every|on|in|of|down|along|at|by|per|and|or|to)\b)"

_HOST = r"\w{1,63}(?: ?[.-] ?\w{1,63}){0,8}?"

_FORMS: Sequence[tuple[str, str]] = (
    ("mail address", r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"),
    ("mail address", rf"\w{{1,64}}(?:(?: ?[.+-] ?| _ )\w{{1,64}})? ?@ ?{_HOST} ?\. ?{_TLD}"),
    ("web address", r"(?:https?://|www\.)[^\s,;]+[^\s,;.)]"),
    ("web address", rf"(?:https? ?: ?/ ?/|www ?\.) ?{_HOST} ?\. ?{_TLD}(?: ?/ ?[\w-]+)*"),
    ("IBAN", r"\b[a-z]{2}\d\d ?[a-z\d]{4}(?: ?\d{4}){1,6}(?: ?\d{1,4})?\b"),
    ("card number", r"\b\d(?:[ -]{0,3}\d){12,18}\b"),
    ("IP address", r"\b\d{1,3}(?: ?\. ?\d{1,3}){3}\b"),
    ("date", r"\b\d{1,2} ?([./-]) ?\d{1,2} ?\1 ?(?:\d{4}|\d{2})\b"),
    ("date", r"\b\d{4} ?([./-]) ?\d{1,2} ?\1 ?\d{1,2}\b"),
    ("date", rf"\b\d{{1,2}}(?:st|nd|rd|th| ?\.)? (?:of )?{_MONTH}(?: ?,? ?\d{{4}}\b)?"),
    ("date", rf"\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b(?: ?,? ?\d{{4}}\b)?"),
    (
        "street",
        rf"\b\d{{1,5}} ?[a-z]? (?:{_NO_STREET}[\w'-]{{1,32}} ){{1,3}}"
        r"(?:street|avenue|road|lane|boulevard|st|ave|rd|blvd)\b",
    ),
    (
        "street",
        r"\b[\w-]{0,32}(?:straße|strasse|str ?\.|gasse|allee|platz|weg) ?\d{1,4} ?[a-z]?\b",
    ),
    ("number", r"(?:\+ ?)?(?:\( ?)?\b\d(?:[ ()/.-]{0,3}\d){5,63}\b"),
)
"""Kinds and how they look, the surer ones first. Repetitions are bounded, because a client may
write a text on which an unbounded one takes hours."""

RULES = [(kind, re.compile(form, re.IGNORECASE)) for kind, form in _FORMS]


_CHECKED = 12
"""Digits and letters that an IBAN or a card number has at least."""


class Span(NamedTuple):
    """A piece of personal data in a text: its kind, and where it begins and ends."""

    kind: str
    start: int
    end: int


Recogniser = Callable[[str], Iterable[Span]]
"""Finds personal data in a text; the surer ones first, where two overlap."""


@dataclass(frozen=True)
class Item:
    """A piece of personal data in a private text.

    Attributes:
        kind: Such as `mail address`.
        place: The place of the text in its batch.
        ids: Its tokens.
    """

    kind: str
    place: int
    ids: tuple[int, ...]


def recogniser(table: AuditTable, model: LanguageModel) -> Recogniser:
    """Returns what finds personal data: rules, the user's own list, and Presidio where asked for.

    Args:
        table: Of the experiment.
        model: For its tokenizer, which may change how a listed name is written.

    Raises:
        ConfigError: Presidio or its model is not installed, or the list cannot be read.
    """
    if table.personal_data == "none":
        return lambda text: ()
    finders: list[Recogniser] = [by_rules]
    if table.names is not None:
        finders.insert(0, _listed(Path(table.names), model))
    if table.personal_data == "presidio":
        finders.append(_presidio(table.spacy_model))
    return lambda text: (span for finder in finders for span in finder(text))


def looked_for(table: AuditTable) -> str:
    """Returns what is looked for, in a sentence."""
    if table.personal_data == "none":
        return "No personal data was looked for (audit.personal_data)."
    sources = [
        "mail, web and IP addresses, IBANs, card numbers, dates, streets and numbers of six or "
        "more digits by rules",
        *(["the lines of the list of names"] if table.names else []),
        *([f"what Presidio finds with {table.spacy_model}"] * (table.personal_data == "presidio")),
    ]
    sentence = f"Looked for: {'; '.join(sources)}."
    if table.personal_data == "presidio":
        return sentence
    other = "Other names" if table.names else "Names"
    return f"{sentence} {other} of people and places were not looked for."


def by_rules(text: str) -> Iterator[Span]:
    """Yields what rules find; where two overlap, the surer one comes first."""
    for kind, form in RULES:
        for match in form.finditer(text):
            if _is_number_of(kind, match[0]):
                yield Span(kind, match.start(), match.end())


def _is_number_of(kind: str, words: str) -> bool:
    """Whether the check digits of an IBAN (ISO 13616) or a card (Luhn, ISO 7812) are right."""
    digits = [int(letter, 36) for letter in words if letter.isalnum() and letter.isascii()]
    if len(digits) < _CHECKED:  # other scripts have digits, too, and a text may have them alone
        return kind not in ("IBAN", "card number")
    if kind == "IBAN":
        return int("".join(map(str, digits[4:] + digits[:4]))) % 97 == 1
    if kind == "card number":
        # Every other digit is doubled, beginning with the last but one.
        doubled = (digit * (1 + place % 2) for place, digit in enumerate(reversed(digits)))
        return sum(digit - 9 * (digit > 9) for digit in doubled) % 10 == 0
    return True


def _listed(path: Path, model: LanguageModel) -> Recogniser:
    """Returns a recogniser of the lines of a file, as the tokenizer would decode them."""
    try:
        text = content(path, MOST_SETTINGS, linked=True).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"audit.names = {str(path)!r} cannot be read ({error}): name a text file in UTF-8, "
            "one name or other term a line"
        ) from error
    lines = filter(str.strip, text.splitlines())
    terms = {model.decode(model.encode([line])[0]) for line in lines} - {""}
    longest_first = sorted(map(re.escape, terms), key=len, reverse=True)
    form = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first) or '(?!)'})(?!\w)", re.IGNORECASE)
    return lambda text: (Span("listed name", *match.span()) for match in form.finditer(text))


def _presidio(spacy_model: str) -> Recogniser:
    """Returns a recogniser by Presidio with an English model of spaCy that is installed."""
    try:
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import NlpEngineProvider
        from spacy.util import is_package
    except ImportError as error:
        raise ConfigError(
            "audit.personal_data = 'presidio': it is not installed: pip install "
            "'fedleak[personal]', or leave personal_data out for rules"
        ) from error
    if not (is_package(spacy_model) or Path(spacy_model).is_dir()):  # Presidio would download it
        raise ConfigError(
            f"audit.spacy_model = {spacy_model!r} is not installed: python -m spacy download "
            f"{spacy_model}, or name the folder of a model"
        )
    models = [{"lang_code": "en", "model_name": spacy_model}]
    provider = NlpEngineProvider(nlp_configuration={"nlp_engine_name": "spacy", "models": models})
    engine = AnalyzerEngine(nlp_engine=provider.create_engine(), supported_languages=["en"])
    # It would fetch a list of suffixes from the network, and rules find mail addresses.
    engine.registry.remove_recognizer("EmailRecognizer")

    def found(text: str) -> Iterator[Span]:
        results = engine.analyze(text, language="en")
        for result in sorted(results, key=lambda result: -result.score):
            yield Span(result.entity_type.lower().replace("_", " "), result.start, result.end)

    return found


def find(
    sequences: Sequence[Sequence[int]], model: LanguageModel, recognise: Recogniser
) -> tuple[Item, ...]:
    """Returns the personal data in private texts, by their places.

    Args:
        sequences: Token ids of each text.
        model: For its tokenizer.
        recognise: What finds personal data in a text.
    """
    items = []
    for place, ids in enumerate(map(model.content, sequences)):
        spans: list[Span] = []
        for span in recognise(model.decode(ids)):
            if all(span.end <= kept.start or kept.end <= span.start for kept in spans):
                spans.append(span)
        for span in sorted(spans, key=lambda kept: kept.start):
            items.append(Item(span.kind, place, _tokens_of(span, ids, model)))
    return tuple(items)


def _tokens_of(span: Span, ids: Sequence[int], model: LanguageModel) -> tuple[int, ...]:
    """Returns the fewest neighbouring tokens that contain a part of a text."""

    def written(count: int) -> int:
        return len(model.decode(ids[:count]))

    first = bisect_right(range(len(ids)), span.start, key=written) - 1
    last = bisect_left(range(len(ids)), span.end, key=written)
    return tuple(ids[max(first, 0) : last])


def read(
    items: Sequence[Item], answers: Sequence[Sequence[int]], model: LanguageModel
) -> tuple[bool, ...]:
    """Returns which items were read: all tokens, in their order, side by side in one answer.

    Args:
        items: Personal data of the private texts.
        answers: Token ids of each text that the attack named.
        model: For its special tokens, which are ignored.
    """
    lengths = {len(item.ids) for item in items}
    parts = {
        ids[start : start + length]
        for ids in map(model.content, answers)
        for length in lengths
        for start in range(len(ids) - length + 1)
    }
    return tuple(item.ids in parts for item in items)
