"""Makes the gallery: redacted reports of real runs, and a picture of each.

    python docs/gallery.py [--runs FOLDER] [NAME...]

Runs what FOLDER lacks, and writes `docs/gallery/NAME.html` and `docs/gallery/NAME.png`, which shows
the top of it. It needs Chromium.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from screenshot import screenshot

GALLERY = Path(__file__).absolute().with_name("gallery")
REPORTS = {
    "read": (
        "run",
        GALLERY.parents[1] / "experiments" / "quickstart-llama.toml",
        "quickstart-llama",
    ),
    "private": ("run", GALLERY / "private.toml", "private"),
    "malicious": ("run", GALLERY / "malicious.toml", "malicious"),
    "audited": ("audit", GALLERY / "audited.toml", "audited-audit"),
}
"""By the name of the page: the command, its file, and the name of the run."""


def main() -> None:
    """Writes reports and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(REPORTS), metavar="NAME")
    parser.add_argument("--runs", type=Path, default=Path(), help="where the folder `runs` is")
    chosen = parser.parse_args()
    for name in chosen.names:
        command, file, run = REPORTS[name]
        page = GALLERY / f"{name}.html"
        report = ("report", f"runs/{run}", "--redact", "--out", str(page))
        for arguments in ((command, str(file)), report):
            # A closed gate and unfinished results have a status of their own: pages say so.
            subprocess.run(
                [sys.executable, "-m", "fedleak", *arguments], cwd=chosen.runs, check=False
            )
        page.chmod(0o644)
        page.with_suffix(".png").write_bytes(screenshot(page, 1000, 760, scale=0.6))


if __name__ == "__main__":
    main()
