"""`fedleak bench`: a tiny suite through the same code, and what may not stand in one table."""

import json
import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import tomli_w
from tiny import DLG, Here, call

from fedleak.running import sweep
from fedleak.running.bench import markdown, suites
from fedleak.running.bench.results import RESULT
from fedleak.util.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "experiments" / "outside" / "bag_of_words.py"
COMMAND = f"{shlex.quote(sys.executable)} {PROGRAM} {{observation}} {{answer}}"
TINY = {
    "name": "tiny",
    "version": 1,
    "about": "two clients",
    "experiment": {
        "model": {"name": "smaller than builtin/bert-tiny: `folders`"},
        "data": {"name": "builtin/notes", "samples": 8, "held_out": 4},
        "federation": {"clients": 2, "rounds": 1, "batch_size": 1, "learning_rate": 0.1},
    },
    "attack": [{"kind": "dager"}, {"kind": "position_marginals"}],
    "setting": [
        {"name": "bert", "about": "a BERT"},
        {"name": "llama", "about": "a LLaMA", "experiment": {"model.name": "x"}},
        {"name": "real", "about": "a real one"},
    ],
}
TINY["setting"][1]["experiment"] = {"model": {"name": "and than builtin/llama-tiny"}}
TINY["setting"][2]["experiment"] = {"model": {"name": "${FEDLEAK_ASSETS}/models/some"}}


@pytest.fixture(scope="module", autouse=True)
def folders(saved):
    """Makes models of the built-in ones' vocabularies that cost a tenth."""
    for table, family in ((TINY, "bert"), (TINY["setting"][1], "llama")):
        table["experiment"]["model"]["name"] = saved(family, layers=3, width=48)


@pytest.fixture
def here(tmp_path, monkeypatch, in_process):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLEAK_ASSETS", raising=False)
    return tmp_path


def write(name="suite.toml", **changes):
    Path(name).write_text(tomli_w.dumps({**TINY, **changes}))
    return name


def result(suite="tiny-1"):
    path = Path("runs", f"bench-{suite}", "bench.json")
    return path, RESULT.parse(path.read_bytes())


def cells(bench_result, setting):
    (setting_result,) = [row for row in bench_result.settings if row.name == setting]
    return {cell.attack: cell for cell in setting_result.cells}


def test_a_suite_is_run_once_and_another_attack_takes_no_more_than_itself(here):
    status, out, err = call("bench", write())
    assert (status, err) == (0, "")
    assert "setting real is left out: needs models and data" in " ".join(out.split())
    assert "position_marginals cannot work in llama: reads rows of positions" in out
    path, bench_result = result()
    assert [attack.name for attack in bench_result.attacks] == [
        "probes",
        "dager",
        "position_marginals",
    ]
    assert bench_result.missing == ()
    bert, llama = cells(bench_result, "bert"), cells(bench_result, "llama")
    assert bert["dager"].figures.exact_match.mean == 1.0
    assert bert["dager"].figures.verified == 2
    assert "reads rows of positions" in llama["position_marginals"].left_out
    assert llama["position_marginals"].figures is None
    assert [setting.left_out is None for setting in bench_result.settings] == [True, True, False]
    assert str(here) not in path.read_text()

    capture = next(Path("runs/bench-tiny-1/bert").rglob("captures/**/*.safetensors"))
    made = capture.stat().st_mtime_ns
    Path("mine.toml").write_text(tomli_w.dumps({"attack": [{**DLG, "name": "mine"}]}))
    status, out, err = call(
        *("bench", "suite.toml", "--only", "--attacks", "mine.toml", "--command", COMMAND),
        *("--setting", "bert"),
    )
    assert (status, err) == (0, "")
    assert "dager" not in out
    assert capture.stat().st_mtime_ns == made
    _, added = result()
    assert [attack.name for attack in added.attacks] == ["probes", "mine", "command"]
    assert [attack.outside for attack in added.attacks] == [False, False, True]
    assert cells(added, "bert")["command"].figures.token_recall.mean == 1.0
    assert added.settings[0].texts == bench_result.settings[0].texts
    assert added.settings[1].left_out == "was not asked for (--setting)"

    status, out, _ = call("bench", "suite.toml", "--out", "again.json")
    assert status == 0
    assert "round" not in out, "something was done again"
    again = RESULT.parse(Path("again.json").read_bytes())
    assert again.settings == bench_result.settings

    status, out, _ = call("bench-table", "again.json", str(path))
    assert status == 0
    assert "## tiny, version 1" in out
    assert re.search(r"\| `dager` \(A\) \| 100 \(100\) \| 100 \(100\) \|", out)
    assert "| `position_marginals` (A) | 100 (100) | cannot |" in out
    assert "`dager` (A) | 2 of 2 | 100 [15, 100] (few) | 100 [15, 100] | " in out
    assert "cannot work here: reads rows of positions" in out
    assert "Not run: needs models and data" in out


