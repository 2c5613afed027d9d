"""Words and operators of a shell script, with their quotes and expansions as they are written."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

NAME = r"[A-Za-z_]\w*"

# Longest first.
_OPERATORS = re.compile(r">&|<&|&>|&&|\|\||;;|[;|&()\n<>]")
# Spaces after the backslash end bash's command; who wrote them meant to go on.
_CONTINUATION = re.compile(r"\\[ \t]*\r?\n")


@dataclass(frozen=True, slots=True)
class Token:
    """A word or an operator of a script."""

    text: str
    """An operator, a word with its quotes, or the name that an array is assigned to."""
    line: int
    is_word: bool = True
    array: tuple[str, ...] | None = None


def _end_of(text: str, start: int, opening: str, closing: str) -> int:
    """The index after the bracket that closes the one before `start`; the end of the text if none does."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "'" and opening == "(":
            at = text.find("'", at + 1) if "'" in text[at + 1 :] else len(text)
        elif text[at] == opening:
            depth += 1
        elif text[at] == closing:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


def skip_dollar(text: str, at: int) -> int:
    """The index after an expansion that begins with the `$` at `at`."""
    if text.startswith("$(", at):
        return _end_of(text, at + 2, "(", ")")
    if text.startswith("${", at):
        return _end_of(text, at + 2, "{", "}")
    return at + 1


def skip_double(text: str, at: int) -> int:
    """The index after the double quote that closes the one before `at`."""
    while at < len(text) and text[at] != '"':
        at = at + 2 if text[at] == "\\" else skip_dollar(text, at) if text[at] == "$" else at + 1
    return at + 1


def _word_end(text: str, at: int) -> int:
    while at < len(text):
        each = text[at]
        if each.isspace() or _CONTINUATION.match(text, at) or _OPERATORS.match(text, at):
            break
        if each == "\\":
            at += 2
        elif each == "'":
            at = text.find("'", at + 1) + 1 or len(text)
        elif each == '"':
            at = skip_double(text, at + 1)
        elif each == "`":
            at = text.find("`", at + 1) + 1 or len(text)
        elif each == "$":
            at = skip_dollar(text, at)
        else:
            at += 1
    return min(at, len(text))


def split_tokens(text: str) -> Iterator[Token]:
    """The words and operators of a script; comments and continued lines are gone."""
    at, line, before = 0, 1, "\n"
    while at < len(text):
        if text[at] == "#" and (before.isspace() or before in ";()"):
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        continued = _CONTINUATION.match(text, at)
        if continued or text[at] in " \t\r":
            line += continued is not None
            before, at = " ", continued.end() if continued else at + 1
            continue
        operator = _OPERATORS.match(text, at)
        end = operator.end() if operator else _word_end(text, at)
        word, started = text[at:end], line
        if not operator and word.endswith("=") and text.startswith("(", end):
            closed = _end_of_array(text, end + 1)
            inner = tuple(each.text for each in split_tokens(text[end + 1 : closed]) if each.is_word)
            line += text.count("\n", at, closed)
            yield Token(word, started, array=inner)
            at, before = closed + 1, ")"
            continue
        line += word.count("\n")
        before, at = word[-1], end
        yield Token(word, started, is_word=operator is None)


def _end_of_array(text: str, at: int) -> int:
    """The index of the parenthesis that closes an array, past comments and quotes."""
    while at < len(text) and text[at] != ")":
        if text[at] == "#" and text[at - 1] in " \t\n(":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        else:
            at = max(_word_end(text, at), at + 1)
    return at
