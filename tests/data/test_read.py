import gzip
import json
import tempfile
from collections import Counter
from functools import partial

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedleak import data
from fedleak.config.federation.workload import read_data
from fedleak.config.loading import parse
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core

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


def read(path, text="text", label="label", *, samples=4, held_out=2, seed=0, **options):
    splits = data.read_split(
        str(path),
        split="train",
        text=text,
        label=label,
        samples=samples,
        held_out=held_out,
        seed=seed,
        **options,
    )
    return splits.train, splits.held_out


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_texts_and_labels(tmp_path, name):
    write, text, label = FORMATS[name]
    write(tmp_path / name)
    train, held_out = read(tmp_path / name, text, label)
    assert (len(train), len(held_out)) == (4, 2)
    assert train.label_names == held_out.label_names == ("bad", "good")
    pairs = zip(
        train.texts + held_out.texts,
        (train.label_names[y] for y in train.labels + held_out.labels),
        strict=True,
    )
    assert sorted(pairs) == sorted(zip(TEXTS, LABELS, strict=True))


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
    ("jsonl", "no json\n", {}, ["a.jsonl", "not JSON in line 1"]),
    ("csv", "", {}, ["a.csv", "is empty"]),
    ("parquet", "PAR", {}, ["a.parquet", "not a Parquet file"]),
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


SECRET = "Ann has cancer"
ROWS = f"text,label\n{SECRET},1\nwell,0\n"
PARQUET = b"PAR1" + b"x" * 40

# A damaged file, how it is to be read, and what the one line must hold.
DAMAGED = [
    ("a.csv", b"", {}, ["is empty", "give a file"]),
    ("a.csv", b"\n\n", {}, ["is empty"]),
    ("a.csv", b"text,label\n", {}, ["a header line and no rows"]),
    (
        "a.csv",
        f"{ROWS}caf\xe9,1\n".encode("latin-1"),
        {},
        ["not UTF-8", "line 4", "0xe9", "cp1252"],
    ),
    ("a.csv", ROWS.encode("utf-16"), {}, ["UTF-16", "data.encoding = 'utf-16'"]),
    ("a.csv", ROWS.encode("utf-16-le"), {}, ["NUL", "line 1", "'utf-16-le'"]),
    ("a.csv", f"{ROWS}\xe9,1\n".encode(), {"encoding": "ascii"}, ["not ascii", "line 4", "0xc3"]),
    ("a.csv", f"{ROWS}{SECRET},1,more\n".encode(), {}, ["3 fields in line 4", "2 in line 1"]),
    ("a.csv", f"text,label\n{SECRET},b,1\nc,d,0\n".encode(), {}, ["3 fields in line 2", "quote"]),
    ("a.csv", f'{ROWS}"{SECRET},1\nb,0\n'.encode(), {}, ["a quote in line 4", "nothing closes"]),
    ("a.csv", ROWS.encode(), {"delimiter": ";"}, ["data.delimiter = ','"]),
    ("a.csv", ROWS.replace(",", ";").encode(), {}, ["data.text", "data.delimiter = ';'"]),
    ("a.csv", f"{SECRET},1\nx,0\n".encode(), {}, ["data.text", "(column 0)", "1"]),
    ("a.csv", f"text,text,label\n{SECRET},b,0\nc,d,1\n".encode(), {}, ["two columns", "rename"]),
    ("a.csv", ROWS.replace("A", "\0").encode(), {}, ["NUL", "row 1"]),
    ("a.csv", ROWS.encode(), {"encoding": "utf-16"}, ["is not UTF-16", "leave that out"]),
    ("a.csv", ROWS.encode(), {"text": 0}, ["data.label = 'label'", "two names or two numbers"]),
    ("a.csv.gz", b"no gzip", {}, ["not a gzip file"]),
    ("a.csv.gz", gzip.compress(ROWS.encode(), mtime=0)[:-9], {}, ["gzip", "cut off"]),
    ("a.tsv", b"text\tlabel\nx\t1\ty\n", {}, ["3 fields in line 2"]),
    ("a.jsonl", f'{{"text": "{SECRET}"}}\n{{"text": }}\n'.encode(), {}, ["not JSON in line 2"]),
    ("a.jsonl", b"3\n4\n", {}, ["no object in line 1"]),
    ("a.jsonl", b'{"text": ["a"], "label": 1}\n', {}, ["no text in row 1", "another column"]),
    ("a.jsonl", b'{"text": "caf\xe9", "label": 1}\n', {}, ["not UTF-8", "line 1", "0xe9"]),
    (
        "a.jsonl",
        b"{}\n",
        {"delimiter": ";"},
        ["data.delimiter = ';'", "csv and tsv", "leave it out"],
    ),
    ("a.parquet", PARQUET, {}, ["cut off", "copy it again"]),
    ("a.parquet", PARQUET + b"PAR1", {}, ["damaged Parquet"]),
    ("a.parquet", PARQUET, {"encoding": "utf-16"}, ["data.encoding", "leave it out"]),
    ("a.parquet.gz", PARQUET, {}, [".csv, .jsonl, .parquet, .tsv"]),
]


