"""Values by what they have in common, and the first few of many in words."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

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


def in_rounds(clients: Mapping[Any, Collection[int]], most: int, others: str = "others") -> str:
    """Returns which clients, in the first few of these rounds; rounds without any are left out.

    >>> in_rounds({1: [0, 2], 3: [], 4: [1]}, most=1)
    '0, 2 in round 1; others in 1 more rounds'
    """
    listed = [
        f"{', '.join(map(str, who))} in round {round}" for round, who in clients.items() if who
    ]
    return first_of(listed, most, "; ", f"; {others} in {{}} more rounds")