def test_an_attack_that_fails_leaves_the_rest_and_is_said(here):
    Path("fails.py").write_text("import sys\nsys.exit('no such <GPU>|')\n")
    suite = write(setting=TINY["setting"][:1])
    command = f"{shlex.quote(sys.executable)} fails.py {{observation}} {{answer}}"
    status, _, err = call("bench", suite, "--command", command)
    assert status == 1
    assert "command failed on 2 of 2 updates of 'bert'" in err
    assert "no such <GPU>|" in err
    path, bench_result = result()
    assert cells(bench_result, "bert")["dager"].figures.answers == 2
    assert cells(bench_result, "bert")["command"].reasons == {
        "outside program: exit status 1: no such <GPU>|": 2
    }
    table = call("bench-table", str(path))[1]
    assert r"Not complete: command failed on 2 of 2 updates of 'bert'" in table
    assert r"no such \<GPU\>\|" in table
    assert "| `command` | no answer |" not in table

    Path("fails.py").write_text(PROGRAM.read_text())
    assert call("bench", suite, "--command", command)[0] == 1, "failures are tried unasked"
    assert call("bench", suite, "--command", command, "--retry")[0] == 0


@pytest.mark.slow
def test_a_changed_suite_is_another_one(here):
    suite = write(setting=TINY["setting"][:1])
    assert call("bench", suite)[0] == 0
    changed = {**TINY["experiment"], "seed": 4}
    write(setting=TINY["setting"][:1], experiment=changed)
    status, _, err = call("bench", suite)
    assert status == 2
    assert "holds another experiment (seed: 0 -> 4)" in err
    assert call("bench", suite, "--fresh")[0] == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The content of a result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("made"))
        patch.delenv("FEDLEAK_ASSETS", raising=False)
        patch.setattr(sweep, "hire", lambda *_: nullcontext([Here()]))
        assert call("bench", write(setting=TINY["setting"][:1]))[0] == 0
        return result()[0].read_text()


