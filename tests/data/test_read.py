import json
from collections import Counter

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedleak import data
from fedleak.config import parse
from fedleak.errors import ConfigError
from fedleak.federation import read_data

TEXTS = ['She said "no", twice', "it hurts", "a, b; c", "tab less", "fifth one", "sixth one"]
LABELS = ["bad", "good", "bad", "bad", "good", "good"]


def csv_of(path):
    rows = ['"{}",{}'.format(t.replace('"', '""'), y) for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_text("\n".join(["text,label", *rows]) + "\n")


def tsv_of(path):
    rows = [f"x\t{y}\t\t{t}" for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_text("\n".join(rows) + "\n")


def jsonl_of(path):
    lines = [{"text": t, "label": y} for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def parquet_of(path):
    datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS}).to_parquet(path)


FORMATS = {
    "a.csv": (csv_of, "text", "label"),
    "a.tsv": (tsv_of, 3, 1),
    "a.jsonl": (jsonl_of, "text", "label"),
    "a.parquet": (parquet_of, "text", "label"),
}


def read(path, text="text", label="label", *, samples=4, held_out=2, seed=0):
    return data.read(
        str(path),
        split="train",
        text=text,
        label=label,
        samples=samples,
        held_out=held_out,
        seed=seed,
    )


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_texts_and_labels(tmp_path, name):
    write, text, label = FORMATS[name]
    write(tmp_path / name)
    train, held_out = read(tmp_path / name, text, label)
    assert (len(train), len(held_out)) == (4, 2)
    assert train.label_names == held_out.label_names == ("bad", "good")
    found = zip(
        train.texts + held_out.texts,
        (train.label_names[y] for y in train.labels + held_out.labels),
        strict=True,
    )
    assert sorted(found) == sorted(zip(TEXTS, LABELS, strict=True))


def test_quotes_in_a_tsv_file_are_text(tmp_path):
    (tmp_path / "a.tsv").write_text('text\tlabel\n"half a quote\t1\nsays "who"\t0\n')
    train, _ = read(tmp_path / "a.tsv", samples=2, held_out=0)
    assert set(train.texts) == {'"half a quote', 'says "who"'}


def test_a_class_feature_keeps_its_numbers_and_names(tmp_path):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "a"])}
    )
    rows = datasets.Dataset.from_dict({"text": TEXTS[:4], "label": [0, 1, 1, 0]}, features)
    rows.to_parquet(tmp_path / "a.parquet")
    train, _ = read(tmp_path / "a.parquet", samples=4, held_out=0)
    assert train.label_names == ("z", "a")
    assert dict(zip(train.texts, train.labels, strict=True)) == dict(
        zip(TEXTS[:4], [0, 1, 1, 0], strict=True)
    )


def test_without_a_label_column_there_is_one_class(tmp_path):
    jsonl_of(tmp_path / "a.jsonl")
    train, _ = read(tmp_path / "a.jsonl", label=None)
    assert train.label_names == ("none",)
    assert set(train.labels) == {0}


@pytest.mark.parametrize(
    "word",
    ["null", "None", "NA", "nan"],
)
def test_words_that_mean_nothing_elsewhere_are_text(tmp_path, word):
    (tmp_path / "a.csv").write_text(f"text,label\n{word},1\nother,0\n")
    train, _ = read(tmp_path / "a.csv", samples=2, held_out=0)
    assert set(train.texts) == {word, "other"}


def test_an_example_without_a_label_is_refused(tmp_path):
    lines = [{"text": "a", "label": "x"}, {"text": "b", "label": None}, {"text": "c", "label": "y"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=r"data\.label"):
        read(tmp_path / "a.jsonl", samples=3, held_out=0)


BAD = [
    ("csv", "text,label\na,1\nb,0\n", {"text": "txt"}, ["data.text", "'txt'", "text, label"]),
    ("csv", "text,label\na,1\nb,0\n", {"label": "class"}, ["data.label", "'class'", "text, label"]),
    ("csv", "text,label\na,1\nb,0\n", {"text": None}, ["data.text is missing", "a.csv"]),
    ("csv", "text,label\na,1\nb,1\n", {}, ["data.label", "1 distinct", "2 to 1000"]),
    ("tsv", "a\t1\nb\t0\n", {"text": 5, "label": 1}, ["data.text", "'5'", "0, 1"]),
    ("jsonl", '{"text": "", "label": 1}\n{"text": " ", "label": 0}\n', {}, ["2 of 2", "row 1"]),
    ("jsonl", '{"text": "a", "label": 1}\n{"text": null, "label": 0}\n', {}, ["1 of 2", "row 2"]),
    ("jsonl", "no json\n", {}, ["cannot be read", "a.jsonl"]),
    ("csv", "", {}, ["cannot be read", "a.csv"]),
    ("parquet", "PAR", {}, ["cannot be read", "a.parquet"]),
    ("csv", "text,label\na,1\nb,0\n", {"samples": 9}, ["data.samples = 9", "11", "has 2"]),
    ("txt", "a\nb\n", {}, ["a.txt", ".csv, .jsonl, .parquet, .tsv"]),
]


@pytest.mark.parametrize(("kind", "content", "change", "words"), BAD)
def test_bad_files_are_refused_in_one_line(tmp_path, kind, content, change, words):
    path = tmp_path / f"a.{kind}"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read(path, **{"samples": 2, "held_out": 2 if "samples" in change else 0} | change)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/file.csv", ["/no/such/file.csv", "no such file"]),
        ("./folder", ["./folder", "file that exists"]),
        ("builtin/nots", ["builtin/nots", "builtin/notes"]),
        ("glue/cola", ["glue/cola", "split 'train'", "hub", "builtin/notes"]),
        ("nobody/nothing", ["nobody/nothing", "hub", ".parquet"]),
    ],
)
def test_data_that_cannot_be_had_is_refused_in_one_line(name, words):
    with pytest.raises(ConfigError) as caught:
        read(name)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_a_classifier_needs_a_label(tmp_path):
    jsonl_of(tmp_path / "a.jsonl")
    table = {
        "name": "x",
        "model": {"name": "builtin/bert-tiny"},
        "data": {"name": str(tmp_path / "a.jsonl"), "text": "text", "samples": 4, "held_out": 0},
    }
    with pytest.raises(ConfigError, match=r"data\.label is missing"):
        read_data(parse(table))
    table["data"]["label"] = "label"
    assert len(read_data(parse(table)).train.label_names) == 2


