"""The report in HTML: what it says, that hostile texts stay texts, and how a browser shows it."""

import json
import os
import re
import shutil
import stat
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from built import run_of
from scored import row as scored_row
from tiny import DLG, Here, call, tables, toml

from fedleak.attacks.reconstruction import Status
from fedleak.audit import scoring
from fedleak.audit.privacy.ledger import CONTRADICTED
from fedleak.config.loading import parse
from fedleak.report.drawings.chart import DARK
from fedleak.report.html import pictures
from fedleak.report.html.page import (
    Entry,
    Level,
    PrivateText,
    RunPage,
    SweepPage,
    TextAnswer,
    Verdict,
)
from fedleak.report.html.render import LONGEST_TEXT, bounded, render
from fedleak.report.html.run_page import first_numbers, run_page
from fedleak.report.html.sweep_page import sweep_page, sweep_verdict
from fedleak.report.html.verdict import Extent, Guaranteed, run_verdict, unordered
from fedleak.report.table import Cell, Table, words
from fedleak.report.tables.leakage import shares
from fedleak.report.words import counted, figure, listed, percent
from fedleak.running import reports
from fedleak.running.dispatch import dispatcher
from fedleak.store.records import TextScore, Utility
from fedleak.store.run import Run
from fedleak.store.summaries import (
    SUMMARY,
    SWEEP,
    AttackSummary,
    Baseline,
    CanarySummary,
    CellSummary,
    Circumstances,
    CopiesRead,
    Estimate,
    PositiveControl,
    RunSummary,
    SweepSummary,
    WorstCase,
)
from fedleak.training.observation import Sight
from fedleak.util.errors import ConfigError
from fedleak.util.versions import VERSION, made_by

NOTES = [
    f"{who} hid {hidden} beneath the rose bush"
    for who in ("Anna", "Boris", "Clara")
    for hidden in ("a key", "a ring", "the will", "the map")
]

HOSTILE = [
    "<script>window.ran = 1</script>",
    "</script><script>window.ran = 2</script>",
    "<!--<script>",
    "<img src=x onerror='window.ran = 3'>",
    '"><svg onload=window.ran=4>',
    "{{ 7 * 7 }} {% for x in y %} ${7 * 7} #{7 * 7}",
    "right \u202eto left\u202c, \u2066isolated\u2069",
    "half a character \ud800 and a line \u2028 end \u2029",
    "bell \x07, escape \x1b[31m, nothing \x00",
    "javascript:window.ran=5",
    "x" * 1_000_000,
]


def answer(text: str | None = "read", **changes: Any) -> TextAnswer:
    return TextAnswer(
        **{
            "attack": "dager",
            "text": text,
            "rougeL": 50.0,
            "tokens": 0.5,
            "exact": False,
            "proved": False,
            "margin": None,
        }
        | changes
    )


def page_of(texts: list[PrivateText], word: str = "a word", **changes: Any) -> RunPage:
    """Returns a page with a word of others at each of its places."""
    entries = [Entry(word, word)]
    cell = Cell(word, below=[word])
    table = Table(word, words(word, word), [[cell, cell]], [word])
    return RunPage(
        **{
            "name": word,
            "begun": word,
            "redacted": False,
            "verdict": Verdict(Level.READ, word, (Entry(word, word), Entry("Guaranteed", word))),
            "audit": [table],
            "missing": [word],
            "notes": [word],
            "setting": entries,
            "threat": entries,
            "leakage": [table],
            "training": [table],
            "attacks": [table],
            "ladder": [table],
            "membership": [table],
            "published": [table],
            "texts": texts,
            "texts_note": word,
            "defenses": [table],
            "canary_alarms": [word],
            "ledger": [table],
            "versions": entries,
            "repeat": word,
            "experiment": f"{word}\n{word}",
        }
        | changes
    )


def hostile_page() -> RunPage:
    texts = [
        PrivateText(1, str(i), text, [answer(text, attack=text[:50])])
        for i, text in enumerate(HOSTILE)
    ]
    return page_of(texts, " ".join(HOSTILE[:-1]))


