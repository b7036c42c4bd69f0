"""Text of others, made safe to print: what a terminal would obey is shown instead."""

import unicodedata

from rich.markup import escape

_JOINERS = "\u200c\u200d"
"""Zero-width (non-)joiners: Persian, Hindi and many emoji are not right without them."""


def printable(text: str) -> str:
    r"""Returns a text in one line that no terminal, pipe or log interprets.

    Control characters (C0, C1, so every ANSI sequence), line ends, bidirectional overrides and
    lone surrogates become their Python escapes.

    >>> printable("two\nlines and \x1b[31mred")
    'two\\nlines and \\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def markup(text: object) -> str:
    r"""Returns a text of others as Rich markup that shows it: printable, and none of it a tag.

    >>> markup("a[/]b\x1bc")
    'a\\[/]b\\x1bc'
    """
    return escape(printable(str(text)))


def is_whole(text: str) -> bool:
    r"""Returns whether a text has no half of a character, as JSON can have it.

    >>> is_whole("a \ud83d"), is_whole("a")
    (False, True)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(character: str) -> str:
    if character.isprintable() or character in _JOINERS:
        return character
    if unicodedata.category(character) == "Zs":  # other spaces than the plain one
        return " "
    return character.encode("unicode_escape").decode()
