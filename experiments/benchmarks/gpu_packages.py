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
from typing import Any

from gpu_figures import ROOT

TESTS = ("pytest", "pytest-timeout", "hypothesis")


def main() -> None:
    """Prints one of the two lists."""
    print(*{"lacking": lacking, "constraints": constraints}[sys.argv[1]](), sep="\n")


def lacking() -> Iterator[str]:
    """Yields requirements that are not met. Nothing here runs a simulation, so without extras."""
    dev = _project()["optional-dependencies"]["dev"]
    for requirement in (*needed(), *(test for test in dev if name_of(test) in TESTS)):
        plain = re.sub(r"\[.*?\]", "", requirement)
        if not _met(plain):
            yield plain


def needed() -> list[str]:
    """Returns the requirements of the library and of audits."""
    project = _project()
    return [*project["dependencies"], *project["optional-dependencies"]["audit"]]


def _project() -> dict[str, Any]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project: dict[str, Any] = table["project"]
    return project


def constraints() -> Iterator[str]:
    """Yields the versions to install, of packages that are not there."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name = line.partition("==")[0]
        if line.startswith("#") or installed(name) is None:
            yield line


def _met(requirement: str) -> bool:
    """Whether a requirement `name>=1.2,<3` is met."""
    there = installed(name_of(requirement))
    if there is None:
        return False
    for sign, bound in re.findall(r"(>=|<)([0-9.]+)", requirement):
        own, limit = _numbers(there), _numbers(bound)
        if (own < limit) if sign == ">=" else (own >= limit):
            return False
    return True


def name_of(requirement: str) -> str:
    """Returns the name of the package that a requirement is of."""
    return re.split(r"[\[<>=]", requirement)[0]


def installed(name: str) -> str | None:
    """Returns the version of a package; None if it is not there."""
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
