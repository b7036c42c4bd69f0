"""What README and docs show is true: commands run, experiments load, links lead somewhere."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny import invoked

from fedleak.audit.metrics import intervals
from fedleak.cli.options import QUICKSTART
from fedleak.config.loading import load
from fedleak.running import sweep

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "experiments" / "README.md",
]
README = PAGES[0].read_text()

CURVES = runpy.run_path(str(ROOT / "docs" / "curves.py"))

ELSEWHERE = {
    "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[audit]' "
    "&& .venv/bin/fedleak run": "installs; test_the_picture_is_current runs the quickstart",
    "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e '.[dev]' "
    "&& .venv/bin/pytest -n 3": "is what runs this; CI calls it",
    "pip install ./loud-words": "installs, as tests/test_plugins.py does; here it is done by hand",
    ". .venv/bin/activate": "the tests run in an environment already",
    "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1": (
        "is for flwr run"
    ),
    "FEDLEAK_VAULT=$PWD/runs flwr run . --stream "
    "--federation-config 'num-supernodes=12 client-resources-num-cpus=1'": (
        "leaves a SuperLink behind; tests/server/test_simulation.py runs the same apps"
    ),
    "python experiments/matrix.py": (
        "takes an hour and needs models and data that are not in the repository; "
        "tests/test_matrix.py runs a part of it"
    ),
    "python experiments/where_each_dies.py": (
        "takes minutes; tests/test_where_each_dies.py runs a part of it"
    ),
    "fedleak sweep experiments/frontier-gpt2.toml": (
        "takes half an hour; tests/test_sweep.py runs a sweep of families"
    ),
    "experiments/deployment/run.sh": "tests/test_deployment.py runs it in a folder of its own",
    "mkdir -p /srv/fedleak/nodes /srv/fedleak/keys /srv/fedleak/runs": "is for what follows",
    "export FEDLEAK_FOLDER=/srv/fedleak FEDLEAK_HOST=server.example FEDLEAK_UID=$(id -u) "
    "FEDLEAK_GID=$(id -g)": "is for what follows, too",
    "export FEDLEAK_NODE=/srv/node FEDLEAK_SERVER=server.example:8443 FEDLEAK_CLIENT=0 "
    "FEDLEAK_CLIENTS=4": "is for what follows, too",
    "export FEDLEAK_UID=$(id -u) FEDLEAK_GID=$(id -g)": "is for what follows, too",
    **{
        f"docker compose -f experiments/deployment/{command}": "needs an engine"
        for command in (
            "server.yml up -d",
            "node.yml run --rm key",
            "server.yml run --rm register",
            "node.yml up -d",
            "server.yml run --rm operator",
            "node.yml run --rm handover",
            "server.yml run --rm score",
        )
    },
    "python experiments/deployment/credentials.py sign . signing signatures": (
        "needs the key of that federation; tests/test_gateway.py signs an app"
    ),
    "flower-supernode --superlink server.example:8443 --root-certificates ca.crt "
    "--auth-supernode-private-key key --trusted-entities trusted.yaml "
    "--node-config 'partition-id=0 num-partitions=4 "
    'data="/private/notes.csv" vault="/private/vault"\'': (
        "needs a SuperLink on another machine; tests/test_deployment.py starts such nodes"
    ),
    'flwr run . federation --run-config \'experiment="/srv/federation.toml" '
    'run-dir="/srv/runs/federation"\'': "needs that federation",
    "fedleak watch federation": "needs it, too; tests/test_flower_runs.py has its statuses",
    "fedleak score /srv/runs/federation --vault /handed-over/node-0 --vault /handed-over/node-1": (
        "needs its vaults; tests/audit/test_handover.py takes some"
    ),
    "fedleak train-prior --text wikitext.txt --tokenizer bert-base-uncased --out prior": (
        "needs the hub; tests/models/test_prior.py runs it with a built-in tokenizer"
    ),
    "python experiments/reproduce.py experiments/lamp-table1.toml": (
        "needs a GPU and the hub; tests/test_reproduce.py runs a small table"
    ),
    "fedleak train-prior --text wiki.train.txt --tokenizer bert-base-uncased "
    "--out $FEDLEAK_ASSETS/models/prior-bert-vocab "
    "--set layers=24 --set width=1024 --set heads=8": (
        "needs a GPU and a text that is not in the repository"
    ),
    "cd $FEDLEAK_ASSETS/data/rotten_tomatoes": "needs data that is not in the repository",
    r"{ printf 'sentence\tlabel\n'; sed 's/$/\t0/' rt-polarity.utf8.neg; "
    r"sed 's/$/\t1/' rt-polarity.utf8.pos; } > all.tsv": "needs that data, too",
}
"""Commands that no test here runs, and why."""

QUICK = {
    "fedleak list",
    "python docs/generate.py",
    "python experiments/reproduce.py experiments/sweep-batch-size.toml --no-run",
}
"""Commands that run by default; the others are slow tests."""


class Block(NamedTuple):
    """A fenced block of a page: its language, and its text."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block is, if its first line says so."""
        match = re.match(r"# ([\w./-]+\.\w+)\n", self.text)
        return match[1] if match else None

    @property
    def commands(self) -> list[str]:
        """The commands of a block of shell, each in one line."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S):
        yield Block(language, text)


COMMANDS = {
    page: [
        command for block in blocks(page) if block.language == "sh" for command in block.commands
    ]
    for page in PAGES
}
EXPERIMENTS = {
    f"{page.stem}-{number}": block.text
    for page in PAGES
    for number, block in enumerate(
        toml_block for toml_block in blocks(page) if toml_block.language == "toml"
    )
    if "[project]" not in block.text and block.file != "about.toml"
}


@dataclass(frozen=True)
class Reader:
    """Somebody who types what a page says into a folder with a copy of the checkout's files."""

    folder: Path

    def follow(self, page: Path) -> None:
        """Writes the page's files and runs its commands, in their order."""
        for block in blocks(page):
            if block.file is not None:
                self.write(block.file, block.text)
            if block.language == "sh":
                for command in block.commands:
                    if command not in ELSEWHERE:
                        self.run(command)

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        if file.name == "pyproject.toml":
            self._install(file)

    def _install(self, pyproject: Path) -> None:
        """Makes what an installation of a package writes: here nothing can be downloaded."""
        project = tomllib.loads(pyproject.read_text())["project"]
        name, version = project["name"].replace("-", "_"), project["version"]
        info = pyproject.parent / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
        )
        points = [
            f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in entries.items())
            for group, entries in project["entry-points"].items()
        ]
        (info / "entry_points.txt").write_text("\n".join(points))

    def run(self, command: str) -> str:
        packages = [str(path.parent) for path in self.folder.glob("*/pyproject.toml")]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *packages]),
        }
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    for name in ("experiments", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return Reader(tmp_path)


def test_ci_runs_the_readme_test_command() -> None:
    commands = re.findall(r"```sh\n(python3 -m venv .*)\n```", README)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


def test_the_lists_of_commands_are_current() -> None:
    shown = {command for commands in COMMANDS.values() for command in commands}
    assert shown >= ELSEWHERE.keys()
    assert shown >= QUICK


@pytest.mark.parametrize("command", sorted(QUICK))
def test_a_quick_command_works(
    command: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reader.folder)
    program, *arguments = shlex.split(command)
    if program == "fedleak":
        ended = invoked(*arguments)
        assert ended.exit_code == 0, ended.output
        return
    assert program == "python"
    monkeypatch.setattr(sys, "argv", arguments)
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    else:
        status = 0
    assert not status


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if set(COMMANDS[page]) - ELSEWHERE.keys() - QUICK],
    ids=lambda page: page.stem,
)
def test_a_page_can_be_followed(page: Path, reader: Reader) -> None:
    reader.follow(page)


