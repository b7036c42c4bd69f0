"""Lets links of the pages that leave docs/ lead somewhere in the built site.

A page links to `../fedleak/api.py`, as a code host reads it. In the site such a link leads to the
repository, if `repo_url` says where that is, else to the file of the checkout that was built.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]*)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Returns a page with absolute links to what is outside docs/; MkDocs calls it for each."""
    return LINK.sub(lambda match: address(match[1], config.repo_url), markdown)


def address(path: str, repository: str | None) -> str:
    """Returns the address of a file or folder of the repository."""
    if not repository:
        return (ROOT / path).as_uri()
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{path}"
