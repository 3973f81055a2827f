"""The commands of a shell script, with its own variables replaced as the shell does it. No shell is started.

Understood: quotes, comments, continued lines, ``;``, ``&&``, pipes, redirections, ``NAME=VALUE``, ``NAME=(...)``,
``$NAME``, ``${NAME:-default}``, ``"${NAME[@]}"``; texts after ``<<EOF`` are passed over. Conditions and loops are not:
their commands are read, one after the other. What only the shell knows (``$1``, ``$(date)``) stays as it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)(\[[@*]\])?(?::?-([^}]*))?\})")
_OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"\d?(?:>>|>&|>\||>|<<<|<<|<&|<>|<)&?\d?-?|&>>?")
_DOCUMENT = re.compile(r"\s*['\"\\]?(\w+)")
_SPECIAL = frozenset(" \t\n;&|<>()#'\"\\`$")
Quote = Literal["", '"', "'", "word"]
"""How a piece of a word is quoted; ``word``: the shell has split it already, its variables are still replaced."""


@dataclass(frozen=True)
class Quoted:
    """A part of a word that is quoted in one way."""

    text: str
    quote: Quote = ""


@dataclass
class Word:
    """A word as it is written; of ``NAME=(...)`` the members are in ``array``."""

    pieces: list[Quoted] = field(default_factory=list)
    array: list[Word] | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass
class Simple:
    """One command: its words, and what follows it (a redirection, a pipe)."""

    words: list[str]
    """With variables replaced; without the assignments before them."""
    assigned: list[tuple[str, str]]
    after: str = ""
    source: str = ""
    """As it is written."""
    unfinished: str = ""
    """Why it is no whole command."""


class _Unfinished(ValueError):
    """A quote or a bracket without its end."""


def _as_words(given: Sequence[str]) -> Iterator[list[Word] | str]:
    """The words of a command line that the shell has split, and the operators among them."""
    words: list[Word] = []
    for text in given:
        if text in _OPERATORS:
            yield from (words, text)
            words = []
        else:
            words.append(Word([Quoted(text, "word")]))
    yield words


class _Scanner:
    """Text -> words and operators."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.begin = 0
        """Of the present command."""
        self.document = ""
        """The word that ends the text of ``<<WORD``, which follows the present line."""

    def line(self) -> str:
        """The rest of the present line, which is passed over."""
        end = self.text.find("\n", self.at) + 1 or len(self.text)
        found, self.at = self.text[self.at : end], end
        return found.strip()

    def commands(self, *, end: str = "") -> Iterator[list[Word] | str]:
        """The words of each command, and the operator after it."""
        words: list[Word] = []
        word: Word | None = None
        self.begin = self.begin if end else self.at
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == end:
                break
            if here == "#" and word is None:
                self._skip_comment()
                continue
            if here == "(" and word is not None and re.fullmatch(r"[A-Za-z_]\w*\+?=", word.text):
                self.at += 1
                word.array = [one for part in self.commands(end=")") if not isinstance(part, str) for one in part]
                self._expect(")")
                continue
            redirection = _REDIRECTION.match(self.text, self.at)
            operator = next((one for one in _OPERATORS if self.text.startswith(one, self.at)), None)
            if redirection and (word is None or not here.isdecimal()):
                _end(word, words)
                word = None
                self.at = redirection.end()
                words.append(Word([Quoted(redirection[0], "word")]))
                if (begun := _DOCUMENT.match(self.text, self.at)) and redirection[0] in ("<<", "<<-"):
                    self.document = begun[1]
            elif operator:
                _end(word, words)
                word = None
                self.at += len(operator)
                while self.document and operator == "\n" and self.at < len(self.text):
                    self.document = "" if self.line() == self.document else self.document
                yield from (words, operator)
                words, word = [], None
                self.begin = self.begin if end else self.at
            elif here in " \t":
                _end(word, words)
                word = None
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            else:
                word = word or Word()
                word.pieces.extend(self._pieces())
        _end(word, words)
        yield words

    def _skip_comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _expect(self, closing: str) -> None:
        if self.at >= len(self.text):
            raise _Unfinished(f"no closing {closing}")
        self.at += 1

    def _until(self, closing: str) -> str:
        end = self.text.find(closing, self.at)
        if end < 0:
            raise _Unfinished(f"no closing {closing}")
        found, self.at = self.text[self.at : end], end + len(closing)
        return found

    def _pieces(self) -> Iterator[Quoted]:
        """The next piece of a word."""
        here = self.text[self.at]
        if here == "'":
            self.at += 1
            yield Quoted(self._until("'"), "'")
        elif here == '"':
            self.at += 1
            yield Quoted("", '"')  # also "" is a word
            yield from self._double_quoted()
        elif here == "\\":
            yield Quoted(self.text[self.at + 1 : self.at + 2], "'")
            self.at += 2
        elif here in "`$":
            yield self._computed("")
        else:
            begin = self.at
            self.at += 1
            while self.at < len(self.text) and self.text[self.at] not in _SPECIAL - {"#"}:
                self.at += 1
            yield Quoted(self.text[begin : self.at])

    def _double_quoted(self) -> Iterator[Quoted]:
        while self.at < len(self.text) and self.text[self.at] != '"':
            here = self.text[self.at]
            if here == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                yield Quoted("" if escaped == "\n" else escaped if escaped in '"\\$`' else f"\\{escaped}", "'")
            elif here in "`$":
                yield self._computed('"')
            else:
                begin = self.at
                while self.at < len(self.text) and self.text[self.at] not in '"\\`$':
                    self.at += 1
                yield Quoted(self.text[begin : self.at], "'")
        self._expect('"')

    def _computed(self, quote: Quote) -> Quoted:
        """``$NAME`` and ``${...}``, which are replaced; `` `...` `` and ``$(...)``, which are kept as they are."""
        begin = self.at
        if self.text[begin] == "`":
            self.at += 1
            self._until("`")
            return Quoted(self.text[begin : self.at], "'")
        opening = self.text[begin + 1 : begin + 2]
        if opening in ("(", "{"):
            depth, closing = 0, {"(": ")", "{": "}"}[opening]
            while self.at < len(self.text):
                depth += {opening: 1, closing: -1}.get(self.text[self.at], 0)
                self.at += 1
                if not depth and self.at > begin + 1:
                    return Quoted(self.text[begin : self.at], "'" if opening == "(" else quote)
            raise _Unfinished(f"no closing {closing}")
        found = re.compile(r"\$(?:\w+|.|)").match(self.text, begin)
        assert found
        self.at = max(found.end(), begin + 1) if found[0][1:].isidentifier() else begin + len(found[0][:2])
        return Quoted(self.text[begin : self.at], quote)


