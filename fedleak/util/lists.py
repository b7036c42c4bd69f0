"""Values by what they have in common, and the first few of many in words."""

from collections.abc import Callable, Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def grouped(values: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Returns values by their key, both in the order in which they come first.

    >>> grouped(["ash", "oak", "alder"], key=lambda tree: tree[0])
    {'a': ['ash', 'alder'], 'o': ['oak']}
    """
    groups: dict[K, list[V]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def first_of(
    values: Iterable[object], most: int, separator: str = ", ", more: str = " and {} more"
) -> str:
    """Returns the first few of what there is, and how many more there are.

    >>> first_of([3, 5, 7, 9], most=2)
    '3, 5 and 2 more'
    """
    names = list(map(str, values))
    rest = more.format(len(names) - most) if len(names) > most else ""
    return separator.join(names[:most]) + rest