# --- who gets what --------------------------------------------------------------------------


def test_training_and_held_out_texts_are_disjoint_and_the_seed_decides():
    def drawn(seed):
        return data.read(
            "builtin/notes", split="", text=None, label=None, samples=30, held_out=20, seed=seed
        )

    train, held_out = drawn(0)
    assert (len(set(train.texts)), len(set(held_out.texts))) == (30, 20)
    assert not set(train.texts) & set(held_out.texts)
    assert drawn(0) == (train, held_out)
    assert drawn(1) != (train, held_out)
    assert len(set(train.labels)) == 2


@given(
    st.integers(1, 12), st.integers(0, 40), st.sampled_from(["iid", "dirichlet"]), st.integers(0, 5)
)
def test_every_example_is_of_one_client(clients, more, how, seed):
    labels = [i % 3 for i in range(clients + 12 + more)]
    parts = data.partition(labels, clients, how=how, alpha=5.0, seed=seed)
    assert len(parts) == clients
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(labels)))
    assert parts == data.partition(labels, clients, how=how, alpha=5.0, seed=seed)


@pytest.mark.filterwarnings("ignore:The specified min_partition_size")
def test_dirichlet_is_uneven_where_iid_is_not():
    labels = [i % 2 for i in range(400)]

    def skew(how, alpha):
        parts = data.partition(labels, 4, how=how, alpha=alpha, seed=0)
        shares = [Counter(labels[i] for i in part)[0] / len(part) for part in parts]
        return max(shares) - min(shares)

    assert skew("dirichlet", 0.1) > 0.5
    assert skew("dirichlet", 1000.0) < 0.15
    assert skew("iid", 1.0) < 0.05


@pytest.mark.parametrize(
    ("labels", "clients", "how", "alpha", "words"),
    [
        ([0, 1], 3, "iid", 1.0, ["federation.clients = 3", "data.samples is only 2"]),
        ([0, 1] * 10, 20, "dirichlet", 1e-3, ["federation.alpha = 0.001", "among 20"]),
    ],
)
@pytest.mark.filterwarnings("ignore:The specified min_partition_size")
def test_a_client_without_data_is_refused(labels, clients, how, alpha, words):
    with pytest.raises(ConfigError) as caught:
        data.partition(labels, clients, how=how, alpha=alpha, seed=0)
    assert [word for word in words if word not in str(caught.value)] == []


# --- tokens ---------------------------------------------------------------------------------


def numbers(texts):
    return [[int(t) for t in text.split()] for text in texts]


@pytest.mark.parametrize(
    ("text", "limit", "max_length", "expected"),
    [
        ("1 2 3", 3, None, (1, 2, 3)),
        ("1 2 3 4", 4, 3, (1, 2, 4)),
        ("1 2 3 4 5 6 7", 5, 4, (1, 2, 3, 7)),
        ("1 2", 5, 5, (1, 2)),
    ],
)
def test_texts_are_cut_before_their_last_token(text, limit, max_length, expected):
    assert data.tokenise([text], numbers, limit=limit, max_length=max_length) == [expected]


@pytest.mark.parametrize(
    ("max_length", "words"),
    [
        (None, ["5 tokens", "takes 4", "data.max_length = 4", "1 2 3 4 5"]),
        (9, ["data.max_length = 9", "4 or less"]),
    ],
)
def test_texts_that_are_too_long_are_refused(max_length, words):
    with pytest.raises(ConfigError) as caught:
        data.tokenise(["1", "1 2 3 4 5"], numbers, limit=4, max_length=max_length)
    assert [word for word in words if word not in str(caught.value)] == []


def test_no_text_has_no_tokens(bert_tiny):
    """As with data.held_out = 0."""
    assert data.tokenise([], bert_tiny.encode, limit=128, max_length=None) == []


# --- real files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "label", "count"),
    [("cola/in_domain_train.tsv", 3, 1, 8551), ("sst2/train.tsv", "sentence", "label", 67349)],
)
def test_real_files_are_read_whole(assets, name, text, label, count):
    path = assets / "data" / name
    if not path.is_file():
        pytest.skip(f"no {path}")
    lines = path.read_text().splitlines()[1 if isinstance(text, str) else 0 :]
    assert len(lines) == count
    columns = (3, 1) if isinstance(text, int) else (0, 1)
    expected = Counter(tuple(line.split("\t")[c] for c in columns) for line in lines)
    train, held_out = read(path, text, label, samples=count - 100, held_out=100)
    assert train.label_names == ("0", "1")
    texts, labels = train.texts + held_out.texts, train.labels + held_out.labels
    assert Counter(zip(texts, map(str, labels), strict=True)) == expected