@pytest.fixture
def two(tmp_path, monkeypatch, made):
    """Returns what is said of a result and another beside it, which has changes."""
    monkeypatch.chdir(tmp_path)
    path = Path("bench.json")
    path.write_text(made)

    def beside(**changes):
        table = json.loads(path.read_text())
        for key, value in changes.items():
            where = table["settings"][0] if key in ("model", "texts") else table
            where[key] = value
        Path("other.json").write_text(json.dumps(table))
        return call("bench-table", str(path), "other.json")

    return beside


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "their version differs (1, 2)"),
        ({"suite": "quick"}, "their suite differs (tiny, quick)"),
        ({"fingerprint": "0"}, "their fingerprint of the settings differs"),
        ({"settings": []}, "their number of settings differs (1, 0)"),
        ({"model": "other"}, "the weights of 'bert' differ"),
        ({"texts": "other"}, "the texts of 'bert' differ"),
        ({"schema_version": 9}, "has schema_version 9"),
        ({"attacks": "none"}, "attacks: Input should be"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(two, change, message):
    assert two()[0] == 0
    status, out, err = two(**change)
    assert status == 2
    assert message in err
    assert out == ""


def test_a_result_of_anybody_is_shown_and_not_obeyed(two):
    attack = {
        "name": "`x|<script>",
        "settings": {"command": "`a|b` <img onerror=x>"},
        "origin": "fedleak",
        "outside": True,
    }
    missing = ["<script>alert(1)</script> [click](javascript:x) | \x1b[31m"]
    status, out, _ = two(attacks=[attack], missing=missing)
    assert status == 0
    assert "\\<script\\>alert(1)\\</script\\> \\[click\\](javascript:x) \\|" in out
    assert "\x1b" not in out
    assert "`'x\\|<script>`" in out  # as code, which shows it


def test_a_page_gets_its_tables_below_its_marker(two):
    path = Path("bench.json")
    Path("page.md").write_text(f"mine\n{markdown.MARKER}old\n")
    assert call("bench-table", str(path), "--into", "page.md")[0] == 0
    page = Path("page.md").read_text()
    assert page.startswith(f"mine\n{markdown.MARKER}\n## tiny")
    assert "old" not in page
    Path("page.md").write_text("mine\n")
    status, _, err = call("bench-table", str(path), "--into", "page.md")
    assert (status, "has no line" in err) == (2, True)
    assert Path("page.md").read_text() == "mine\n"


WRONG = {
    "unknown": (["quikc"], {}, "unknown suite 'quikc': did you mean 'quick'?"),
    "version": (None, {"version": 0}, "version"),
    "key": (None, {"attacks": []}, "unknown key 'attacks'"),
    "twice": (None, {"setting": TINY["setting"][:1] * 2}, "two settings are called 'bert'"),
    "attack in a setting": (
        None,
        {"experiment": {**TINY["experiment"], "attack": []}},
        "attack is not part of a setting",
    ),
    "experiment": (None, {"experiment": {"model": {"nmae": "x"}}}, "setting 'bert': "),
    "no attack": (["suite.toml", "--only"], {}, "--only leaves out all attacks"),
    "no kind": (["suite.toml", "--attack", "dagre"], {}, "did you mean 'dager'?"),
    "no setting": (["suite.toml", "--setting", "brt"], {}, "did you mean 'bert'?"),
    "two names": (["suite.toml", "--attack", "dager"], {}, "two are called 'dager'"),
    "no program": (
        ["suite.toml", "--command", "no-such-program {observation} {answer}"],
        {},
        "attack 'command': command = ",
    ),
    "out": (["suite.toml", "--out", "no/where.json"], {}, "there is no such folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_run(here, case):
    arguments, changes, message = WRONG[case]
    write(**changes)
    status, _, err = call("bench", *(arguments or ["suite.toml"]))
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["quick", "full"])
def test_the_suites_of_fedleak_are_right(name, tmp_path):
    suite = suites.load(name)
    assert suite.name == name
    for setting in suite.settings:
        assert setting.with_attacks(suite.attack, tmp_path).name == setting.name


def test_the_quick_suite_needs_nothing_but_fedleak():
    own = [setting for setting in suites.load("quick").settings if not setting.needs_assets]
    assert len(own) >= 10
    assert all(setting.experiment["model"]["name"].startswith("builtin/") for setting in own)
    assert all(setting.experiment["data"]["name"].startswith("builtin/") for setting in own)


def test_the_page_of_the_benchmark_is_current():
    """But for the version of fedleak, which is that of the result."""
    results = sorted((ROOT / "experiments" / "bench" / "results").glob("*.json"))
    assert results
    page = (ROOT / "docs" / "benchmark.md").read_text()
    read = markdown.read_results(results)
    assert page.partition(markdown.MARKER)[2] == markdown.markdown(read), (
        "run `fedleak bench-table experiments/bench/results/*.json --into docs/benchmark.md`"
    )
    suite = suites.load(read[0].suite)
    assert (read[0].version, read[0].fingerprint) == (suite.version, suite.fingerprint), (
        "the suite was changed: give it another version, and run it"
    )


def test_results_are_refused_where_there_is_no_file():
    with pytest.raises(ConfigError, match="No such file"):
        markdown.read_results([Path("no-such-result.json")])