@pytest.mark.parametrize(("name", "content", "options", "words"), DAMAGED)
def test_a_damaged_file_is_refused_for_its_fault_and_not_quoted(
    tmp_path, capfd, name, content, options, words
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / name, samples=2, held_out=0, **options)
    assert [word for word in [*words, name] if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
    assert "cancer" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("a.csv", ROWS.encode("utf-8-sig"), {}),
        ("a.csv", ROWS.replace("\n", "\r\n").encode(), {}),
        ("a.csv", ROWS.encode("utf-16"), {"encoding": "utf-16"}),
        ("a.csv", ROWS.replace(",", ";").encode("cp1252"), {"delimiter": ";"}),
        ("a.tsv", ROWS.replace(",", "|").encode(), {"delimiter": "|"}),
        ("a.csv.gz", gzip.compress(ROWS.encode(), mtime=0), {}),
        ("a.tsv.gz", gzip.compress(ROWS.replace(",", "\t").encode(), mtime=0), {}),
        (
            "a.jsonl",
            f'{{"text": "{SECRET}", "label": 1}}\n{{"text": "well", "label": "0"}}'.encode(),
            {},
        ),
        (
            "a.jsonl",
            f'{{"text": "{SECRET}", "label": 1}}\n{{"text": "well", "label": 0}}'.encode("utf-16"),
            {"encoding": "utf-16"},
        ),
    ],
)
def test_files_are_read_as_they_are_said_to_be_written(tmp_path, name, content, options):
    (tmp_path / name).write_bytes(content)
    train, _ = read(tmp_path / name, samples=2, held_out=0, **options)
    labels = dict(zip(train.texts, (train.label_names[y] for y in train.labels), strict=True))
    assert labels == {SECRET: "1", "well": "0"}


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.csv", "text,label\n007,1\n1.50,0\n", {"007", "1.50"}),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": 5, "label": 0}\n', {"a", "5"}),
    ],
)
def test_numbers_are_texts_where_they_are_asked_for(tmp_path, name, content, texts):
    (tmp_path / name).write_text(content)
    train, _ = read(tmp_path / name, samples=2, held_out=0)
    assert set(train.texts) == texts