def _end(word: Word | None, words: list[Word]) -> None:
    """The word, if there is one, is complete."""
    if word is not None:
        words.append(word)


@dataclass
class Shell:
    """The variables of a script so far."""

    variables: dict[str, str | list[str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Those whose value another command has."""

    def script(self, text: str) -> list[Simple]:
        """Its commands, in their order; a line with a quote or a bracket that does not end has ``unfinished``."""
        scanner = _Scanner(text)
        found: list[Simple] = []
        while scanner.at < len(text):
            try:
                self._read(scanner.commands(), found)
            except _Unfinished as error:
                scanner.at = scanner.begin
                line = scanner.line()
                found.append(Simple([], [], unfinished=f"{error}", source=line))
        return found

    def command_line(self, given: Sequence[str]) -> list[Simple]:
        """The commands of words that the shell has split."""
        found: list[Simple] = []
        self._read(_as_words(given), found)
        return found

    def _read(self, parts: Iterator[list[Word] | str], found: list[Simple]) -> None:
        """A pipe and what is after it are ``after`` of the command before it."""
        piped = False
        for part in parts:
            if isinstance(part, str):
                piped = part in ("|", "|&") and bool(found)
                if piped:
                    found[-1].after += f" {part}"
            elif piped:
                found[-1].after += " " + " ".join(word.text for word in part)
            elif part:
                found.append(self._simple(part))

    def _simple(self, parts: list[Word]) -> Simple:
        end = next((i for i, word in enumerate(parts) if _is_redirection(word)), len(parts))
        after = " ".join(word.text for word in parts[end:])
        words, assigned = parts[:end], []
        exported = bool(words) and words[0].text in ("export", "declare", "local", "readonly", "typeset")
        if exported:
            words = [word for word in words[1:] if not word.text.startswith("-")]
        while words and (one := self._assignment(words[0])):
            assigned.append(one)
            words = words[1:]
        if exported:  # `export NAME` alone changes no value
            words = [word for word in words if word.text not in self.variables]
        source = " ".join(word.text for word in parts[:end])
        return Simple([text for word in words for text in self._fields(word)], assigned, after, source)

    def _assignment(self, word: Word) -> tuple[str, str] | None:
        match = _ASSIGNMENT.fullmatch(word.text)
        if match is None or word.pieces[0].quote not in ("", "word") or "=" not in word.pieces[0].text:
            return None
        name, more, before_it = match[1], match[2] == "+", {*self.used}
        value: str | list[str]
        if word.array is not None:
            value = [text for member in word.array for text in self._fields(member)]
            shown = shlex.join(value)
            before = self.variables.get(name, [])
            value = [*([before] if isinstance(before, str) else before), *value] if more else value
        else:
            rest = word.pieces[0].text.partition("=")[2]
            value = "".join(self._joined(Quoted(rest, word.pieces[0].quote))) + "".join(
                self._joined(piece) for piece in word.pieces[1:]
            )
            value = f"{self._text(name)}{value}" if more else value
            shown = value
        self.variables[name] = value
        if name not in before_it:  # NAME=${NAME:-10} is no use
            self.used.discard(name)
        return name, shown

    def _text(self, name: str) -> str:
        value = self.variables.get(name, "")
        return value if isinstance(value, str) else " ".join(value)

    def _joined(self, piece: Quoted) -> str:
        """A piece as one text."""
        if piece.quote == "'":
            return piece.text
        return _VARIABLE.sub(lambda match: " ".join(self._value(match)), piece.text)

    def _value(self, match: re.Match[str]) -> list[str]:
        """What a variable is replaced by; what it is written as where it is not known."""
        name = match[1] or match[2]
        value = self.variables.get(name)
        if value is None or value == "":
            if match[4] is not None:
                return [match[4].strip("\"'")]
            if value is None:
                return [match[0]]
        self.used.add(name)
        assert value is not None
        if isinstance(value, str):
            return [value]
        return value if match[3] else value[:1]

    def _fields(self, word: Word) -> list[str]:
        """The words that one word becomes: an unquoted variable with spaces is several."""
        found, text = [], None
        for piece in word.pieces:
            if piece.quote == "'":
                text = (text or "") + piece.text
                continue
            at = 0
            if piece.quote == '"' and not piece.text:
                text = text or ""
            for match in [*_VARIABLE.finditer(piece.text), None]:
                literal = piece.text[at : match.start() if match else len(piece.text)]
                if literal:
                    text = (text or "") + literal
                if match is None:
                    break
                at = match.end()
                values = self._value(match)
                if not piece.quote and match[0] not in values:
                    values = [part for value in values for part in value.split()]
                elif not (piece.quote == '"' and match[3]):
                    values = [" ".join(values)]
                for i, value in enumerate(values):
                    if i:
                        found.append(text or "")
                        text = None
                    text = (text or "") + value
        return [*found, text] if text is not None else found


def _is_redirection(word: Word) -> bool:
    return word.pieces[0].quote == "word" and bool(re.match(r"\d?[<>]|&>", word.pieces[0].text))
