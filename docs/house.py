"""Draws the rooms of fedleak floor by floor, from the import contracts in pyproject.toml.

python docs/house.py            writes docs/pictures/house.svg
"""

import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "house.svg"
FLOORS = "rooms depend on the rooms below them"
UNSEEING = "an attack cannot see the truth"

WIDTH, LINE, ROOM, GAP, LETTER = 480, 32, 24, 8, 7.3
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">
<title>The rooms of fedleak, floor by floor: each floor imports only from those below it</title>
<style>
svg {{ --paper: #fff; --ink: #1f2430; --line: #8a93a6; --room: #e8ecfa; --blind: #fbe0db }}
@media (prefers-color-scheme: dark) {{
svg {{ --paper: #1e2129; --ink: #e6e9f0; --line: #7d869a; --room: #323a55; --blind: #66332e }} }}
text {{ font: 12px ui-monospace, Menlo, Consolas, monospace; fill: var(--ink) }}
rect {{ fill: var(--room); stroke: var(--line) }}
.paper {{ fill: var(--paper); stroke: none }}
.blind {{ fill: var(--blind) }}
line {{ stroke: var(--line); stroke-dasharray: 2 3 }}
</style>
<rect class="paper" width="{width}" height="{height}" rx="8"/>
{rooms}
<text x="8" y="{caption}">imports point down; red: cannot import the truth</text>
</svg>
"""


def house(pyproject: str) -> str:
    """Returns the picture for the contracts of a pyproject.toml."""
    contracts = {
        contract["name"]: contract
        for contract in tomllib.loads(pyproject)["tool"]["importlinter"]["contracts"]
    }
    blind = contracts[UNSEEING]["source_modules"]
    floors = [["clients", "server"], *(floor.split(" | ") for floor in contracts[FLOORS]["layers"])]
    drawn: list[str] = []
    top = GAP
    for rooms in floors:
        drawn += row(rooms, top, blind)
        top += LINE
        drawn.append(f'<line x1="0" x2="{WIDTH}" y1="{top - 4}" y2="{top - 4}"/>')
    return SVG.format(width=WIDTH, height=top + 24, rooms="\n".join(drawn), caption=top + 14)


def row(rooms: list[str], top: int, blind: Collection[str]) -> Iterator[str]:
    """Yields the boxes of a line of rooms, centred."""
    left = (WIDTH - sum(width(room) + GAP for room in rooms) + GAP) / 2
    for room in rooms:
        look = ' class="blind"' if room in blind else ""
        size = f'width="{width(room):.0f}" height="{ROOM}"'
        yield f'<rect{look} x="{left:.0f}" y="{top}" {size} rx="3"/>'
        yield f'<text x="{left + GAP:.0f}" y="{top + 16}">{room.removeprefix("fedleak.")}</text>'
        left += width(room) + GAP


def width(room: str) -> float:
    """Returns the width of a room's box."""
    return len(room.removeprefix("fedleak.")) * LETTER + 2 * GAP


if __name__ == "__main__":
    PICTURE.write_text(house((ROOT / "pyproject.toml").read_text()))