def test_the_reference_is_current() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    for page, reference in generate["PAGES"].items():
        written = (ROOT / "docs" / page).read_text()
        assert written.endswith(generate["MARKER"] + reference()), "run `python docs/generate.py`"


def test_the_drawn_house_is_current() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "house.py"))
    drawn = drawing["house"]((ROOT / "pyproject.toml").read_text())
    assert drawing["PICTURE"].read_text() == drawn, "run `python docs/house.py`"


@pytest.mark.parametrize("picture", CURVES["PICTURES"], ids=lambda picture: picture.stem)
def test_a_picture_of_figures_is_what_the_tables_of_its_page_draw(picture: Path) -> None:
    page, draw = CURVES["PICTURES"][picture]
    text = page.read_text()
    assert f"]({picture.relative_to(page.parent)})" in text
    stamp = CURVES["stamp"](draw(text))
    assert picture.read_text().endswith(stamp), "run `python docs/curves.py`"


def test_another_figure_in_a_table_makes_another_picture() -> None:
    page, draw = CURVES["PICTURES"][ROOT / "docs" / "frontier-gpt2.svg"]
    text = page.read_text()
    changed = text.replace("68 [35, 84] (9)", "67 [35, 84] (9)")
    assert changed != text
    assert CURVES["stamp"](draw(changed)) != CURVES["stamp"](draw(text))


