"""Personal data in private texts: what is found, in which tokens, and when it counts as read."""

import sys

import pytest

from fedleak.audit.metrics import personal_data
from fedleak.audit.metrics.personal_data import Item, Span, by_rules, find, read, recogniser
from fedleak.config.tables import AuditTable
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core


def kinds_and_words(text, recognise=by_rules):
    """Returns what is kept of overlapping pieces, as `find` keeps it."""
    kept = []
    for span in recognise(text):
        if all(span.end <= other.start or other.end <= span.start for other in kept):
            kept.append(span)
    return {(span.kind, text[span.start : span.end]) for span in kept}


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("to anna.meier@example.org. Thanks", "mail address", "anna.meier@example.org"),
        ("to anna. meier @ example. org. thanks", "mail address", "anna. meier @ example. org"),
        ("to anna _ meier @ example. org", "mail address", "anna _ meier @ example. org"),
        ("a @ shop. co. uk. is it", "mail address", "a @ shop. co. uk"),
        (
            "see https://shop.example.com/orders/12.",
            "web address",
            "https://shop.example.com/orders/12",
        ),
        (
            "at https : / / shop. example. com / orders.",
            "web address",
            "https : / / shop. example. com / orders",
        ),
        ("www. example. org. thanks", "web address", "www. example. org"),
        ("iban de89 3704 0044 0532 0130 00, please", "IBAN", "de89 3704 0044 0532 0130 00"),
        ("to GB29 NWBK 6016 1331 9268 19", "IBAN", "GB29 NWBK 6016 1331 9268 19"),
        ("card 4111 1111 1111 1111.", "card number", "4111 1111 1111 1111"),
        ("from 192. 168. 0. 1", "IP address", "192. 168. 0. 1"),
        ("on 12.03.2024 at", "date", "12.03.2024"),
        ("on 1984 - 03 - 03 ;", "date", "1984 - 03 - 03"),
        ("born 3 March 1984,", "date", "3 March 1984"),
        ("on may 5th, 2021", "date", "may 5th, 2021"),
        ("am 3. Juni", "date", "3. Juni"),
        ("at 12 Baker Street.", "street", "12 Baker Street"),
        ("hauptstraße 5, born", "street", "hauptstraße 5"),
        ("call + 49 30 1234567 or", "number", "+ 49 30 1234567"),
        ("id 12345678", "number", "12345678"),
    ],
)
def test_rules_find_what_has_a_form(text, kind, words):
    assert kinds_and_words(text) == {(kind, words)}


@pytest.mark.parametrize(
    "text",
    [
        "It cost 12.50 and took 3 hours.",
        "I saw 5 people on the road in 2019 and 2020.",
        "May I go? We march at dawn.",
        "Anna Meier came at ten, 2 by 2.",
        "a 5 mg dose, 3 times a day",
    ],
)
def test_rules_find_nothing_where_there_is_nothing(text):
    assert kinds_and_words(text) == set()


@pytest.mark.parametrize("piece", ["a_", "a", "1-", "1 ", "www.a.", "a@b.", "12 ab ", "1.1."])
def test_a_text_made_to_be_slow_is_read_to_its_end(piece):
    text = piece * 10_000 + "@"  # hours, if a repetition inside a repetition had no bound

    spans = list(by_rules(text))

    assert all(0 <= span.start < span.end <= len(text) for span in spans)


def test_wrong_check_digits_are_only_a_number():
    for right, wrong in (
        ("de89 3704 0044 0532 0130 00", "de88 3704 0044 0532 0130 00"),
        ("4111 1111 1111 1111", "4111 1111 1111 1112"),
    ):
        assert {kind for kind, _ in kinds_and_words(right)} <= {"IBAN", "card number"}
        assert {kind for kind, _ in kinds_and_words(wrong)} == {"number"}


@pytest.mark.parametrize("text", ["ſſ٠١٢٣٤٥٦٧٨٩٠١", "٠١٢٣٤٥٦٧٨٩٠١٢"])
def test_digits_of_other_scripts_are_no_card_and_no_iban(text):
    assert {kind for kind, _ in kinds_and_words(text)} <= {"number"}