def test_a_column_may_change_its_type_anywhere(tmp_path):
    """`datasets` takes ten thousand rows at a time, and the type of a column from the first."""
    rows = [f"a{i},{i % 2},{i if i < 15_000 else 'none'}" for i in range(20_000)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label,more", *rows]))
    train, _ = read(tmp_path / "a.csv", samples=20_000, held_out=0)
    assert train.label_names == ("0", "1")


def test_rows_without_text_are_refused_or_dropped_and_counted(tmp_path):
    lines = ["text,label", "a,1", ",0", "  ,0", "b,0", "c,0", ",1"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"3 of 6 rows .* row 2\).* data\.drop_empty = true"):
        read(tmp_path / "a.csv", samples=3, held_out=0)
    splits = data.read_split(
        str(tmp_path / "a.csv"), split="train", text="text", label="label", samples=3, held_out=0,
        seed=0, drop_empty=True,
    )  # fmt: skip
    assert splits.dropped == 3
    labels = dict(zip(splits.train.texts, splits.train.labels, strict=True))
    assert labels == {"a": 1, "b": 0, "c": 0}


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_template_makes_a_text_of_several_columns(tmp_path, name):
    rows = {"ask": ["why", "who", ""], "more": ["", "says she", ""], "say": ["so", "I {do}", ""]}
    table = datasets.Dataset.from_dict(rows)
    (table.to_csv if name.endswith("csv") else table.to_json)(tmp_path / name)
    template = "Q {{}}: {ask}{more}\nA: {say}"
    read_it = partial(read, tmp_path / name, label=None, samples=2, held_out=0)
    train, _ = read_it(template, drop_empty=True)
    assert set(train.texts) == {"Q {}: why\nA: so", "Q {}: whosays she\nA: I {do}"}
    with pytest.raises(ConfigError, match=r"1 of 3 rows have no text"):
        read_it(template)
    with pytest.raises(ConfigError, match=r"data\.text = 'saying' is not a column"):
        read_it("{ask} {saying}")
    for wrong in ("{ask", "{}", "{ask!r}", "{ask:>9}"):
        with pytest.raises(ConfigError, match=r"write the names of columns in braces"):
            read_it(wrong)


def test_built_in_texts_have_columns_for_a_template():
    text = "{instruction}\nA: {response}"
    train, _ = read("builtin/notes", text, samples=20)
    plain, _ = read("builtin/notes", None, samples=20)
    assert [made.split("\nA: ")[1] for made in train.texts] == list(plain.texts)
    assert {made.split("\n")[0] for made in train.texts} == {
        "Write down a note.",
        "Write down a note about health.",
    }
    with pytest.raises(ConfigError, match=r"has no column 'reply': it has text, instruction"):
        read("builtin/notes", "{reply}")


@pytest.mark.parametrize("first", ["sentence\tlabel", "the words\tclass"])
def test_a_header_is_not_read_as_an_example(tmp_path, first):
    rows = [f"row {i}\t{i % 2}" for i in range(20)]
    (tmp_path / "a.tsv").write_text("\n".join([first, *rows]))
    with pytest.raises(ConfigError, match=r"data\.text = 0.*first line.*name the columns"):
        read(tmp_path / "a.tsv", 0, 1, samples=20, held_out=0)
    (tmp_path / "a.tsv").write_text("\n".join(rows))
    assert len(read(tmp_path / "a.tsv", 0, 1, samples=20, held_out=0)[0]) == 20
    # A causal language model has no labels, so nothing tells that line from the others.
    assert len(read(tmp_path / "a.tsv", 0, None, samples=20, held_out=0)[0]) == 20


def test_private_rows_stay_in_memory(tmp_path, monkeypatch):
    """No cache keeps a copy, which would be there when the run is long deleted."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.csv").write_text(ROWS)
    assert SECRET in read(tmp_path / "a.csv", samples=2, held_out=0)[0].texts
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "a.csv"]
    assert left == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/file.csv", ["/no/such/file.csv", "no such file"]),
        ("~nobody-at-all/file.csv", ["~nobody-at-all/file.csv", "no such file"]),
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
        return data.read_split(
            "builtin/notes", split="", text=None, label=None, samples=30, held_out=20, seed=seed
        )[:2]

    train, held_out = drawn(0)
    assert (len(set(train.texts)), len(set(held_out.texts))) == (30, 20)
    assert not set(train.texts) & set(held_out.texts)
    assert drawn(0) == (train, held_out)
    assert drawn(1) != (train, held_out)
    assert len(set(train.labels)) == 2


@pytest.mark.filterwarnings("ignore:The specified min_partition_size")
@given(
    st.integers(1, 12), st.integers(0, 40), st.sampled_from(["iid", "dirichlet"]), st.integers(0, 5)
)
def test_every_example_is_of_one_client(clients, more, how, seed):
    labels = [i % 3 for i in range(clients + 12 + more)]
    parts = data.partition(labels, clients, how=how, alpha=5.0, seed=seed)
    assert len(parts) == clients
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(labels)))
    assert how == "dirichlet" or max(map(len, parts)) - min(map(len, parts)) <= 1
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
        (None, ["1 of 2 texts", "the 4 tokens", "longest has 5", "data.max_length = 4"]),
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


SIZES = [
    (60, None, None, (48, 12)),  # a fifth
    (900, None, None, (800, 100)),  # at most a hundred
    (60, None, 10, (50, 10)),
    (60, None, 0.5, (30, 30)),
    (60, None, 0.001, (59, 1)),  # a share is never nothing
    (60, 30, 0.25, (30, 10)),  # a share of all that is used
    (60, 30, 10, (30, 10)),
    (2, None, None, (2, 0)),
]


@pytest.mark.parametrize(("rows", "samples", "held_out", "sizes"), SIZES)
def test_sizes_that_nobody_names_follow_from_the_rows(tmp_path, rows, samples, held_out, sizes):
    lines = [f"note {i},{i % 2}" for i in range(rows)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *lines]))
    train, held = read(tmp_path / "a.csv", samples=samples, held_out=held_out)[:2]
    assert (len(train), len(held)) == sizes
    assert len({*train.texts, *held.texts}) == sum(sizes)


def test_nothing_left_to_train_on_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,1\nb,0\n")
    with pytest.raises(ConfigError, match=r"held_out = 5 leaves nothing to train on.*has 2"):
        read(tmp_path / "a.csv", samples=None, held_out=5)


def test_classes_that_nobody_uses_are_not_looked_at(monkeypatch):
    """Well-known sets have a column of classes, which is -1 in a test split."""
    table = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [-1, -1]})
    classes = datasets.ClassLabel(names=["bad", "good"])
    monkeypatch.setattr(data, "_from_hub", lambda *arguments: table.cast_column("label", classes))
    assert len(read("glue/sst2", None, None, samples=2, held_out=0, classes=False)[0]) == 2
    with pytest.raises(ConfigError, match="no label"):
        read("glue/sst2", None, None, samples=2, held_out=0)