def test_only_rows_of_tables_are_drawn() -> None:
    prose = "noise 3e-4 | yes | 9/10 [60, 98] | 96\n"
    assert list(CURVES["tables"](f"{prose}\n| a | b |\n|---|---|\n| 1 | x |\n\n{prose}")) == [
        [{"a": "1", "b": "x"}]
    ]


def test_a_cell_has_a_figure_its_interval_and_a_control() -> None:
    whole = {"y": 1180.0, "low": 2.5, "high": 3.0, "control": 9.0}
    assert CURVES["figures"]("1,180 [2.5, 3] (9)") == whole
    assert CURVES["figures"]("0 [0, 97] *") == {"y": 0.0, "low": 0.0, "high": 97.0}
    assert CURVES["figures"]("-2.3e+03") == {"y": -2300.0}
    for word in ("no answer", "-", "12 of 12"):
        assert CURVES["figures"](word) == {}


def test_no_other_program_has_drawn_figures() -> None:
    for folder in ("docs", "experiments"):
        for picture in (ROOT / folder).rglob("*.svg"):
            assert "matplotlib" not in picture.read_text().lower(), picture


@pytest.mark.slow
def test_the_picture_is_current(reader: Reader) -> None:
    """But for what gradient matching found, which depends on the processor's arithmetic."""
    reader.run("fedleak run experiments/quickstart-llama.toml")
    reader.run("python docs/picture.py runs/quickstart-llama --out new.svg")
    new, old = (
        re.sub(r"0/2(&#160;)+\d+", "", path.read_text())
        for path in (reader.folder / "new.svg", ROOT / "docs" / "quickstart.svg")
    )
    assert new == old


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_on_a_page_is_valid(name: str, tmp_path: Path) -> None:
    """A part of a file stands for a whole file with the rest."""
    path, text = tmp_path / "example.toml", EXPERIMENTS[name]
    if "[model]" not in text:
        rest = '[model]\nname = "builtin/bert-tiny"\n[data]\nname = "builtin/notes"\n'
        text = f'name = "example"\n{rest}{text}'
    path.write_text(text)
    if "[sweep" in text:  # [[sweep.family]] as well
        assert len(sweep.load(path).cells) > 1
    else:
        assert load(path).attacks


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda p: p.stem
)
def test_every_experiment_file_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLEAK_ASSETS", "assets")
    swept = "[sweep" in path.read_text()  # [[sweep.family]] as well
    assert (sweep.load(path) if swept else load(path)).name == path.stem


def test_the_tutorials_attack_reads_words(bert_tiny, observe) -> None:
    page = ROOT / "docs" / "tutorial-researcher.md"
    (code,) = (block.text for block in blocks(page) if block.language == "python")
    defined: dict[str, type] = {"__name__": "loud_words"}
    exec(compile(code, page.name, "exec"), defined)
    client = observe(bert_tiny, 2)
    answer = defined["LoudWords"](most=5)(client.seen, bert_tiny, rng=None)
    assert set(answer.tokens) <= {token for ids in client.sequences for token in ids}
    assert len(answer.tokens) == 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
@pytest.mark.parametrize("path", QUICKSTART, ids=lambda path: path.stem)
def test_the_model_of_a_quickstart_learns(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader asks whether such updates are those of a real training."""
    monkeypatch.chdir(tmp_path)
    settings = ("--set", "name=learns", "--set", "attack=[]")
    assert invoked("run", str(path), *settings).exit_code == 0
    summary = json.loads((tmp_path / "runs" / "learns" / "summary.json").read_text())
    before, after = summary["utility_before"], summary["utility"]
    if "accuracy" in after:
        right = round(after["accuracy"] * summary["held_out"])
        assert intervals.wilson(right, summary["held_out"]).low > 0.5
    else:
        assert after["perplexity"] < before["perplexity"] / 2


@pytest.mark.parametrize("name", ["my_update.py", "my_delta.py"])
def test_the_code_of_ones_own_update_reads_the_texts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the example of the README goes on from where a loop has called loss.backward()."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "own-update.md"
    (code,) = (block.text for block in blocks(page) if block.file == name)
    defined: dict[str, object] = {}
    exec(compile(code, name, "exec"), defined)
    printed = capsys.readouterr().out
    for text in defined["texts"]:
        assert text in printed
    if name == "my_update.py":
        assert "proved" in printed
        assert "exact: 100%" in printed
        (short,) = (block.text for block in blocks(PAGES[0]) if block.language == "python")
        exec(compile(short, "README.md", "exec"), defined)
        assert capsys.readouterr().out.endswith("1.0\n")
