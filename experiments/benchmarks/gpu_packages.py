"""Prints what `gpu.sh` has to install for the interpreter that runs this: standard library only.

  python experiments/benchmarks/gpu_packages.py lacking|constraints

lacking      requirements of pyproject.toml, and of the tests, that are not met, one in each line
constraints  constraints.txt without the packages that are there: they stay as they are
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("pytest", "pytest-timeout", "hypothesis")


def main() -> None:
    """Prints one of the two lists."""
    print(*{"lacking": lacking, "constraints": constraints}[sys.argv[1]](), sep="\n")


def lacking() -> Iterator[str]:
    """Yields requirements that are not met. Nothing here runs a simulation, so without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["audit"]]
    wanted += [requirement for requirement in extras["dev"] if _name(requirement) in TESTS]
    for requirement in wanted:
        plain = re.sub(r"\[.*?\]", "", requirement)
        if not _met(plain):
            yield plain


def constraints() -> Iterator[str]:
    """Yields the versions to install, of packages that are not there."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name = line.partition("==")[0]
        if line.startswith("#") or _installed(name) is None:
            yield line


def _met(requirement: str) -> bool:
    """Whether a requirement `name>=1.2,<3` is met."""
    installed = _installed(_name(requirement))
    if installed is None:
        return False
    for sign, bound in re.findall(r"(>=|<)([0-9.]+)", requirement):
        own, limit = _numbers(installed), _numbers(bound)
        if (own < limit) if sign == ">=" else (own >= limit):
            return False
    return True


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=]", requirement)[0]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: 2.11.0+cu130 is (2, 11, 0)."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


if __name__ == "__main__":
    main()
