"""What bash would make of a word: variables, defaults, arithmetic over plain numbers, quotes, splitting.

What only a running shell knows, such as the output of a command, stays in the word between marks (`UNKNOWN`).
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping

from gpt_pretrain.translate.shell_syntax import NAME, skip_dollar, skip_double

UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001")
"""A variable without a value, inside of a word; the group is its name, or what stands in its place."""

# Not inside of a mark.
_BETWEEN_WORDS = re.compile("[ \\t\\n]+(?![^\ue000]*\ue001)")
_PARAMETER = re.compile(rf"({NAME}|\d+|[@*?$!])(?:\[([@*]|\d+)\])?(?:(:?[-=?+])(.*))?", re.DOTALL)


def _truncated(a: int, b: int) -> int:
    """Division towards zero, as the shell has it."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _truncated,
    ast.Mod: lambda a, b: a - b * _truncated(a, b),
}
# The shell's integers.
_MOST = 2**63


def _number(node: ast.AST) -> int:
    """The value of `$((…))` over plain numbers.

    Raises:
        ValueError: Anything else.
    """
    match node:
        case ast.Expression(body=body):
            return _number(body)
        case ast.Constant(value=int(value)) if value < _MOST:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            value = _OPERATIONS[type(sign)](_number(left), _number(right))
            if abs(value) < _MOST:
                return value
    raise ValueError("no plain number")


class Variables:
    """The variables of a script, and the words that they make."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.values: dict[str, list[str]] = {name: [value] for name, value in environment.items()}
        self.given = frozenset(environment)
        """Those that stand for what the script would be told from outside; it does not change them."""

    def append(self, name: str, values: list[str], *, is_array: bool) -> None:
        """`NAME+=…`."""
        before = self.values.get(name, [] if is_array else [""])
        self.values[name] = [*before, *values] if is_array else [before[0] + values[0], *before[1:]]

    def words(self, raw: str) -> list[str]:
        """A word with its expansions, split where bash splits it."""
        words: list[str] = []
        open_word: str | None = None
        for text, quoted in self._pieces(raw):
            for number, part in enumerate(text):
                if number:
                    words.append(open_word or "")
                    open_word = None
                if quoted:
                    open_word = (open_word or "") + part
                    continue
                split = re.split(_BETWEEN_WORDS if "\ue001" in part else r"[ \t\n]+", part)
                for position, each in enumerate(split):
                    if position and open_word is not None:
                        words.append(open_word)
                        open_word = None
                    if each:
                        open_word = (open_word or "") + each
        return words if open_word is None else [*words, open_word]

    def value(self, raw: str) -> str:
        """A word that is not split, as on the right of an assignment."""
        return "".join(" ".join(text) for text, _ in self._pieces(raw))

    def _pieces(self, raw: str) -> Iterator[tuple[list[str], bool]]:
        """Parts of a word, each with its texts (of `"${ARRAY[@]}"` several) and whether they stay whole."""
        at = 0
        while at < len(raw):
            if raw[at] == "\\":
                yield [raw[at + 1 : at + 2]], True
                at += 2
            elif raw[at] == "'":
                end = raw.find("'", at + 1) if "'" in raw[at + 1 :] else len(raw)
                yield [raw[at + 1 : end]], True
                at = end + 1
            elif raw[at] == '"':
                end = skip_double(raw, at + 1)
                yield [""], True
                yield from ((text, True) for text, _ in self._in_double(raw[at + 1 : end - 1]))
                at = end
            elif raw[at] in "$`":
                end = self._expansion_end(raw, at)
                yield self._expand(raw[at:end]), False
                at = end
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in "\\'\"$`":
                    end += 1
                yield [raw[at:end]], True
                at = end

    def _in_double(self, text: str) -> Iterator[tuple[list[str], bool]]:
        at = 0
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
                yield [text[at + 1].strip("\n")], True
                at += 2
            elif text[at] in "$`":
                end = self._expansion_end(text, at)
                yield self._expand(text[at:end]), True
                at = end
            else:
                yield [text[at]], True
                at += 1

    @staticmethod
    def _expansion_end(text: str, at: int) -> int:
        if text[at] == "`":
            return text.find("`", at + 1) + 1 or len(text)
        if text.startswith(("$(", "${"), at):
            return skip_dollar(text, at)
        match = re.compile(rf"\$(?:{NAME}|[\d@*#?$!])").match(text, at)
        return at + 1 if match is None else match.end()

    def _expand(self, text: str) -> list[str]:
        """The texts that an expansion stands for: several of `${ARRAY[@]}`."""
        if text == "$":
            return ["$"]
        if text.startswith("$(("):
            return [self._arithmetic(text[3:-2])]
        match = _PARAMETER.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if match is None or text.startswith(("$(", "`")):
            return [f"\ue000{text}\ue001"]
        variable, index, sign, word = match.groups()
        values = self.values.get(variable)
        if values is None or (sign is not None and sign.startswith(":") and values == [""]):
            return [self._without_value(variable, sign or "", word)]
        if sign is not None and sign.endswith("+"):
            return [self.value(word)]
        return values if index in ("@", "*") else values[int(index or 0) :][:1] or [""]

    def _without_value(self, variable: str, sign: str, word: str) -> str:
        """`${VAR:-word}` and the like of a variable that has no value."""
        if sign.endswith("+"):
            return ""
        if not sign.endswith(("-", "=")):
            return f"\ue000{variable}\ue001"
        value = self.value(word)
        if sign.endswith("="):
            self.values[variable] = [value]
        return value

    def _arithmetic(self, text: str) -> str:
        # Inside, variables need no dollar.
        plain = re.sub(rf"(?<![\w$])({NAME})", r"$\1", text.replace("${", "$ {").replace("$ {", "${"))
        plain = self.value(re.sub(r"\$\{\$(\w+)\}", r"${\1}", plain)).strip()
        if UNKNOWN.search(plain):
            return f"\ue000{UNKNOWN.findall(plain)[0]}\ue001"
        try:
            return str(_number(ast.parse(plain, mode="eval")))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return f"\ue000$(({text}))\ue001"
