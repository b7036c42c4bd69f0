"""Attacks, defenses and families of others: files in the tree, and installed packages."""

import importlib
import json
import multiprocessing
import os
import shutil
import site
import subprocess
import sys
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import tomli_w
from tiny import TABLES, invoked

from fedleak import attacks, defenses, detectors, models
from fedleak.attacks import server_modes
from fedleak.config.federation.lookup import stored
from fedleak.config.loading import parse
from fedleak.store.run import Run
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.plugins import OWN, discover

ROOT = Path(__file__).parents[1]
LITTLE = Path(__file__).parent / "little_package"

TABLE = {
    "name": "small",
    "model": TABLES["model"],
    "data": {"name": "builtin/notes", "samples": 8, "held_out": 4},
    "federation": {"clients": 2, "rounds": 1, "batch_size": 1, "learning_rate": 0.1},
}


def listed():
    done = invoked("list")
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture
def forget():
    """Forgets what was found, after the test too, and the modules that the test brought."""

    def forget():
        importlib.invalidate_caches()
        for cached in (discover, attacks.kinds, defenses.kinds, models.families):
            cached.cache_clear()

    before = set(sys.modules)
    forget()
    yield forget
    for name in set(sys.modules) - before:
        if name.startswith(("fedleak.attacks.", "acme", "zeta")):
            del sys.modules[name]
    forget()


ATTACK = "    uses = frozenset()\n    obstacle = __call__ = lambda *_, **__: None\n"


def kind(name, *, key="kind", base="", words="Mine."):
    return (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\n"
        f'class Mine({base}):\n    """{words}"""\n    {key} = "{name}"\n' + ("" if base else ATTACK)
    )


# --- files in the tree --------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch, forget):
    """Writes files into the package of the attacks, as it were."""

    def write(name, text):
        (tmp_path / "plugins" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "plugins" / f"{name}.py").write_text(text)
        forget()

    with monkeypatch.context() as patch:
        patch.setattr(attacks, "__path__", [*attacks.__path__, str(tmp_path / "plugins")])
        yield write


