"""The commands of a shell script, read as data: nothing in it runs.

Understood are assignments, arrays, `if` and `case` over strings and numbers, and the words of `shell_words`. Loops,
functions and sourced files are not; `Script.notes` says which of them might have mattered.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gpt_pretrain.translate.shell_syntax import NAME, Token, split_tokens
from gpt_pretrain.translate.shell_words import UNKNOWN, Variables

_ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_ENDS = {";", "&&", "||", "|", "&", "\n", ";;"}
_CLOSING = {"for": "done", "while": "done", "until": "done", "case": "esac", "if": "fi"}


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a script with its words, variables replaced."""

    line: int
    words: tuple[str, ...]


@dataclass
class Script:
    """What has been read of a script."""

    commands: list[Command] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    variables: dict[str, list[str]] = field(default_factory=dict)
    """The values of all variables at the end; those of an array are several."""
    notes: list[str] = field(default_factory=list)


_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {
    "=": fnmatchcase,
    "==": fnmatchcase,
    "!=": lambda left, right: not fnmatchcase(left, right),
}
_OF_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class _Reader:
    """Walks through a script."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self.tokens = [*split_tokens(text)]
        self.at = 0
        self.variables = Variables(environment)
        self.script = Script()

    def read(self) -> Script:
        while self.at < len(self.tokens):
            self._block(active=True, until=frozenset())
            self.at += 1
        self.script.variables = self.variables.values
        return self.script

    def _peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _block(self, *, active: bool, until: frozenset[str]) -> None:
        """Reads commands up to a word of `until`, which it leaves; `active` says whether the shell would run them."""
        while (token := self._peek()) is not None:
            if token.is_word and token.text in until:
                return
            if not token.is_word and token.text == ";;" and ";;" in until:
                return
            if not token.is_word or token.text in ("{", "}", "then", "do", "!"):
                self.at += 1
            elif token.text == "if":
                self._if(active)
            elif token.text == "case":
                self._case(active)
            elif token.text in _CLOSING:
                self._skip(token, _CLOSING[token.text], active)
            elif [each.text for each in self.tokens[self.at + 1 : self.at + 3]] == ["(", ")"]:
                self._skip(token, "}", active)
            else:
                self._simple(active)

    def _skip(self, first: Token, closing: str, active: bool) -> None:
        """Passes over a loop or a function."""
        start, depth = self.at, 0
        while (token := self._peek()) is not None:
            self.at += 1
            if token.is_word and (token.text in ("for", "while", "until") if closing == "done" else token.text == "{"):
                depth += 1
            elif token.is_word and token.text == closing:
                depth -= 1
                if depth <= 0:
                    break
        skipped = self.tokens[start : self.at]
        if active and any(_may_matter(token) for token in skipped):
            self.script.notes.append(f"line {first.line}: what begins with {first.text!r} is not run")

    def _condition(self, active: bool) -> bool | None:
        """Reads up to `then` and says whether the shell would go there; None if that is not known."""
        self.at += 1
        words: list[str] = []
        while (token := self._peek()) is not None and not (token.is_word and token.text == "then"):
            self.at += 1
            words.append(token.text)
        return self._holds(words) if active else False

    def _holds(self, words: list[str]) -> bool | None:
        words = [word for word in words if word not in (";", "\n")]
        for sign in ("||", "&&"):
            depth = 0
            for number, word in enumerate(words):
                depth += (word in ("[[", "[")) - (word in ("]]", "]"))
                if word == sign and depth == 0:
                    left, right = self._holds(words[:number]), self._holds(words[number + 1 :])
                    decided = sign == "||"
                    if decided in (left, right):
                        return decided
                    return None if None in (left, right) else not decided
        if words[:1] == ["!"]:
            inner = self._holds(words[1:])
            return None if inner is None else not inner
        if len(words) < 3 or words[0] not in ("[", "[["):
            return None
        return self._test(words[1:-1])

    def _test(self, words: list[str]) -> bool | None:
        for sign in ("||", "&&"):
            if sign in words:
                number = words.index(sign)
                return self._holds(["[", *words[:number], "]", sign, "[", *words[number + 1 :], "]"])
        if words[0] == "!":
            inner = self._test(words[1:])
            return None if inner is None else not inner
        return self._compared(words)

    def _compared(self, words: list[str]) -> bool | None:
        values = [self.variables.value(word) for word in words]
        names = [name for value in values for name in UNKNOWN.findall(value)]
        if not all(re.fullmatch(rf"{NAME}|\d+", name) for name in names):
            return None
        for name in names:
            note = f"a condition depends on {name}, which is taken as unset; set it with --env {name}=…"
            if note not in self.script.notes:
                self.script.notes.append(note)
        values = [UNKNOWN.sub("", value) for value in values]
        match values:
            case [value] | ["-n", value]:
                return bool(value)
            case ["-z", value]:
                return not value
            case [left, sign, right] if sign in _COMPARISONS:
                return _COMPARISONS[sign](left, right)
            case [left, sign, right] if sign in _OF_NUMBERS and _are_numbers(left, right):
                return _OF_NUMBERS[sign](int(left), int(right))
        return None

    def _if(self, active: bool) -> None:
        line = self.tokens[self.at].line
        remains = active
        while (token := self._peek()) is not None and token.text in ("if", "elif"):
            holds = self._condition(remains)
            start = self.at
            self._block(active=remains and holds is True, until=frozenset({"elif", "else", "fi"}))
            if remains and holds is None and any(map(_may_matter, self.tokens[start : self.at])):
                self.script.notes.append(f"line {line}: a condition is not understood, and taken as false")
            remains = remains and holds is not True
        if (token := self._peek()) is not None and token.text == "else":
            self.at += 1
            self._block(active=remains, until=frozenset({"fi"}))
        self.at += 1

    def _case(self, active: bool) -> None:
        self.at += 1
        value = self.variables.value(self.tokens[self.at].text) if self._peek() is not None else ""
        self.at += 2
        chosen = False
        while (token := self._peek()) is not None and token.text != "esac":
            if not token.is_word:
                self.at += 1
                continue
            patterns = []
            while (token := self._peek()) is not None and token.text != ")":
                patterns += [token.text] if token.is_word else []
                self.at += 1
            self.at += 1
            here = active and not chosen and any(fnmatchcase(value, self.variables.value(each)) for each in patterns)
            chosen = chosen or here
            self._block(active=here, until=frozenset({";;", "esac"}))
        self.at += 1

    def _simple(self, active: bool) -> None:
        first, taken = self.tokens[self.at], []
        while (token := self._peek()) is not None and (token.is_word or token.text not in _ENDS):
            self.at += 1
            taken.append(token)
        taken = _without_redirections(taken)
        if not active or not taken:
            return
        exports = taken[0].text == "export"
        declares = taken[0].text in _DECLARING
        rest = taken[1:] if declares else taken
        while rest and (rest[0].array is not None or _ASSIGNMENT.fullmatch(rest[0].text)):
            self._assign(rest.pop(0), exports=exports)
        if not rest or declares:
            return
        if rest[0].text in ("source", ".") and len(rest) > 1:
            self.script.notes.append(
                f"line {first.line}: {self.variables.value(rest[1].text)} is not read, as it is another file"
            )
        words = tuple(word for each in rest for word in self.variables.words(each.text))
        self.script.commands.append(Command(first.line, words))

    def _assign(self, token: Token, *, exports: bool) -> None:
        match = _ASSIGNMENT.fullmatch(token.text)
        assert match is not None
        name, plus, raw = match.groups()
        if name in self.variables.given:
            return
        if token.array is not None:
            values = [word for each in token.array for word in self.variables.words(each)]
        else:
            values = [self.variables.value(raw)]
        if plus:
            self.variables.append(name, values, is_array=token.array is not None)
        else:
            self.variables.values[name] = values
        if exports:
            self.script.exported[name] = " ".join(values)


def _are_numbers(*texts: str) -> bool:
    return all(re.fullmatch(r"-?\d{1,18}", text) for text in texts)


def _may_matter(token: Token) -> bool:
    return token.array is not None or "--" in token.text or _ASSIGNMENT.fullmatch(token.text) is not None


def _without_redirections(tokens: list[Token]) -> list[Token]:
    kept: list[Token] = []
    skip = False
    for token in tokens:
        if not token.is_word:
            skip = bool(set(token.text) & set("<>"))
            if skip and kept and kept[-1].text in ("1", "2"):
                kept.pop()
        elif skip:
            skip = False
        else:
            kept.append(token)
    return kept


def read_script(text: str, environment: Mapping[str, str]) -> Script:
    """The commands of a script, with `environment` for what the shell would be started with."""
    return _Reader(text, environment).read()
