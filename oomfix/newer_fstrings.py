"""f-strings as Python 3.12 allows them, told in the form that older versions parse, each character in its place.

Since 3.12 a replacement field may hold the quotes of its own f-string, and backslashes (PEP 701). What a string inside
of a field says and how it is quoted is of no account here, so both are changed to what every Python 3 accepts.
"""

from __future__ import annotations

import re

_STRING = re.compile(r"""(?<!\w)([rbuf]{0,2})('''|\"""|'|")""", re.IGNORECASE)
_OPENING, _CLOSING = "([{", ")]}"


class _NoOlderForm(Exception):
    """It has no form of the same length that older versions parse, or it is no Python."""


def in_older_form(text: str) -> str | None:
    """`text` with other quotes, and no backslashes, inside of replacement fields; None where that is not to be had.

    The text has the same length and the same lines, so that positions in its tree are those of the original.
    """
    try:
        return _Rewriting(text).result()
    except (_NoOlderForm, RecursionError):
        return None


class _Rewriting:
    def __init__(self, text: str) -> None:
        self._text = text
        self._out = list(text)

    def result(self) -> str | None:
        self._code(0, quotes="")
        changed = "".join(self._out)
        return None if changed == self._text else changed

    def _code(self, at: int, quotes: str) -> int:
        """Pass code from `at` on; inside of a field, up to the end of the field.

        Args:
            quotes: the quotes of the f-strings around, from the outermost; "" outside of any.
        """
        depth = 0
        while at < len(self._text):
            character = self._text[at]
            string = _STRING.match(self._text, at)
            if string is not None:
                at = self._string(string, quotes)
            elif character == "#":
                if quotes:
                    raise _NoOlderForm
                end = self._text.find("\n", at)
                at = len(self._text) if end < 0 else end
            elif quotes and not depth and character in "}:":
                return self._format(at + 1, quotes) if character == ":" else at
            elif quotes and character in "\\\n\r":
                raise _NoOlderForm
            else:
                depth += (character in _OPENING) - (character in _CLOSING)
                at += 1
        if quotes:
            raise _NoOlderForm
        return at

    def _format(self, at: int, quotes: str) -> int:
        """Pass what follows the colon of a field, up to the end of the field."""
        while at < len(self._text) and self._text[at] != "}":
            if self._text[at] in "\\\n\r" or self._text[at] in quotes:
                raise _NoOlderForm
            at = self._code(at + 1, quotes) + 1 if self._text[at] == "{" else at + 1
        return at

    def _string(self, start: re.Match[str], quotes: str) -> int:
        """Pass a string; inside of a field, in quotes that no f-string around it has."""
        quote = start[2]
        own = quote
        if quotes:
            free = [other for other in "\"'" if other not in quotes]
            if len(quote) > 1 or not free:
                raise _NoOlderForm
            own = quote if quote in free else free[0]
            self._out[start.end() - 1] = own
        at = start.end()
        while not self._text.startswith(quote, at):
            character = self._text[at : at + 1]
            if not character or (len(quote) == 1 and character in "\n\r"):
                raise _NoOlderForm
            if character == "\\":
                if quotes:
                    self._hide(at)
                at += 2
            elif character == "{" and "f" in start[1].lower():
                doubled = self._text.startswith("{{", at)
                at = at + 2 if doubled else self._code(at + 1, quotes + own[0]) + 1
            else:
                if quotes and character in "\"'":
                    self._out[at] = "_"
                at += 1
        if quotes:
            self._out[at] = own
        return at + len(quote)

    def _hide(self, escape: int) -> None:
        """Put other characters in place of an escape inside of a field."""
        if self._text[escape + 1 : escape + 2] in ("", "\n", "\r"):
            raise _NoOlderForm
        self._out[escape] = self._out[escape + 1] = "_"