class Elements(HTMLParser):
    """The elements of a file, by name, with their attributes and texts."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.found[-1][0] if self.found else "", data))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag == name]

    def data(self) -> Any:
        at = [i for i, (tag, _) in enumerate(self.texts) if tag == "script"]
        return json.loads(self.texts[at[0]][1])


def test_hostile_words_make_no_element_and_no_attribute() -> None:
    plain, hostile = (Elements(render(page)) for page in (page_of([]), hostile_page()))
    tags = [tag for tag, _ in hostile.found]
    assert tags.count("script") == 2  # the texts, and the script of the report
    assert not {"img", "svg"} & set(tags)
    assert {name for _, attributes in hostile.found for name in attributes} <= (
        {name for _, attributes in plain.found for name in attributes} | {"type", "hidden"}
    ) | {
        name
        for _, attributes in Elements(render(page_of([PrivateText(1, "0", "a", [answer()])]))).found
        for name in attributes
    }
    assert not any(name.startswith("on") for _, attributes in hostile.found for name in attributes)


def test_hostile_words_are_shown_as_they_are() -> None:
    content = render(hostile_page()).decode()
    for character in "\u202e\u2066\u2028\u2029\x1b\x07\x00\ud800":
        assert character not in content
    assert (
        "49"
        not in re.sub(r"base64,\S+|sha256-\S+", "", content).split("<main>")[1].split("</main>")[0]
    )
    shown = Elements(content.encode()).data()
    assert shown[0]["truth"] == HOSTILE[0]
    assert shown[6]["truth"] == "right \\u202eto left\\u202c, \\u2066isolated\\u2069"
    assert "</script" not in content.split('id="data">')[1].split("</script>")[0]


def test_a_command_in_a_sentence_is_code_and_what_is_in_it_is_text() -> None:
    page = page_of([], notes=["`fedleak score <b>` names it"])
    assert "<li><code>fedleak score &lt;b&gt;</code> names it</li>" in render(page).decode()


def test_a_long_text_is_cut_and_says_so() -> None:
    assert bounded("y" * LONGEST_TEXT) == "y" * LONGEST_TEXT
    assert bounded("x" * 1_000_000).endswith("[cut: the first 4,000 of 1,000,000 characters]")
    assert len(render(hostile_page())) < 300_000


def test_nothing_is_loaded_and_the_policy_allows_nothing_else() -> None:
    elements = Elements(render(hostile_page()))
    (policy,) = (e["content"] for e in elements.all("meta") if "http-equiv" in e)
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert rules.pop("img-src") == "data:"
    assert rules.pop("script-src").startswith("'sha256-")
    assert rules.pop("style-src").startswith("'sha256-")
    assert set(rules.values()) == {"'none'"}
    assert not elements.all("link")
    assert not any("src" in attributes for attributes in elements.all("script"))
    assert not any("style" in attributes for _, attributes in elements.found)


def test_a_link_to_a_cell_is_an_address_beside_the_file() -> None:
    table = Table(
        "cells",
        words("cell", "report"),
        [[Cell("a"), Cell("open", address="./a%22b/report.html")]],
    )
    page = SweepPage(
        name="s",
        redacted=False,
        verdict=Verdict(Level.UNKNOWN, "?", (Entry("a", "b"),)),
        missing=[],
        axes=[],
        grid=table,
        pictures=[],
        attack_table=table,
        repeat="fedleak sweep s.toml",
    )
    links = [e["href"] for e in Elements(render(page)).all("a")]
    assert "./a%22b/report.html" in links
    assert all(link and link.startswith(("#", "./")) for link in links)


def test_every_link_inside_the_file_leads_to_a_place() -> None:
    elements = Elements(render(page_of([PrivateText(1, "0", "a", [answer()])])))
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [e["href"] or "" for e in elements.all("a")]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert sum(identifier.startswith("word-") for identifier in ids if identifier) > 15


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 %"), (1.0, "100 %"), (0.999, "99.9 %"), (0.9999, "over 99.9 %"), (0.004, "0.4 %")],
)
def test_only_all_is_100_percent_and_only_nothing_is_0(value: float, text: str) -> None:
    assert percent(value) == text


def test_of_many_rounds_the_first_are_named_and_the_others_counted() -> None:
    assert first_numbers(None) == "all"
    assert first_numbers([5, 1000]) == "5, 1,000"
    assert first_numbers(range(1, 13)).endswith("10, 11, 12")
    assert first_numbers(range(1, 101)).endswith("11, 12 and 88 more")


def test_figures_in_words() -> None:
    assert counted(1, "text") == "1 text"
    assert counted(2000, "text") == "2,000 texts"
    assert listed(["a", "b", "c"], "or") == "a, b or c"
    assert [figure(v) for v in (None, "none", 1413.3, 0.83912)] == ["-", "none", "1,413", "0.8391"]


def estimate(mean: float, low: float, high: float) -> Estimate:
    return Estimate(mean=mean, low=low, high=high)


def summary(
    worst: WorstCase | None, attacks: dict[str, AttackSummary], **changes: Any
) -> RunSummary:
    return RunSummary(
        **{
            "name": "made",
            "status": "finished",
            "fedleak": "0",
            "model_fingerprint": None,
            "captures": 2,
            "attacks": attacks,
            "worst_case": worst,
            "defenses": Circumstances(defense=()),
            "defended": (),
            "privacy": None,
            "utility_before": None,
            "utility": None,
            "held_out": 0,
            "utility_reference": None,
            "missing": (),
            "notes": (),
            "unscored": 0,
        }
        | changes
    )


def attack(rows: int = 12, answers: int = 12, **changes: Any) -> AttackSummary:
    empty: dict[str, Any] = {
        name: None for name in AttackSummary.model_fields if name not in ("facts", "status")
    }
    return AttackSummary(
        **empty
        | {
            "rows": rows,
            "status": {Status.RECOVERED: answers, Status.ABSTAINED: rows - answers},
            "verified": 0,
            "knows": (),
            "sequences": 24,
            "clients": 12,
            "facts": {},
            "seconds": 1.0,
        }
        | changes
    )


def worst(exact: Estimate | None, **changes: Any) -> WorstCase:
    return WorstCase(
        **{
            "attacks": ("dager", "lamp"),
            "texts": 24,
            "clients": 12,
            "unattacked": 0,
            "exact_match": exact,
            "rougeL": estimate(90, 80, 95),
            "token_recall": estimate(0.97, 0.9, 0.99),
            "control_rougeL": None,
            "control_token_recall": estimate(0.15, 0.1, 0.3),
            "first": {},
            "warning": None,
        }
        | changes
    )


def paragraphs(verdict: Verdict) -> dict[str, str]:
    return {paragraph.word: paragraph.value for paragraph in verdict.paragraphs}


EXTENT = Extent(attacked=12, sent=720, unordered=0, granted=(), sees="updates")
NOTHING = Guaranteed(None, "Nothing is guaranteed.")


def test_the_verdict_says_what_was_read_by_whom_how_sure_and_what_was_not_measured() -> None:
    worst_case = worst(estimate(23 / 24, 0.69, 0.999), first={"dager": 20, "lamp": 3})
    attacks = {"dager": attack(verified=11), "lamp": attack()}
    verdict = run_verdict(summary(worst_case, attacks), EXTENT, NOTHING)
    by_title = paragraphs(verdict)
    assert [*by_title] == [
        "Read",
        "Who was in",
        "Guaranteed",
        "Model",
        "How sure",
        "Not seen",
        "Next",
    ]
    assert by_title["Guaranteed"] == NOTHING.sentence
    assert verdict.level is Level.READ
    assert verdict.headline == "23 of 24 private texts were read word for word"
    assert "23 of 24 private texts word for word out of 12 updates" in by_title["Read"]
    assert "2 attacks together (dager 20 and lamp 3)" in by_title["Read"]
    assert "between 69 % and 99.9 %" in by_title["How sure"]
    assert "11 of 12 updates" in by_title["How sure"]
    assert "708 of 720 updates" in by_title["Not seen"]
    assert "told batch size, labels, lengths or noise scale" in by_title["Not seen"]
    assert "was not measured" in by_title["Who was in"]
    assert "was not measured" in by_title["Model"]
    assert by_title["Next"].startswith("Change how clients train")


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        (
            {"exact_match": estimate(1 / 24, 0.0, 0.2)},
            "1 of 24 private texts was read word for word",
        ),
        ({"nearly": 2}, "2 of 24 texts were read nearly word for word"),
        ({}, "97 % of the private texts' words were found"),
        ({"token_recall": estimate(1.0, 0.9, 1.0)}, "All of the private texts' words were found"),
        ({"token_recall": estimate(0.2, 0.1, 0.3)}, "No text was read word for word in this test"),
        ({"token_recall": None}, "No text was read word for word in this test"),
        (
            {"exact_match": None, "token_recall": estimate(0.0, 0.0, 0.1)},
            "No attack stands by a text that it read",
        ),
    ],
)
def test_the_headline_is_the_worst_that_was_found(changes: dict[str, Any], headline: str) -> None:
    leak = worst(estimate(0.0, 0.0, 0.2)).model_copy(update=changes)
    assert run_verdict(summary(leak, {"dager": attack()}), EXTENT, NOTHING).headline == headline


def test_the_verdict_says_what_the_model_is_worth_and_whether_so_few_texts_can_tell() -> None:
    before, after = (Utility(round=n, loss=1.0, accuracy=a) for n, a in ((0, 0.5), (3, 0.625)))
    trained = summary(worst(None), {}, utility_before=before, utility=after, held_out=24)
    paragraph = paragraphs(run_verdict(trained, EXTENT, NOTHING))["Model"]
    assert paragraph.startswith(
        "After round 3 its accuracy is 0.625 (95 % interval 0.43 to 0.79) on 24 "
    )
    assert paragraph.endswith(
        "before training it was 0.5. So few texts do not show that training changed it."
    )
    central = Baseline(steps=9, loss=0.4, accuracy=0.75)
    compared = trained.model_copy(update={"utility_reference": central})
    paragraph = paragraphs(run_verdict(compared, EXTENT, NOTHING))["Model"]
    assert "was 0.5; trained centrally, without defenses: 0.75." in paragraph
    many = trained.model_copy(update={"held_out": 2400})
    assert paragraphs(run_verdict(many, EXTENT, NOTHING))["Model"].endswith("it was 0.5.")


def test_the_next_step_asks_for_more_time_before_it_asks_for_more_noise() -> None:
    read = CopiesRead(read=0, exact=0.0, rougeL=9.0, token_recall=0.1)
    control = PositiveControl(copies=3, texts=6, together=read, attacks={"dager": read})
    unable = summary(worst(estimate(0.0, 0.0, 0.2), token_recall=None), {"dager": attack()})
    unable = unable.model_copy(update={"positive_control": control})
    verdict = run_verdict(unable, replace(EXTENT, late=4), NOTHING)
    steps = paragraphs(verdict)["Next"].split("; ")
    assert steps[0].startswith("Give the attacks more time")
    assert steps[1].startswith("find settings with which the attacks read the undefended copies")
    assert steps[2].startswith("add a defense that guarantees an epsilon")
    held = Guaranteed(1.0, "Every client has an epsilon of at most 1.")
    able = summary(worst(estimate(0.0, 0.0, 0.2), token_recall=None), {"dager": attack()})
    assert paragraphs(run_verdict(able, EXTENT, held))["Next"].startswith("Audit again whenever")


def test_no_step_asks_for_adapters_where_they_are() -> None:
    read = summary(worst(estimate(0.5, 0.2, 0.8)), {"dager": attack()})
    plain, adapted = (
        paragraphs(run_verdict(read, replace(EXTENT, adapters=adapters), NOTHING))["Next"]
        for adapters in (False, True)
    )
    assert "more local steps, adapters, frozen embeddings, secure_sum" in plain
    assert "more local steps, secure_sum" in adapted


@pytest.mark.parametrize(
    ("exact", "says"),
    [(0.5, "read 50 % of the texts word for word"), (0.0, "that they read none here shows little")],
)
def test_the_verdict_says_what_the_same_attacks_read_without_defenses(
    exact: float, says: str
) -> None:
    read = CopiesRead(read=3, exact=exact, rougeL=70.0, token_recall=1.0)
    control = PositiveControl(copies=3, texts=6, together=read, attacks={"dager": read})
    of_run = summary(worst(estimate(0.0, 0.0, 0.2)), {"dager": attack()})
    assert "without any" not in paragraphs(run_verdict(of_run, EXTENT, NOTHING))["How sure"]
    controlled = of_run.model_copy(update={"positive_control": control})
    sure = paragraphs(run_verdict(controlled, EXTENT, NOTHING))["How sure"]
    assert sure.startswith("Of 3 plain gradients of these batches, without any defense,")
    assert says in sure


def test_a_verdict_without_the_worst_case_is_of_the_strongest_attack() -> None:
    strong = attack(exact_match=estimate(0.5, 0.3, 0.7), token_recall=estimate(0.9, 0.8, 1))
    weak = attack(exact_match=estimate(0.0, 0.0, 0.2))
    verdict = run_verdict(summary(None, {"weak": weak, "strong": strong}), EXTENT, NOTHING)
    assert (
        "12 of 24 private texts word for word out of 12 updates, by the attack strong"
        in paragraphs(verdict)["Read"]
    )


@pytest.mark.parametrize(
    ("worst_case", "attacks", "level"),
    [
        (worst(estimate(0.5, 0.2, 0.7)), {"dager": attack()}, Level.READ),
        (worst(estimate(0.0, 0.0, 0.2)), {"dager": attack()}, Level.PARTLY),
        (worst(None, rougeL=None, unattacked=24), {"probes": attack()}, Level.PARTLY),
        (worst(estimate(0.0, 0.0, 0.9), warning="one client: an example, not a rate"),
         {"dager": attack(answers=3)}, Level.PARTLY),
        (None, {"dager": attack(answers=0)}, Level.UNKNOWN),
        (None, {}, Level.UNKNOWN),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sees", ["updates", "sum", "models"])
def test_no_verdict_calls_a_setting_safe(
    worst_case: WorstCase | None, attacks: dict[str, AttackSummary], level: Level, sees: Sight
) -> None:
    extent = replace(EXTENT, sees=sees, granted=("lengths",))
    verdict = run_verdict(summary(worst_case, attacks, missing=("something",)), extent, NOTHING)
    text = " ".join(paragraphs(verdict).values())
    assert verdict.level is level
    assert not re.search(r"\b(safe|secure|protected|private\.|no leak)\b", text.lower())
    assert "cannot show that they do not" in text
    assert "incomplete" in text
    assert ("sums of clients' updates" in text) is (sees == "sum")
    assert ("differences of successive models" in text) is (sees == "models")
    assert ("an attacker who has the published models" in text.lower()) is (sees == "models")
    if level is Level.UNKNOWN:
        assert "was not measured" in text
    elif worst_case is not None and worst_case.unattacked:
        assert "24 texts of which no attack named a sequence" in text


def test_three_sentences_say_what_is_read_nearly_read_and_found_and_which_epsilon_holds() -> None:
    worst_case = worst(estimate(4 / 24, 0.1, 0.3), nearly=6, token_recall=estimate(1.0, 0.9, 1.0))
    held = Guaranteed(7.996, "Every client has an epsilon of at most 7.996.")
    verdict = run_verdict(summary(worst_case, {"dager": attack()}), EXTENT, held)
    assert paragraphs(verdict)["Read"].startswith(
        "A server that follows the protocol could read 4 of 24 private texts word for word, and 6 "
        "nearly (ROUGE-L of 90 or more) out of 12 updates, by 2 attacks together (dager and lamp). "
        "It could find all of the distinct words and word parts of the private texts (an answer "
        "for another client has 15 %)."
    )
    assert verdict.headline.endswith("were read word for word; an epsilon of 7.996 holds")


def test_the_headline_has_the_epsilon_that_holds_where_no_attack_answered() -> None:
    held = Guaranteed(7.996, "Every client has an epsilon of at most 7.996.")
    silent = {"auto": attack(answers=0)}
    verdict = run_verdict(summary(None, silent), EXTENT, held)
    assert verdict.headline == "No attack stands by a text that it read; an epsilon of 7.996 holds"
    assert "Attack more clients" in paragraphs(verdict)["Next"]
    broken = {"auto": attack(answers=0, status={Status.FAILED: 1, Status.ABSTAINED: 11})}
    verdict = run_verdict(summary(None, broken), EXTENT, held)
    assert verdict.headline == "What can be read was not measured; an epsilon of 7.996 holds"
    wrong = CanarySummary(confidence=0.95, delta=1e-5, bounds=(), alarms=("it is above",))
    contradicted = run_verdict(summary(None, silent, canary=wrong), EXTENT, held)
    assert contradicted.headline.endswith("; canaries contradict the epsilon of 7.996")
    drawn = (f"client 1: a record was in 3 steps of a pass: {CONTRADICTED}",)
    contradicted = run_verdict(summary(None, silent, missing=drawn, canary=wrong), EXTENT, held)
    assert contradicted.headline.endswith(
        "; canaries and the records that steps drew contradict the epsilon of 7.996"
    )


def test_where_words_are_known_and_time_was_up_more_time_may_read_their_order() -> None:
    texts = [(False, 20.0, 1.0), (False, 30.0, 0.9)]
    late = scored_row("auto", 0, *texts, diagnostics={"time_up": True})
    known = [
        late,
        scored_row("auto", 1, *texts),
        late.model_copy(update={"client": 2, "verified": True}),
        late.model_copy(
            update={
                "client": 3,
                "texts": (TextScore(exact=True, rougeL=100.0, token_recall=1.0),) * 2,
            }
        ),
        late.model_copy(
            update={
                "client": 4,
                "texts": (TextScore(exact=False, rougeL=9.0, token_recall=0.5),) * 2,
            }
        ),
    ]
    assert unordered(known, shares(known)) == 1
    extent = replace(EXTENT, unordered=1)
    by_title = paragraphs(run_verdict(summary(None, {"auto": attack()}), extent, NOTHING))
    assert "Of 1 update the words are known" in by_title["How sure"]
    assert "more time may read it" in by_title["How sure"]


def test_a_picture_is_drawn_once_for_light_and_dark_pages() -> None:
    rows = [Utility(round=number, loss=1.0, accuracy=0.5) for number in (0, 1)]
    [picture] = pictures.training(rows, [], [1])
    svg = picture.drawing
    assert b"prefers-color-scheme: dark" in svg
    # Each colour that changes stands once for a light page and once for a dark one.
    counts = [svg.lower().count(colour.lower().encode()) for colour in DARK]
    assert counts == [1] * len(DARK)
    assert b'fill="var(--c0)"' in svg


@pytest.mark.parametrize(
    ("figures", "ticks"),
    [
        ({50: 0.78}, ["50", "0.78"]),
        ({0: 0.5, 1: 0.75}, ["0", "1", "0.5", "0.55", "0.6", "0.65", "0.7", "0.75"]),
        ({0: 10.0, 30: 20.0}, ["0", "30", *map(str, range(10, 21, 2))]),
    ],
)
def test_a_tick_says_where_it_stands(figures: dict[int, float], ticks: list[str]) -> None:
    rows = [Utility(round=number, loss=1.0, accuracy=value) for number, value in figures.items()]
    [picture] = pictures.training(rows, [], [])
    shown = re.findall(r">([\d.]+)</text>", picture.drawing.decode())
    assert shown == ticks


def sweep_of(**values: Any) -> SweepSummary:
    return SweepSummary(
        name="grid",
        axes={"federation.batch_size": [1, 2], "seed": [0]},
        cells=(
            CellSummary(
                cell="federation.batch_size=1,seed=0",
                values={"federation.batch_size": 1, "seed": 0},
                status="finished",
                **values,
            ),
            CellSummary(
                cell="federation.batch_size=2,seed=0",
                values={"federation.batch_size": 2, "seed": 0},
                status="new",
            ),
        ),
    )


def test_the_page_of_a_sweep_has_the_grid_and_the_addresses_of_reports() -> None:
    worst_case = worst(estimate(0.5, 0.2, 0.7))
    made = sweep_of(
        worst_case=worst_case, attacks={"dager": attack(exact_match=worst_case.exact_match)}
    )
    page = sweep_page(made, {"federation.batch_size=1,seed=0": "./one/report.html"})
    first, second = page.grid.rows
    assert tuple(cell.text for cell in first[:4]) == (
        "1",
        "0",
        "2 attacks together (dager and lamp)",
        "50 [20, 70]",
    )
    assert first[-1] == Cell("open", address="./one/report.html")
    assert second[2].text == "new"
    assert second[-1].text == "-"
    assert "1 of 2 cells" in paragraphs(page.verdict)["Read"]
    assert "1 cell without an answer" in paragraphs(page.verdict)["Not seen"]
    assert len(page.pictures) >= 1
    assert sweep_verdict(sweep_of()).level is Level.UNKNOWN
    nothing = worst(estimate(0.0, 0.0, 0.26))
    assert "up to 26 %" in paragraphs(sweep_verdict(sweep_of(worst_case=nothing)))["How sure"]


@pytest.fixture(scope="module")
def ran_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run, defended and attacked."""
    changes = {
        "attack": [DLG],
        "defense": [{"kind": "gaussian_noise", "sigma": 1e-6}],
        "utility.reference": True,
    }
    folder = tmp_path_factory.mktemp("ran")
    data = folder / "alice" / "notes.csv"
    data.parent.mkdir()
    data.write_text("text,label\n" + "".join(f"{note},{i % 2}\n" for i, note in enumerate(NOTES)))
    changes["data"] = {"name": str(data), "text": "text", "label": "label", "held_out": 4}
    (folder / "small.toml").write_text(toml(changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        assert call("run", "small.toml")[0] == 0
    return folder / "runs" / "small"


@pytest.fixture
def ran(ran_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ran_once, tmp_path / "runs" / "small")
    return tmp_path / "runs" / "small"


def test_a_run_is_reported_for_its_owner_alone_and_redacted_for_others(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "alice")
    made = made_by()
    Run(ran).update_info(**made)
    status, printed, _ = call("report", str(ran))
    assert status == 0
    assert "report.html" in printed.replace("\n", "")
    private = ran / "report.html"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    shown = Elements(private.read_bytes())
    texts = shown.data()
    assert len(texts) == 2
    assert {answer["attack"] for answer in texts[0]["answers"]} == {"dlg", "probes"}
    text = " ".join(word for _, word in shown.texts)
    for part in (
        "This file holds private texts",
        "gaussian_noise",
        "holds",  # what the check found
        "central, undefended",
        "Nothing is guaranteed to every client",
        "fedleak run small.toml",
        *made.values(),
        "alice/notes.csv: all texts",
        '😀!" would be "zoe pays 5 at the cafe,!".',
        f"Written by fedleak {VERSION} on 2",
    ):
        assert part in text
    order = re.findall(r'<section id="(\w+)"', private.read_text())
    assert order == [
        "verdict", "setting", "leakage", "attacks", "texts", "defenses", "ledger", "versions",
        "glossary",
    ]  # fmt: skip

    private = "the key is beneath the rose bush"
    lines = (ran / "reconstructions.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    answers[0] |= {"status": "failed", "reason": private, "diagnostics": {private: private}}
    (ran / "reconstructions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in answers))
    (ran / "leakage.jsonl").unlink()
    experiment = Run(ran).info()["experiment"]
    experiment["gate"]["may_abstain"] = ["${A_SECRET}"]
    monkeypatch.setenv("A_SECRET", "swordfish")
    Run(ran).update_info(dropped_out={private: [1]}, experiment=experiment)
    assert call("report", str(ran), "--redact", "--out", "open.html")[0] == 1  # an answer failed
    summary = Run(ran).read_document(SUMMARY)
    assert private in summary.missing[0]
    assert private in summary.notes[0]
    redacted = Path("open.html").read_text()
    for part in ("Redacted", "1 remark, left out here", ".../notes.csv", "${A_SECRET}"):
        assert part in redacted
    assert 'id="data"' not in redacted
    read = [answer["text"] for text in texts for answer in text["answers"] if answer["text"]]
    secrets = [private, "alice", "swordfish", *read, *(text["truth"] for text in texts)]
    assert [secret for secret in secrets if secret in redacted] == []


def test_a_redacted_sweep_says_which_cells_are_incomplete_and_not_why() -> None:
    private = "the key is beneath the rose bush"
    made = sweep_of(missing=(f"1 of 2 answers failed (dlg: {private})",))
    shown, redacted = (
        render(sweep_page(made, {}, redact=redact)).decode() for redact in (False, True)
    )
    assert private in shown
    assert private not in redacted
    assert "federation.batch_size=1,seed=0: incomplete" in redacted


@pytest.mark.parametrize("redact", [False, True])
def test_a_redacted_page_names_no_folder_of_its_owner(tmp_path: Path, redact: bool) -> None:
    experiment = parse(tables({"data.name": "/home/alice/patients/texts.csv"}))
    run = run_of(tmp_path / "run", experiment)
    scoring.score_run(run)
    shown = render(run_page(run, [], redact=redact)).decode()
    assert ("/home/alice/patients" in shown) == (not redact)
    assert "texts.csv" in shown


@pytest.mark.parametrize("redact", [False, True])
def test_the_cells_of_a_redacted_sweep_are_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redact: bool
) -> None:
    made = sweep_of()
    folder, name = Run(tmp_path / "grid"), "report-redacted.html" if redact else "report.html"
    for cell in made.cells:
        run_of(folder.path / cell.cell, parse(tables()))
    folder.write(SWEEP, made)
    scored = "federation.batch_size=1,seed=0"

    def page(run: Run, answers: list[Any], *, redact: bool) -> RunPage:
        assert (run.path, answers) == (folder.path / scored, [])
        return page_of([], redacted=redact)

    monkeypatch.setattr(reports, "run_page", page)
    seen: list[Path] = []
    written, _ = reports.report_sweep(folder.path, redact=redact, tell=seen.append)
    assert written == folder.path / name
    assert seen == [folder.path / scored / name]
    assert sorted(folder.path.rglob("*.html")) == sorted([*seen, folder.path / name])
    for path in (*seen, folder.path / name):
        assert ("Redacted" in path.read_text()) == redact
    links = [link["href"] for link in Elements((folder.path / name).read_bytes()).all("a")]
    assert f"./{quote(scored)}/{name}" in links


@pytest.mark.parametrize("name", ["", ".", "..", "../run", "/run"])
def test_a_cell_of_a_sweep_is_a_folder_in_it(tmp_path: Path, name: str) -> None:
    made = sweep_of()
    cell = made.cells[0].model_copy(update={"cell": name})
    folder = Run(tmp_path / "grid")
    folder.write(SWEEP, made.model_copy(update={"cells": (cell,)}))
    with pytest.raises(ConfigError, match="is not the name of a folder"):
        reports.report_sweep(folder.path)
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.slow
def test_open_says_where_there_is_no_browser(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    status, printed, _ = call("report", str(ran), "--open")
    assert status == 0
    assert opened == [(ran / "report.html").as_uri()]
    assert "no browser was found" in printed


@pytest.mark.slow
def test_a_report_of_a_purged_run_says_that_its_texts_are_gone(ran: Path) -> None:
    assert call("report", str(ran))[0] == 0
    assert call("purge", str(ran))[0] == 0
    assert not (ran / "report.html").exists()
    call("report", str(ran))
    content = (ran / "report.html").read_text()
    assert "2 texts not listed" in content
    assert "purged" in content
    assert 'id="data"' not in content


def test_what_cannot_be_reported_is_one_line_and_status_2(ran: Path) -> None:
    for arguments, says in (
        (("nowhere",), "is not a run directory"),
        ((str(ran), str(ran), "--out", "one.html"), "is one file, and 2 folders are named"),
        ((str(ran), "--out", "."), "is a folder"),
    ):
        status, _, errors = call("report", *arguments)
        assert status == 2
        assert says in errors
        assert errors.count("\n") == 1


def test_a_sweep_is_reported_with_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None
) -> None:
    (tmp_path / "grid.toml").write_text(toml({"name": "grid", "sweep": {"seed": [1, 2]}}))
    monkeypatch.chdir(tmp_path)
    assert call("sweep", "grid.toml", "--jobs", "1")[0] == 0
    assert call("report", "runs/grid")[0] == 0
    elements = Elements(Path("runs/grid/report.html").read_bytes())
    links = [e["href"] for e in elements.all("a") if not (e["href"] or "").startswith("#")]
    assert links == ["./seed%3D1/report.html", "./seed%3D2/report.html"]
    assert Path("runs/grid/seed=1/report.html").is_file()
    shutil.rmtree("runs/grid/seed=1")
    Path("runs/grid/seed=2/captures/r0001-c00.safetensors").unlink()
    status, _, errors = call("report", "runs/grid")
    assert status == 1
    assert "1 of 2 cells have no report ('seed=1': its folder is gone)" in errors
    assert "cell 'seed=2': 1 of 2 captures are missing" in errors


# --- in a browser ---------------------------------------------------------------------------------

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
AXE = os.environ.get("FEDLEAK_AXE", "")
PAPER_WIDTH = 718
"""Pixels between the margins of a sheet of A4, as Chromium prints it."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Callable[..., Any]]:
    """Opens a file in headless Chromium, of a width, light or dark."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no browser: install chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))

    def open_(path: Path, width: int = 1280, dark: bool = False) -> Any:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        driver.get_log("performance"), driver.get_log("browser")
        driver.get(path.as_uri())
        return driver

    try:
        yield open_
    finally:
        driver.quit()


def said(driver: Any) -> list[str]:
    """Returns what the console shows."""
    return [entry["message"] for entry in driver.get_log("browser")]


def requested(driver: Any) -> list[str]:
    """Returns the addresses that the page asked for, but for data inside it."""
    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [
        url
        for event in events
        if event["method"] == "Network.requestWillBeSent"
        and not (url := event["params"]["request"]["url"]).startswith("data:")
    ]


def fill(driver: Any, field: str, text: str) -> None:
    """Types into a field of the texts, and waits until the list follows."""
    at = driver.find_element("id", field)
    at.clear()
    at.send_keys(text)
    time.sleep(0.4)


def listed_texts(driver: Any) -> list[str]:
    return [element.text for element in driver.find_elements("css selector", "#list > li")]


@contextmanager
def file_of(page: RunPage, folder: Path) -> Iterator[Path]:
    path = folder / "report.html"
    path.write_bytes(render(page))
    yield path


@pytest.mark.slow
def test_hostile_texts_do_not_run_in_a_browser(browser: Callable[..., Any], tmp_path: Path) -> None:
    with file_of(hostile_page(), tmp_path) as path:
        driver = browser(path)
        assert len(listed_texts(driver)) == len(HOSTILE)
        for element in driver.find_elements("css selector", "details"):
            driver.execute_script("arguments[0].open = true", element)
        time.sleep(0.3)
        assert driver.execute_script("return window.ran") is None
        assert "<script>window.ran = 1</script>" in driver.find_element("id", "list").text
        assert said(driver) == []
        assert requested(driver) == [path.as_uri()]


@pytest.mark.slow
def test_a_browser_shows_a_real_report_and_asks_nobody(
    browser: Callable[..., Any], ran: Path
) -> None:
    call("report", str(ran))
    for width in (400, 1280):
        for dark in (False, True):
            driver = browser(ran / "report.html", width, dark)
            assert said(driver) == []
            assert requested(driver) == [(ran / "report.html").as_uri()]
            inner, wide = driver.execute_script(
                "return [innerWidth, document.documentElement.scrollWidth]"
            )
            assert wide <= inner
            cut = "return [...document.querySelectorAll('.scroll')].filter("
            cut += "e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
            assert width < 1280 or driver.execute_script(cut) == []
            loaded = "return [...document.images].every(i => i.complete && i.naturalWidth > 0)"
            assert driver.execute_script(loaded)


@pytest.mark.slow
def test_two_thousand_texts_open_in_two_seconds_and_can_be_searched(
    browser: Callable[..., Any], tmp_path: Path
) -> None:
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "and",
        "leaves",
        "at",
        "noon",
    ]
    texts = []
    for number in range(2_000):
        truth = f"note {number}: " + " ".join(words * 3)
        answers = [answer(truth.replace("fox", f"cat{i}"), attack=f"attack{i}") for i in range(4)]
        texts.append(PrivateText(number // 20, str(number % 20), truth, answers))
    with file_of(page_of(texts), tmp_path) as path:
        began = time.perf_counter()
        driver = browser(path)
        assert len(listed_texts(driver)) == 20
        assert time.perf_counter() - began < 2
        assert "2,000 of 2,000 texts; page 1 of 100" in driver.find_element("id", "found").text
        driver.find_element("id", "next").click()
        assert "note 20:" in listed_texts(driver)[0]
        fill(driver, "search", "note 1234:")
        assert len(listed_texts(driver)) == 1
        marked = driver.find_elements("css selector", "#list del")
        assert [element.text for element in marked] == ["cat0"] * 3
        missed = driver.find_elements("css selector", "#list u.missed")
        assert [element.text for element in missed] == ["fox"] * 3
        fill(driver, "search", "found nowhere")
        assert "0 of 2,000 texts" in driver.find_element("id", "found").text
        assert said(driver) == []


def every_part() -> RunPage:
    """Returns the page of an audit that has all parts, pictures too."""
    truth, read = "the map beneath the rose bush", "the key beneath the bush"
    rows = [Utility(round=number, loss=1.0, accuracy=0.5) for number in (0, 1)]
    texts = [PrivateText(1, "0", truth, [answer(read), answer(None, attack="lamp")])]
    return page_of(texts, training=[*pictures.training(rows, [], [1])])


def sweep_with_pictures() -> SweepPage:
    worst_case = worst(estimate(0.5, 0.2, 0.7))
    made = sweep_of(
        worst_case=worst_case, attacks={"dager": attack(exact_match=worst_case.exact_match)}
    )
    return sweep_page(made, {"federation.batch_size=1,seed=0": "./one/report.html"})


@pytest.mark.slow
@pytest.mark.skipif(not Path(AXE).is_file(), reason="no axe-core: FEDLEAK_AXE names its axe.min.js")
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", ["run", "every part", "sweep"])
def test_axe_finds_no_violation(
    browser: Callable[..., Any], ran: Path, tmp_path: Path, kind: str, width: int, dark: bool
) -> None:
    path = tmp_path / "report.html"
    if kind == "run":
        call("report", str(ran), "--out", str(path))
    else:
        path.write_bytes(render(every_part() if kind == "every part" else sweep_with_pictures()))
    driver = browser(path, width, dark)
    # The policy keeps other scripts out of the page; the debugger puts this one in.
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": Path(AXE).read_text()})
    driver.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    violations = driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(r => done(r.violations), e => done(`${e}`));"
    )
    assert [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in violations] == []


@pytest.mark.slow
def test_paper_has_every_text_what_other_attacks_read_and_whole_tables(
    browser: Callable[..., Any], tmp_path: Path
) -> None:
    texts = [
        PrivateText(1, "0", f"note {number}", [answer(), answer(f"guess {number}", attack="lamp")])
        for number in range(30)
    ]
    table = Table("wide", words(*(f"column {i}" for i in range(12))), [[Cell("1 234 [5, 6]")] * 12])
    with file_of(page_of(texts, attacks=[table]), tmp_path) as path:
        driver = browser(path)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": PAPER_WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        driver.execute_script("dispatchEvent(new Event('beforeprint'))")
        shown = driver.find_element("id", "list").text
        assert all(f"guess {number}" in shown for number in range(30))
        assert driver.execute_script("return document.documentElement.scrollWidth") <= PAPER_WIDTH
        driver.execute_script("dispatchEvent(new Event('afterprint'))")
        assert len(listed_texts(driver)) == 20
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