BROKEN = {
    "syntax": ("def (", "SyntaxError"),
    "import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "error": ("raise RuntimeError('\\x1b[2Jno\\nway')", r"RuntimeError: \x1b[2Jno\nway"),
    "exit": ("import sys\nsys.exit(3)", "SystemExit: 3"),
}


@pytest.mark.parametrize("file", ["my_attack", "my_attack/__init__"])
@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_named_and_takes_nothing_down(package, text, file):
    source, reason = BROKEN[text]
    package(file, source)
    assert {"probes", "dager", "lamp"} <= attacks.kinds().keys()
    broken = discover(attacks).broken
    assert list(broken) == ["fedleak.attacks.my_attack"]
    assert broken["fedleak.attacks.my_attack"].startswith(reason)
    parse(TABLE)  # what does not name it is not concerned
    with pytest.raises(ConfigError) as caught:
        parse(TABLE | {"attack": [{"kind": "my_attack"}]})
    assert "unknown kind 'my_attack'" in str(caught.value)
    assert f"cannot be used: fedleak.attacks.my_attack: {reason}" in str(caught.value)
    text = listed()
    (line,) = [line for line in text.splitlines() if "fedleak.attacks.my_attack" in line]
    assert reason.split(":")[0] in line
    assert "keyspan" in text


def test_a_run_of_a_package_that_is_not_here_asks_for_it(tmp_path):
    run = Run(tmp_path / "run")
    experiment = TABLE | {"attack": [{"kind": "gone"}]}
    run.create(experiment=experiment, fingerprint="", status="finished", num_labels=2)
    with pytest.raises(FedleakError) as caught:
        stored(run)
    assert "attack[0].kind: unknown kind 'gone'" in str(caught.value)
    assert str(caught.value).endswith("): install the package that this kind comes from")


def test_two_files_of_one_kind_are_both_named(package):
    package("aaa", kind("probes"))
    with pytest.raises(ConfigError) as caught:
        parse(TABLE | {"attack": [{"kind": "probes"}]})
    for module in ("fedleak.attacks.aaa", "fedleak.attacks.analytic.probes"):
        assert f"{module}: " in str(caught.value)
    assert "'probes'" in str(caught.value)
    assert "dager" in attacks.kinds()


def test_a_kind_without_a_word_about_itself_is_listed(package):
    package("mute", kind("mute", words=""))
    assert "mute" in listed()


def test_no_file_of_ours_is_broken():
    rooms = (attacks, server_modes, defenses, detectors)
    for discovered in (*map(discover, rooms), discover(models, "model_type")):
        assert discovered.broken == {}
        assert set(discovered.origins.values()) == {OWN}


# --- installed packages -------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path, monkeypatch, forget):
    """Puts a distribution on the path: its files, and what its entry points say."""

    def put(name, points, files, version="1.2"):
        folder = tmp_path / "site"
        about = folder / f"{name.encode('ascii', 'replace').decode().split()[0]}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        if isinstance(points, dict):
            points = "\n".join(
                f"[fedleak.{group}]\n" + "\n".join(f"p{i} = {v}" for i, v in enumerate(values))
                for group, values in points.items()
            )
        (about / "entry_points.txt").write_text(points)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        forget()

    return put


FAMILY = "from fedleak.models.bert import Bert\n" + kind("acme-bert", key="model_type", base="Bert")


def test_a_package_adds_its_own_and_the_list_says_whose_they_are(install):
    install(
        "acme-leaks",
        {"attacks": ["acme"], "defenses": ["acme.halve"], "models": ["acme_family"]},
        {
            "acme/__init__.py": "from acme.one import Mine\n",
            "acme/one.py": kind("acme_one", words="First.\n\nSecond."),
            "acme/deep/__init__.py": kind("acme_two"),
            "acme/halve.py": "",
            "acme/__main__.py": "raise SystemExit(4)\n",
            "acme_family.py": FAMILY,
        },
    )
    assert discover(attacks).foreign() == {
        "acme_one": "acme-leaks 1.2",
        "acme_two": "acme-leaks 1.2",
    }
    assert attacks.kinds()["acme_one"].__module__ == "acme.one"
    assert models.families()["acme-bert"].model_type == "acme-bert"
    assert discover(attacks).broken == {}
    assert discover(defenses).broken == {
        "acme.halve (acme-leaks 1.2)": "it defines no class that has a kind"
    }
    text = listed()
    mine = text.partition("attacks from acme-leaks 1.2\n")[2].partition(" from ")[0]
    assert [line.split() for line in mine.splitlines()[:2]] == [
        ["acme_one", "First."],
        ["acme_two", "Mine."],
    ]
    own = text.partition(f"attacks from {OWN}\n")[2].partition(" from ")[0]
    assert "dager" in own
    assert "acme" not in own
    assert "models from acme-leaks 1.2\n" in text
    assert "note: Attacks of other packages are not checked" in text
    (note,) = attacks.unchecked(["dager", "acme_one"])
    assert note.startswith("acme_one comes from acme-leaks 1.2: fedleak's import contract does not")


def test_without_other_packages_nothing_is_said_of_them(forget):
    assert "other packages" not in listed()


WRONG = {
    **{f"{name}.py": (f"{name}", *BROKEN[name]) for name in BROKEN},
    "nothing": ("acme_nothing", "", "it defines no class that has a kind"),
    "missing": ("acme_missing", None, "ModuleNotFoundError: No module named 'acme_missing'"),
    "object": ("acme_object:Mine", kind("acme"), "the entry point 'p0' must name a module"),
    "no name": ("acme object!", kind("acme"), "the entry point 'p0' must name a module"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_package_is_named_and_the_others_are_found(install, case):
    value, source, reason = WRONG[case]
    value = f"acme_{value}" if case.endswith(".py") else value
    files = {} if source is None else {f"{value.partition(':')[0]}.py": source}
    install("acme", {"attacks": [value]}, files)
    install("zeta", {"attacks": ["zeta"]}, {"zeta.py": kind("zeta")}, version="3")
    discovered = discover(attacks)
    assert {"dager", "zeta"} <= discovered.kinds.keys()
    assert "acme" not in discovered.kinds
    assert list(discovered.broken) == [f"{value} (acme 1.2)"]
    assert discovered.broken[f"{value} (acme 1.2)"].startswith(reason)
    text = " ".join(listed().split())
    assert f"cannot be used {value} (acme 1.2): {reason.split()[0]}" in text
    with pytest.raises(ConfigError, match=r"cannot be used: .*\(acme 1\.2\)"):
        parse(TABLE | {"attack": [{"kind": "acme"}]})


FLAWED = {
    "no dataclass": (attacks, kind("mine").replace("@dataclass(frozen=True)", ""), "@dataclass"),
    "no facts": (attacks, kind("mine").replace("uses", "used"), "which facts it uses"),
    "no call": (attacks, kind("mine").replace("= __call__ ", ""), "no method __call__"),
    "a function": (defenses, kind("mine"), "let it inherit"),
    "a bare defense": (
        defenses,
        "from fedleak.defenses import Defense\n"
        + kind("mine", base="Defense").replace("@dataclass(frozen=True)", ""),
        "@dataclass",
    ),
}


@pytest.mark.parametrize("case", FLAWED)
def test_a_class_that_lacks_something_is_named_with_it_and_not_listed(install, case):
    group, source, lack = FLAWED[case]
    group_name = group.__name__.rpartition(".")[2]
    install("acme", {group_name: ["acme"]}, {"acme.py": source})
    assert "mine" not in group.kinds()
    assert list(discover(group).broken) == ["acme.Mine (acme 1.2)"]
    assert lack in discover(group).broken["acme.Mine (acme 1.2)"]
    key = group_name.removesuffix("s")
    with pytest.raises(
        ConfigError, match=r"cannot be used: acme\.Mine \(acme 1\.2\): it "
    ) as caught:
        parse(TABLE | {key: [{"kind": "mine"}]})
    assert lack in str(caught.value)


def test_entry_points_that_cannot_be_read_leave_fedleaks_own(install):
    install("acme", "[fedleak.attacks]\nno equals sign\n", {})
    assert "dager" in attacks.kinds()
    assert list(discover(attacks).broken) == ["entry points of fedleak.attacks"]
    assert "entry points of fedleak.attacks" in listed()


def test_a_kind_of_two_packages_is_nobodys_and_both_are_named(install):
    install("acme", {"attacks": ["acme"]}, {"acme.py": kind("zeta")})
    install("zeta", {"attacks": ["zeta"]}, {"zeta.py": kind("zeta")}, version="3")
    assert "zeta" not in attacks.kinds()
    assert "dager" in attacks.kinds()
    with pytest.raises(ConfigError) as caught:
        parse(TABLE | {"attack": [{"kind": "zeta"}]})
    sentence = "acme.Mine (acme 1.2) and zeta.Mine (zeta 3) have one kind: 'zeta'"
    assert str(caught.value).count(sentence) == 2, "once for each module"
    assert sentence in " ".join(listed().split())


def test_a_kind_of_fedleaks_own_stays_what_it_is(install):
    before = attacks.kinds()["dlg"]
    install("acme", {"attacks": ["acme"]}, {"acme.py": kind("dlg")})
    assert attacks.kinds()["dlg"] is before
    assert discover(attacks).foreign() == {}
    ((culprit, reason),) = discover(attacks).broken.items()
    assert culprit == "acme (acme 1.2)"
    assert reason.startswith("fedleak.attacks.matching.")
    assert reason.endswith(" and acme.Mine (acme 1.2) have one kind: 'dlg'")
    assert reason in " ".join(listed().split())


def test_no_other_package_puts_an_attack_into_every_run(install):
    before = attacks.always_on()
    assert before
    install("acme", {"attacks": ["acme"]}, {"acme.py": kind("acme") + "    always = True\n"})
    assert attacks.always_on() == before


def test_a_module_that_two_entry_points_name_counts_once(install):
    install("acme", {"attacks": ["acme", "acme.one"]}, {"acme/one.py": kind("acme_one")})
    discovered = discover(attacks)
    assert discovered.foreign() == {"acme_one": "acme 1.2"}
    assert discovered.broken == {}


def test_a_family_that_cannot_be_made_takes_no_other_down(install, caplog):
    broken = FAMILY + "    def __init__(self, more): ...\n"
    install("acme", {"models": ["acme_family"]}, {"acme_family.py": broken})
    assert {"bert", "gpt2", "llama"} == models.families().keys()
    assert "acme-bert" in caplog.text
    assert "acme-bert" not in listed()


def test_a_terminal_obeys_nothing_in_names_versions_and_kinds(install):
    odd = "\\x1b[2J\\u202e[red]"
    install(
        "acme\x1b[2J\u202e[red]", {"attacks": ["acme"]}, {"acme.py": kind(odd, words=odd)}, "1\x9b2"
    )
    text = listed()
    assert r"attacks from acme\x1b[2J\u202e[red] 1\x9b2" in text
    assert text.replace("\n", "").isprintable()


def test_a_worker_finds_what_is_installed(install):
    install(
        "acme",
        {"attacks": ["acme"], "models": ["acme_family"]},
        {"acme.py": kind("acme"), "acme_family.py": FAMILY},
    )
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        assert pool.submit(attacks.kinds).result().keys() == attacks.kinds().keys()
        assert "acme-bert" in pool.submit(models.families).result()


# --- a package that pip installs ----------------------------------------------------------------


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


def wheel(source, folder):
    """Builds a wheel from a copy, without a network, and returns its path."""
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-q", "-w", folder, source)
    (path,) = Path(folder).glob("*.whl")
    return path


@pytest.fixture(scope="module")
def fedleak_wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in ("fedleak", "clients", "server", "experiments"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return wheel(source, tmp_path_factory.mktemp("fedleak"))


@pytest.mark.slow
def test_the_wheel_holds_the_mark_of_its_types(fedleak_wheel):
    names = zipfile.ZipFile(fedleak_wheel).namelist()
    assert "fedleak/py.typed" in names
    assert "fedleak/cli/__init__.py" in names


@pytest.mark.slow
def test_a_little_package_in_a_fresh_environment_attacks_and_defends(fedleak_wheel, tmp_path):
    """Fedleak and the package are installed there; only what they need is shared with here."""
    home = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (there,) = (home / "lib").glob("python*/site-packages")
    shared = "".join(f"{folder}\n" for folder in site.getsitepackages())
    (there / "shared.pth").write_text(
        shared
    )  # after its own folder, and no .pth file in it is read
    little = wheel(shutil.copytree(LITTLE, tmp_path / "little"), tmp_path / "wheels")
    for built_wheel in (fedleak_wheel, little):
        target = (
            "--python",
            home / "bin" / "python",
            "install",
            "--no-deps",
            "--no-index",
            built_wheel,
        )
        pip(*target, "--ignore-installed")

    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def fedleak(*arguments):
        done = subprocess.run(
            [home / "bin" / "fedleak", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = fedleak("list")
    assert "attacks from acme-leaks 1.2\n  acme_rows " in text
    assert "defenses from acme-leaks 1.2\n  acme_halve " in text
    kinds = {"attack": [{"kind": "acme_rows"}], "defense": [{"kind": "acme_halve"}]}
    (tmp_path / "small.toml").write_text(tomli_w.dumps(TABLE | kinds))
    report = " ".join(fedleak("run", "small.toml").split())
    assert "note: acme_rows comes from acme-leaks 1.2" in report
    lines = (tmp_path / "runs" / "small" / "leakage.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    mine = [row for row in rows if row["attack"] == "acme_rows"]
    assert len(mine) == 2
    assert [row["status"] for row in mine] == ["recovered"] * 2
    assert [row["token_recall"] for row in mine] == [1.0] * 2
    (defended, _) = (tmp_path / "runs" / "small" / "defenses.jsonl").read_text().splitlines()
    norms = json.loads(defended)
    assert norms["norm_after"] == pytest.approx(norms["norm_before"] / 2)