@pytest.mark.parametrize("name", ["bert_tiny", "gpt2_tiny", "llama_tiny"])
def test_a_piece_is_the_fewest_tokens_that_hold_it(name, request, texts):
    model = request.getfixturevalue(name)
    for ids in model.encode(texts[:10]):
        content = [token for token in ids if token not in model.special_ids()]
        written = model.decode(content)
        start = written.index(" ") + 1
        end = written.index(" ", start)
        (item,) = find([ids], model, lambda text, at=(start, end): [Span("word", *at)])
        assert written[start:end] in model.decode(item.ids)
        assert written[start:end] not in model.decode(item.ids[1:])
        assert written[start:end] not in model.decode(item.ids[:-1])


def test_of_overlapping_pieces_the_surer_stays(bert_tiny, texts):
    ids = bert_tiny.encode(texts[:1])
    items = find(ids, bert_tiny, lambda text: [Span("a", 0, 4), Span("b", 3, 6), Span("c", 4, 6)])
    assert [item.kind for item in items] == ["a", "c"]


def test_read_is_whole_in_order_and_in_one_text(bert_tiny):
    def is_read(*answers):
        return read([Item("number", 0, (10, 11, 12))], answers, bert_tiny) == (True,)

    assert is_read((9, 10, 11, 12, 13))
    assert is_read((5,), (10, 11, 12))
    for answers in ([(12, 11, 10)], [(10, 11, 9, 12)], [(10, 11), (12,)], [(10, 11)], []):
        assert not is_read(*answers)


def test_it_agrees_with_a_search_of_every_place(bert_tiny, texts):
    sequences = [tuple(ids) for ids in bert_tiny.encode(texts[:8])]
    items = [Item("x", 0, ids[2 : 2 + length]) for ids in sequences for length in (1, 2, 3)]
    answers = [ids[3:] for ids in sequences]

    def stands(wanted):
        return any(
            ids[start : start + len(wanted)] == wanted
            for ids in answers
            for start in range(len(ids))
        )

    assert read(items, answers, bert_tiny) == tuple(stands(item.ids) for item in items)
    assert 0 < sum(read(items, answers, bert_tiny)) < len(items)


def test_listed_names_are_found_as_the_tokenizer_writes_them(bert_tiny, tmp_path):
    (tmp_path / "names.txt").write_text("O'Brien\n\nAnna Meier\nMeier\n")
    recognise = recogniser(AuditTable(names=str(tmp_path / "names.txt")), bert_tiny)
    text = bert_tiny.decode(bert_tiny.encode(["anna meier met o'brien and meiers"])[0])
    names = {words for kind, words in kinds_and_words(text, recognise) if kind == "listed name"}
    assert {name.replace(" ", "") for name in names} == {"annameier", "o'brien"}


def test_nothing_is_looked_for_where_it_is_switched_off(bert_tiny):
    table = AuditTable(personal_data="none")
    assert list(recogniser(table, bert_tiny)("a@b.org")) == []
    assert "No personal data was looked for" in personal_data.looked_for(table)
    assert "Names of people and places were not looked for" in personal_data.looked_for(
        AuditTable()
    )


def test_what_is_not_there_is_one_line(bert_tiny, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"names = .* cannot be read"):
        recogniser(AuditTable(names=str(tmp_path / "none.txt")), bert_tiny)
    with pytest.raises(ConfigError, match="a device"):  # which never ends
        recogniser(AuditTable(names="/dev/zero"), bert_tiny)
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedleak\[personal\]'"):
        recogniser(AuditTable(personal_data="presidio"), bert_tiny)


def test_presidio_finds_names_with_the_model_that_is_named(bert_tiny, tmp_path):
    pytest.importorskip("presidio_analyzer", reason="the extra fedleak[personal]")
    import spacy

    nlp = spacy.blank("en")
    patterns = [{"label": "PERSON", "pattern": "Anna Meier"}]
    nlp.add_pipe("entity_ruler").add_patterns(patterns)
    nlp.to_disk(tmp_path / "model")
    table = AuditTable(personal_data="presidio", spacy_model=str(tmp_path / "model"))
    recognised = kinds_and_words("Anna Meier, a@b.org", recogniser(table, bert_tiny))
    assert recognised == {("person", "Anna Meier"), ("mail address", "a@b.org")}
    with pytest.raises(ConfigError, match="spacy download"):
        recogniser(AuditTable(personal_data="presidio", spacy_model="no_such"), bert_tiny)
