"""Conversations with one or two models at a time: uploads are checked, requests answered one after the other.

A request is answered in a thread of its own, so that a page can show how far it is; one lock is for all models. A
conversation that is over receives nothing more: its drawing stops at the next step of the sampler.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from uuid import uuid4

from PIL import Image

from unigen_ds.app.ability import Ability, AnswerSettings
from unigen_ds.checkpoint.foreign import locate
from unigen_ds.checkpoint.home import home_of
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.checkpoint.store import current, list_checkpoints
from unigen_ds.core.errors import ConfigError, UnigenError, short_text
from unigen_ds.core.shards import EMA
from unigen_ds.data.images.image_files import open_image
from unigen_ds.data.records.records import Turn
from unigen_ds.inference.generated import as_file
from unigen_ds.inference.prompts import Prompt
from unigen_ds.models.lora import adapter_record, switch_adapters
from unigen_ds.runner.open.answers import answer
from unigen_ds.runner.open.trained import check_device, open_inferencer
from unigen_ds.system.log import logger

_POLL_S = 0.25
_MOST_OPEN = 2
SMALLEST, LARGEST, STEP = 192, 1024, 384
"""Longest side of a picture in the browser: smaller ones are enlarged, with their own pixels visible."""


@dataclass(frozen=True)
class Choice:
    """A model, by its name on the page, and how its weights are used."""

    name: str
    raw: bool = False
    adapters: bool = True


class Models:
    """The checkpoints of the command line, of which two are open. ``options``: of ``open_inferencer``."""

    def __init__(self, paths: Sequence[Path], *, tag: str | None = None, **options: Any) -> None:
        self._paths, self._tag, self._options = paths, tag, options
        self._open: dict[tuple[Path, bool], Any] = {}
        check_device(options["device"])

    def names(self) -> dict[str, Path]:
        """Name -> path; of a work dir its complete checkpoints as they are now, the newest first."""
        names: dict[str, Path] = {}
        for path in self._paths:
            complete = current(list_checkpoints(home_of(path))) if self._tag is None else []
            names |= {str(path / one.path.name): one.path for one in reversed(complete)} or {str(path): path}
        return names

    def open(self, choice: Choice) -> tuple[Any, bool]:
        """The inferencer, with its adapters switched, and whether there is an average of its weights."""
        if choice.name not in (names := self.names()):  # a page opens no other file
            raise ConfigError(f"there is no model {choice.name!r}", allowed=", ".join(names))
        key = (names[choice.name], choice.raw)
        inferencer = self._open.pop(key, None)
        if inferencer is None:
            while len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            inferencer = open_inferencer(key[0], raw=choice.raw, tag=self._tag, **self._options)
        self._open[key] = inferencer
        switch_adapters(inferencer.model, on=choice.adapters)
        directory = locate(key[0], self._tag)
        files = Manifest.read(directory).files if (directory / FILE_NAME).is_file() else []
        return inferencer, any(entry.path.startswith(f"{EMA}/") for entry in files)


@dataclass
class Reply:
    choice: Choice
    progress: str = "waits"
    """Empty when the reply is complete."""
    answers: list[tuple[str, list[Path]]] = field(default_factory=list)
    """(text, pictures) of each sample."""
    steps: list[tuple[Path, str]] = field(default_factory=list)
    """(picture, caption) of each step of the sampler."""
    notes: list[str] = field(default_factory=list)
    """Warnings."""
    error: str = ""


@dataclass(eq=False)
class Exchange:
    """A request and its replies, one of each model."""

    text: str
    pictures: Sequence[Path]
    settings: AnswerSettings
    replies: Sequence[Reply]
    waits: bool = True
    cancelled: bool = False


@dataclass
class Conversation:
    exchanges: list[Exchange] = field(default_factory=list)
    over: bool = False
    """Nothing more is answered or shown."""

    def ask(self, text: str, pictures: Sequence[str], settings: AnswerSettings, choices: Sequence[Choice]) -> None:
        """Add a request. Raises ``UnreadableImage`` for a file that is no picture of a data set either (its format, a
        missing part, too many pixels), and ``ConfigError`` for an empty request."""
        if not text and not pictures:
            raise ConfigError("the message is empty", remedy="write a text, or add a picture")
        for path in pictures:
            open_image(path)
        self.exchanges.append(Exchange(text, [*map(Path, pictures)], settings, [Reply(one) for one in choices]))

    def history(self, exchange: Exchange, column: int) -> list[Turn]:
        """The earlier messages to which the model of this column has an answer, and the first answer to each."""
        turns: list[Turn] = []
        for one in self.exchanges[: self.exchanges.index(exchange)]:
            if column < len(one.replies) and one.replies[column].answers:
                text, pictures = one.replies[column].answers[0]
                turns += [Turn("user", "image", str(path)) for path in one.pictures]
                turns += [Turn("user", "text", one.text)] if one.text else []
                turns += [Turn("assistant", "text", text, learned=False)] if text else []
                turns += [Turn("assistant", "image", str(path), learned=False) for path in pictures]
        return turns


class Interruption(Exception):
    """Nobody waits for the answer any more."""


class Service:
    """Answers to all conversations, one at a time. ``folder`` receives the pictures."""

    def __init__(self, models: Models, folder: Path) -> None:
        self.models, self._folder, self._lock = models, folder, threading.Lock()
        self._copies: dict[Path, Path] = {}

    def describe(self, choice: Choice) -> tuple[Ability, str, bool, bool]:
        """What a model can do, a line about it, and whether it has an average of its weights, and adapters."""
        with self._lock:
            inferencer, average = self.models.open(choice)
        ability, adapters = Ability.of(inferencer), adapter_record(inferencer.model) is not None
        millions = sum(one.numel() for one in inferencer.model.parameters()) / 1e6
        weights = "the average of the weights (EMA)" if average and not choice.raw else "the weights themselves"
        weights += (", with adapters" if choice.adapters else ", without its adapters") * adapters
        return ability, f"{ability.name}, {millions:,.1f} M parameters: {weights}", average, adapters

    def reply(self, conversation: Conversation) -> Iterator[Exchange]:
        """Answer the oldest open request of a conversation, and yield it whenever there is something new to show."""
        exchange = next((one for one in conversation.exchanges if one.waits), None)
        if exchange is None:
            return
        exchange.waits, running, before = False, True, list[str]()
        worker = threading.Thread(target=self._work, args=(conversation, exchange), daemon=True)
        worker.start()
        try:
            while running:
                worker.join(_POLL_S)
                running = worker.is_alive()
                progress = [one.progress for one in exchange.replies]
                if conversation.over:
                    return
                if progress != before:
                    before = progress
                    yield exchange
        finally:
            exchange.cancelled = True

    def _work(self, conversation: Conversation, exchange: Exchange) -> None:
        with self._lock:
            for column, reply in enumerate(exchange.replies):
                handler = BufferingHandler(1 << 16)
                handler.setLevel(logging.WARNING)
                logger().addHandler(handler)
                try:
                    self._answer(conversation, exchange, column)
                except Interruption:
                    return
                except UnigenError as error:
                    reply.error = str(error)
                except Exception as error:  # of a family of one's own, or of the memory: the page continues
                    reply.error = short_text(error)
                    logger().info("a request failed", exc_info=True)
                finally:
                    logger().removeHandler(handler)
                    reply.notes = [record.getMessage() for record in handler.buffer]
                reply.progress = ""

    def _answer(self, conversation: Conversation, exchange: Exchange, column: int) -> None:
        reply, settings, number = exchange.replies[column], exchange.settings, 0

        def report(progress: str) -> None:
            if conversation.over or exchange.cancelled:
                raise Interruption
            reply.progress = progress

        def on_step(*_: Any) -> None:
            nonlocal number
            number += 1
            report(f"step {number}" + (f" of {total - 1}" if total else ""))

        def on_picture(t: float, picture: Image.Image) -> None:
            reply.steps.append((self.copy(picture, largest=STEP), f"t {t:.2f}"))

        report("opens the model")
        inferencer, _ = self.models.open(reply.choice)
        ability = Ability.of(inferencer)
        options = settings.options_for(inferencer, ability)
        total = getattr(options["flow"], "num_timesteps", None)
        history = conversation.history(exchange, column) if settings.earlier_messages else []
        for name, value, what in (("images", exchange.pictures, "pictures"), ("history", history, "earlier messages")):
            if value and name not in ability.options:
                raise ConfigError(f"{ability.name} reads no {what}", remedy=f"a message without {what}")
        callbacks = {"on_step": on_step, "on_picture": on_picture if settings.sampler_steps else None}
        more = {"history": history, **(callbacks if settings.task == "picture" else {})}
        options |= {name: value for name, value in more.items() if value and name in ability.options}
        for sample in range(settings.samples):
            number = 0
            report(f"begins answer {sample + 1} of {settings.samples}")
            prompt = Prompt(exchange.text, [*map(str, exchange.pictures)])
            result = answer(inferencer, prompt, seed=settings.seed + sample, **options)
            reply.answers.append((result.text, [as_file(one, self._file()) for one in result.images]))

    def _file(self) -> Path:
        return self._folder / f"{uuid4().hex}.png"

    def copy(self, picture: Path | Image.Image, *, largest: int = LARGEST) -> Path:
        """A file of it for the browser."""
        if isinstance(picture, Path) and picture in self._copies:
            return self._copies[picture]
        image = (open_image(picture) if isinstance(picture, Path) else picture).convert("RGBA")
        factor = min(largest / max(image.size), max(1, SMALLEST // max(image.size)))
        size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
        way = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
        path = as_file(image.resize(size, way), self._file())
        if isinstance(picture, Path):
            self._copies[picture] = path
        return path
