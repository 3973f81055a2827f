"""Conversations with one or two models at a time: uploads are checked, requests answered one after the other.

A request is answered in a thread of its own, so that a page can show how far it is; ``Service`` has one lock for all
models. A conversation that was ended receives nothing more: its request stops at the next step of the sampler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any
from uuid import uuid4

from PIL import Image

from unigen_ds.app.ability import Ability, Settings
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
from unigen_ds.runner.open.answers import answer, drawing_of
from unigen_ds.runner.open.trained import check_device, open_inferencer
from unigen_ds.system.log import logger

OPEN_AT_ONCE = 2
"""Models that are kept in memory: those of a comparison."""
NEWS_SECONDS = 0.25
SMALLEST, LARGEST, STEP = 192, 1024, 384
"""Longest side of a picture in the browser: smaller ones are enlarged, with their own pixels visible."""


@dataclass(frozen=True)
class Choice:
    """A model of the page, and how its weights are used."""

    name: str
    raw: bool = False
    adapters: bool = True


class Models:
    """The checkpoints of the command line. ``options``: of ``open_inferencer``."""

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

    def has_average(self, choice: Choice) -> bool:
        directory = locate(self._path(choice), self._tag)
        if not (directory / FILE_NAME).is_file():
            return False
        return any(entry.path.startswith(f"{EMA}/") for entry in Manifest.read(directory).files)

    def open(self, choice: Choice) -> Any:
        """The inferencer, with its adapters switched. Before another one is opened the oldest is given up."""
        key = (self._path(choice), choice.raw)
        inferencer = self._open.pop(key, None)
        if inferencer is None:
            while len(self._open) >= OPEN_AT_ONCE:
                del self._open[next(iter(self._open))]
            inferencer = open_inferencer(key[0], raw=choice.raw, tag=self._tag, **self._options)
        self._open[key] = inferencer
        switch_adapters(inferencer.model, on=choice.adapters)
        return inferencer

    def _path(self, choice: Choice) -> Path:
        names = self.names()
        if choice.name not in names:  # a page cannot open any other file
            raise ConfigError(f"there is no model {choice.name!r}", allowed=", ".join(names))
        return names[choice.name]


@dataclass
class Reply:
    """What one model answers to a request."""

    choice: Choice
    progress: str = "waits"
    """Empty when the reply is complete."""
    answers: list[tuple[str, list[Path]]] = field(default_factory=list)
    """(text, pictures) of each; all but the first are other samples."""
    steps: list[tuple[Path, str]] = field(default_factory=list)
    """(picture, caption) of each step of the sampler."""
    notes: list[str] = field(default_factory=list)
    """Warnings, with their numbers."""
    error: str = ""


@dataclass
class Exchange:
    """A request and its replies, one of each model."""

    text: str
    pictures: Sequence[Path]
    settings: Settings
    replies: Sequence[Reply]
    begun: bool = False
    stopped: bool = False


@dataclass
class Conversation:
    exchanges: list[Exchange] = field(default_factory=list)
    closed: bool = False

    def ask(self, text: str, pictures: Sequence[str], settings: Settings, choices: Sequence[Choice]) -> None:
        """Add a request. Raises ``UnreadableImage`` for a file that is no picture of a data set either: of another
        format, truncated, or of too many pixels; ``ConfigError`` for an empty request."""
        if not text and not pictures:
            raise ConfigError("the message is empty", remedy="write a text, or add a picture")
        for path in pictures:
            open_image(path)
        self.exchanges.append(Exchange(text, [*map(Path, pictures)], settings, [Reply(one) for one in choices]))

    def history(self, exchange: Exchange, column: int) -> list[Turn]:
        """The earlier messages, with what the model of this column answered to them; others are left out."""
        turns: list[Turn] = []
        for one in self.exchanges[: self.exchanges.index(exchange)]:
            if column >= len(one.replies) or not one.replies[column].answers:
                continue
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
        """What a model can do, a line about it, and whether it has an average of its weights and adapters."""
        with self._lock:
            inferencer, average = self.models.open(choice), self.models.has_average(choice)
        ability, record = Ability.of(inferencer), adapter_record(inferencer.model)
        number = sum(one.numel() for one in inferencer.model.parameters())
        weights = ["average of the weights (EMA)" if average and not choice.raw else "the weights themselves"]
        if record is not None:
            weights.append("with adapters" if choice.adapters else "without its adapters")
        return ability, f"{ability.name}, {number / 1e6:,.1f} M parameters, {', '.join(weights)}", average, bool(record)

    def reply(self, conversation: Conversation) -> Iterator[Exchange]:
        """Answer the oldest open request of a conversation, and yield it whenever there is something new to show."""
        exchange = next((one for one in conversation.exchanges if not one.begun), None)
        if exchange is None:
            return
        exchange.begun = True
        news: Queue[bool] = Queue()
        threading.Thread(target=self._work, args=(conversation, exchange, news.put), daemon=True).start()
        try:
            while news.get() and not conversation.closed:
                yield exchange
        finally:
            exchange.stopped = True

    def _work(self, conversation: Conversation, exchange: Exchange, tell: Callable[[bool], None]) -> None:
        try:
            with self._lock:
                for column, reply in enumerate(exchange.replies):
                    try:
                        with warnings_in(reply.notes):
                            self._answer(conversation, exchange, column, tell)
                    except Interruption:
                        return
                    except UnigenError as error:
                        reply.error = str(error)
                    except Exception as error:  # of a family of one's own, or of the memory: the page continues
                        logger().exception("a request failed")
                        reply.error = short_text(error)
                    reply.progress = ""
                    tell(True)
        finally:
            tell(False)

    def _answer(
        self, conversation: Conversation, exchange: Exchange, column: int, tell: Callable[[bool], None]
    ) -> None:
        reply, settings = exchange.replies[column], exchange.settings
        reply.progress = "opens the model"
        tell(True)
        inferencer = self.models.open(reply.choice)
        ability = Ability.of(inferencer)
        options = settings.options_for(ability)
        flow = settings.flow_for(ability) if settings.draw else {}
        drawing = drawing_of(inferencer, flow, understand=not settings.draw)
        history = conversation.history(exchange, column) if settings.remember else []
        if history and not ability.converses:
            raise ConfigError(f"{ability.name} reads no earlier messages", remedy="ask without them")
        if exchange.pictures and not ability.reads_images:
            raise ConfigError(f"{ability.name} reads no pictures", remedy="a message without them")
        prompt = Prompt(exchange.text, tuple(map(str, exchange.pictures)))
        if history and ability.interleaves:
            parts = [*history, *(Turn("user", "image", path) for path in prompt.images)]
            parts_of = [{"image": str(one.value)} if one.kind == "image" else one.value for one in parts]
            prompt = Prompt(exchange.text, parts=parts_of)
        elif history:
            options["history"] = history
        total, last = getattr(drawing, "num_timesteps", None), time.monotonic()

        def on_step(*_: Any) -> None:
            nonlocal last, number
            if conversation.closed or exchange.stopped:
                raise Interruption
            number += 1
            reply.progress = f"step {number}" + (f" of {total - 1}" if total else "")
            if time.monotonic() - last > NEWS_SECONDS:
                last = time.monotonic()
                tell(True)

        def on_picture(t: float, picture: Image.Image) -> None:
            reply.steps.append((self.copy(picture, largest=STEP), f"t {t:.2f}"))

        if settings.draw and "on_step" in ability.options:
            options["on_step"] = on_step
        if settings.draw and settings.steps and "on_picture" in ability.options:
            options["on_picture"] = on_picture
        for sample in range(settings.samples):
            if conversation.closed or exchange.stopped:
                raise Interruption
            number, reply.progress = 0, "draws" if settings.draw else "writes"
            tell(True)
            made = answer(inferencer, prompt, flow=drawing, **{**options, "seed": settings.seed + sample})
            reply.answers.append((made.text, [as_file(each, self._file()) for each in made.images]))

    def _file(self) -> Path:
        return self._folder / f"{uuid4().hex}.png"

    def copy(self, picture: Path | Image.Image, *, largest: int = LARGEST) -> Path:
        """A file of it for the browser."""
        if isinstance(picture, Path) and picture in self._copies:
            return self._copies[picture]
        image = (open_image(picture) if isinstance(picture, Path) else picture).convert("RGBA")
        side = max(image.size)
        factor = max(1, SMALLEST // side) if side <= largest else largest / side
        size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
        way = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
        path = as_file(image.resize(size, way), self._file())
        if isinstance(picture, Path):
            self._copies[picture] = path
        return path


@contextmanager
def warnings_in(notes: list[str]) -> Iterator[None]:
    """Inside, warnings of the log of this thread are added to ``notes``, too."""
    thread, handler = threading.get_ident(), logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        if record.thread == thread and record.levelno < logging.ERROR:
            notes.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logger().addHandler(handler)
    try:
        yield
    finally:
        logger().removeHandler(handler)
