"""METEOR: the Java program that comes with pycocoevalcap, or nltk's version, which differs from it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unigen_ds.core.errors import ConfigError
from unigen_ds.core.registry import METRICS
from unigen_ds.evaluation.metrics.base import Metric, installed, package, text_pairs

Implementation = Literal["java", "nltk"]
_CHUNKS = 20
"""Index of a sample's statistics; the two after it are the matched words, the first two the lengths."""


@METRICS.register_module()
class METEOR(Metric):
    """METEOR, 0 to 1: matches of words, stems and synonyms (Banerjee and Lavie, 2005; Denkowski and Lavie, 2014).

    The value is ``meteor_java`` (METEOR 1.5, the score of the corpus from the sums of its statistics) or
    ``meteor_nltk`` (the mean over samples of nltk's formula of 2007, which has other weights and no paraphrases). Of
    several references the best counts.

    Args:
        implementation: ``java`` or ``nltk``; None: Java's where there is Java on the first process, otherwise nltk's.
        wordnet: a reader with ``synsets(word)`` for nltk's version; None: the WordNet data of nltk.
    """

    def __init__(self, *, implementation: Implementation | None = None, wordnet: Any = None) -> None:
        given = {} if wordnet is None else {"wordnet": type(wordnet).__qualname__}
        super().__init__(**given)
        self._implementation = implementation
        self._wordnet = wordnet
        self._java: _Java | None = None
        """Started by ``table`` (10 seconds or more, up to 2 GiB) and kept for later evaluations."""

    @property
    def implementation(self) -> Implementation:
        """Which one is used on this machine."""
        if self._implementation is not None:
            return self._implementation
        return "java" if shutil.which("java") else "nltk"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"meteor_{self.implementation}"

    @property
    def library(self) -> str:  # type: ignore[override]
        return "pycocoevalcap" if self.implementation == "java" else "nltk"

    def check(self) -> None:
        """Raise ``ConfigError`` that names what to install: the extra, Java or WordNet."""
        super().check()
        if self.implementation == "nltk":
            self._reader()
        elif shutil.which("java") is None:
            raise ConfigError(
                "METEOR(implementation='java') needs Java, and there is no command java",
                remedy="install a Java runtime (Debian: default-jre-headless), or use implementation='nltk'",
            )

    def rows(self, predictions: Sequence[Any], references: Sequence[Any], keys: Sequence[str]) -> Sequence[Any]:
        return text_pairs(predictions, references, keys)

    def table(self, rows: Sequence[Any]) -> np.ndarray:
        """Java: the statistics of a sample, 23 sums. nltk: its score."""
        self.check()
        if self.implementation == "java":
            if self._java is None or not self._java.runs:
                self._java = _Java()
            return np.asarray([self._java.statistics(prediction, several) for prediction, several in rows])
        score, split = package("nltk.translate.meteor_score").meteor_score, _split()
        reader = self._reader()
        return np.asarray(
            [
                [score([split(one) for one in several], split(prediction), wordnet=reader)]
                for prediction, several in rows
            ]
        )

    def values(self, table: np.ndarray) -> dict[str, float]:
        if self.implementation == "nltk":
            return {self.name: float(table.mean())}
        assert self._java is not None, "opened by table"
        return {self.name: self._java.score(table.sum(0))}

    def details(self) -> dict[str, str]:
        if self.implementation == "java":
            return {"program": "METEOR 1.5, -l en -norm"}
        return {"tokenizer": "nltk.NLTKWordTokenizer", "formula": "alpha 0.9, beta 3, gamma 0.5"}

    def _reader(self) -> Any:
        """WordNet. Raises ``ConfigError`` where its data is not there."""
        if self._wordnet is not None:
            return self._wordnet
        wordnet = package("nltk.corpus").wordnet
        try:
            wordnet.ensure_loaded()
        except LookupError as error:
            why = "" if shutil.which("java") else "there is no Java, and "
            raise ConfigError(
                f"METEOR: {why}nltk has no WordNet data",
                remedy="python -m nltk.downloader wordnet (NLTK_DATA names another folder), or install a Java runtime",
            ) from error
        return wordnet


def _split() -> Any:
    """A text as words; it needs no data."""
    return package("nltk.tokenize").NLTKWordTokenizer().tokenize


class _Java:
    """METEOR 1.5 with its protocol on standard input and output, as pycocoevalcap calls it.

    A signal to the training's process group does not reach it. It ends with this object or this process: by the end of
    its input where that process is killed.
    """

    def __init__(self) -> None:
        self._program = Path(package("pycocoevalcap.meteor").__path__[0]) / "meteor-1.5.jar"
        installed("pycocoevalcap")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        options = ["-Dfile.encoding=UTF-8", "-Xmx2G"]
        self._process = subprocess.Popen(
            ["java", *options, "-jar", self._program.name, "-", "-", "-stdio", "-l", "en", "-norm"],
            cwd=self._program.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def statistics(self, prediction: str, references: Sequence[str]) -> list[float]:
        """The sums of one sample, which add up to those of a corpus.

        As METEOR adds them: a sample that matches completely in one chunk counts no chunk.
        """
        line = " ||| ".join(["SCORE", *map(_line, references), _line(prediction)])
        found = [float(one) for one in self._ask(line).split()]
        if found[_CHUNKS] == 1 and found[_CHUNKS + 1 :] == found[:2]:
            found[_CHUNKS] = 0.0
        return found

    def score(self, statistics: np.ndarray) -> float:
        """Of sums. Java answers twice: for each line of statistics and for all of them."""
        answer = self._ask("EVAL ||| " + " ".join(repr(float(one)) for one in statistics))
        self._read()
        return float(answer)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer is missing, too
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        if not answer:
            raise self._ended()
        return answer

    def _ended(self) -> ConfigError:
        """Why there is no answer."""
        status = self._process.wait()
        number = -status if status < 0 else status - 128  # Java ends with 128 + the number where it is asked to end
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
            name = signal.Signals(number).name
            memory = "SIGKILL also comes from the kernel, where memory is short: it needs 2 GiB"
            return ConfigError(
                f"METEOR's Java program was ended by {name}",
                remedy=memory if number == signal.SIGKILL else "the next evaluation starts it again",
            )
        self._errors.seek(0)
        reason = self._errors.read().decode(errors="replace").strip().splitlines()
        return ConfigError(
            f"METEOR's Java program ended: {reason[0] if reason else f'no message, status {status}'}",
            remedy="it needs 2 GiB of memory; or use implementation='nltk'",
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _line(text: str) -> str:
    """A text on one line of the protocol, as pycocoevalcap cleans it; without newlines, which would end the line."""
    return " ".join(text.splitlines()).replace("|||", "").replace("  ", " ")
