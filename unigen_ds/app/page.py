"""The page of ``tools/app.py``, in Gradio: chats beside each other, a message with pictures, models and settings.

Every event has the conversation of its page as its state. A message is checked and shown at once; its answer waits in
one queue with those of all pages. Nothing is requested from another host, and nothing is sent to one.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from unigen_ds.app.ability import AnswerSettings
from unigen_ds.app.answering import Choice, Conversation, Models, Service
from unigen_ds.checkpoint.convert import DTYPES
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.families.base import families
from unigen_ds.system.log import logger
from unigen_ds.system.machine import import_optional

NONE, AVERAGE, RAW = "none", "average (EMA)", "raw"
CSS = """
.gradio-container {width: 100% !important; max-width: 1100px !important; margin: auto}
button[title="Share"] {display: none}
@media (max-width: 480px) {.gradio-container {padding: 4px !important}}
"""
NEEDS = {
    "earlier_messages": "history",
    "sampler_steps": "on_picture",
    "height": "size",
    "width": "size",
    "samples": "seed",
}
"""Setting -> parameter of ``unified_generate``, where they differ."""
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
MODEL: dict[str, Any] = {**PRIVATE, "concurrency_id": "model", "concurrency_limit": 1}
"""Events that need a model wait for each other."""


def serve_page(
    paths: Sequence[Path], *, host: str, port: int, raw: bool, device: str | None, dtype: str | None, **source: Any
) -> None:
    """Open the first model and serve the page until the process is interrupted. ``source``: of ``open_inferencer``.
    Raises ``ConfigError`` where Gradio is missing, or the port is in use."""
    os.environ["GRADIO_ANALYTICS_ENABLED"], os.environ["HF_HUB_DISABLE_TELEMETRY"] = "False", "1"
    gr = import_optional("gradio", "tools/app.py", install="'unigen_ds[app]'")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = DTYPES[dtype or ("fp32" if device == "cpu" else "bf16")]
    with tempfile.TemporaryDirectory(prefix="unigen-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = str(Path(folder) / "uploads")
        service = Service(Models(paths, device=device, dtype=kind, **source), Path(folder))
        service.describe(Choice(next(iter(service.models.names())), raw))  # an error of the command, not of the page
        page = Page(gr, service, raw=raw).blocks.queue(api_open=False)
        try:
            page.launch(
                server_name=host, server_port=port, prevent_thread_lock=True, share=False, quiet=True, ssr_mode=False,
                run_history=False, footer_links=[], enable_monitoring=False, show_error=True,
                max_file_size="256mb", css=CSS,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be used: {error}", remedy="another --port or --host") from error
        if host not in ("127.0.0.1", "localhost", "::1"):
            logger().warning("Whoever reaches %s:%d can use the models of this page.", host, port)
        logger().info("The page is at %s; Ctrl-C ends it.", page.local_url)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's script ignores it for what runs beside it
        page.block_thread()


def messages(service: Service, conversation: Conversation, column: int) -> list[dict[str, Any]]:
    """A conversation with one model, as Gradio's chat has it."""
    result: list[dict[str, Any]] = []

    def add(role: str, *contents: Path | str, label: str = "picture") -> None:
        for one in contents:
            content = {"path": str(one), "alt_text": label} if isinstance(one, Path) else one
            result.extend([{"role": role, "content": content}] if content else [])

    for exchange in conversation.exchanges:
        add("user", *map(service.copy, exchange.pictures), exchange.text)
        for reply in exchange.replies[column : column + 1]:
            for seed, (text, pictures) in enumerate(reply.answers, start=exchange.settings.seed):
                answer = text or ("" if pictures else "(an empty text)")
                add("assistant", answer, *map(service.copy, pictures), label=f"picture of seed {seed}")
            add("assistant", *(f"note: {one}" for one in reply.notes), reply.error and f"error: {reply.error}")
            if reply.progress:
                add("assistant", *(path for path, _ in reply.steps[-1:]), f"... {reply.progress}", label="step")
    return result


class Page:
    """The components, in the order in which a narrow screen shows them, and what their events do."""

    def __init__(self, gr: Any, service: Service, *, raw: bool) -> None:
        self.gr, self.service, names = gr, service, [*service.models.names()]
        with gr.Blocks(title="unigen_ds", analytics_enabled=False) as self.blocks:
            self.talk, self.known = gr.State(lambda: Conversation()), gr.State(([], []))
            self.about = gr.Markdown(elem_id="about")
            with gr.Row():
                self.chats = [
                    gr.Chatbot(elem_id=f"chat{number}", height="60vh", min_width=300, render_markdown=False,
                               visible=not number, buttons=["copy"], feedback_options=None) for number in range(2)
                ]  # fmt: skip
            self.problem = gr.Textbox(label="Message", elem_id="problem", visible=False, interactive=False, lines=2)
            self.task = gr.Radio(["text", "picture"], value="text", label="Answer", elem_id="task")
            self.box = gr.MultimodalTextbox(
                label="Your message", elem_id="box", file_count="multiple", max_plain_text_length=1 << 20
            )
            with gr.Row():
                self.new = gr.Button("New conversation", elem_id="new", size="md", min_width=120)
                self.edit = gr.Button("Edit the last picture", elem_id="edit", size="md", min_width=120)
            self.gallery = gr.Gallery(label="Steps of the sampler", elem_id="gallery", visible=False, columns=6)
            with gr.Accordion("Models", open=False, elem_id="models"), gr.Row():
                self.columns = [self._column(0, names, raw), self._column(1, [NONE, *names], raw)]
            with gr.Accordion("Settings", open=False, elem_id="settings"):
                self._add_settings()
            self._connect()

    def _column(self, number: int, names: list[str], raw: bool) -> list[Any]:
        gr, label = self.gr, "Compare with" if number else "Model"
        with gr.Column(min_width=280):
            return [
                gr.Dropdown(names, value=names[0], label=label, elem_id=f"model{number}"),
                gr.Radio([AVERAGE, RAW], value=RAW if raw else AVERAGE, label="Weights", visible=False,
                         elem_id=f"weights{number}"),
                gr.Checkbox(True, label="Adapters", visible=False, elem_id=f"adapters{number}"),
            ]  # fmt: skip

    def _add_settings(self) -> None:
        gr, self.fields = self.gr, dict[str, Any]()
        for kinds in ((bool,), (int, float)):
            with gr.Row():
                for one in (one for one in fields(AnswerSettings) if type(one.default) in kinds):
                    options = {"label": one.name.replace("_", " ").capitalize(), "elem_id": one.name, "min_width": 120}
                    if kinds == (bool,):
                        self.fields[one.name] = gr.Checkbox(one.default, **options)
                    else:
                        precision = 0 if isinstance(one.default, int) else None
                        self.fields[one.name] = gr.Number(one.default, precision=precision, **options)
        with gr.Row():
            number = max(12, *(len(getattr(one.drawing, "__dataclass_fields__", ())) for one in families()))
            self.flow = [gr.Textbox(visible=False, min_width=140) for _ in range(number)]

    def _connect(self) -> None:
        talk, box, problem, settings, chats = self.talk, self.box, self.problem, [*self.fields.values()], self.chats
        selects = [one for column in self.columns for one in column]
        affected = [problem, self.about, self.known, *chats, self.task, self.edit, *selects, *settings, *self.flow]
        for event in (self.blocks.load, *(one.input for one in selects)):
            event(self.describe, [self.known, *selects], affected, **MODEL)
        inputs = [talk, box, self.task, self.known, *selects, *settings, *self.flow]
        sent = box.submit(self.ask, inputs, [problem, box, *chats], queue=False, trigger_mode="multiple", **PRIVATE)
        sent.then(self.respond, talk, [*chats, self.gallery], trigger_mode="multiple", **MODEL)
        for event in (self.new.click, *(chat.clear for chat in chats)):
            event(self.begin, talk, [talk, *chats, self.gallery, problem], queue=False, **PRIVATE)
        self.edit.click(self.last_picture, [talk, box], [problem, box, self.task], queue=False, **PRIVATE)

    def describe(self, before: tuple[list[str], list[str]], *values: Any) -> Any:
        """Show what the models can be asked for. Values stay where the kinds of models do."""
        choices, update = choices_of(values), self.gr.update
        try:
            facts = [self.service.describe(choice) for choice in choices]
        except UnigenError as error:
            return self._report(error)
        abilities, names = [one[0] for one in facts], [*self.service.models.names()]
        options = frozenset[str]().union(*(one.options for one in abilities))
        drawing = {key: str(value) for one in reversed(abilities) for key, value in one.drawing.items()}
        tasks = [one for one in ("text", "picture") if any(one in able.tasks for able in abilities)]
        lines = (f"**{choice.name}**: {one[1]}" for choice, one in zip(choices, facts, strict=True))
        now = ([one.name for one in abilities], [*drawing])
        result: Any = {self.problem: update(visible=False), self.known: now, self.about: "\n\n".join(lines)}
        for number, (chat, column) in enumerate(zip(self.chats, self.columns, strict=True)):
            there = number < len(choices)
            result[column[0]] = update(choices=[NONE, *names][1 - number :])
            result[column[1]] = update(visible=there and facts[number][2])
            result[column[2]] = update(visible=there and facts[number][3])
            result[chat] = update(visible=there, label=choices[number].name if there else NONE)
        result[self.edit] = update(visible="picture" in tasks and "images" in options)
        if now != before:
            result[self.task] = update(choices=tasks, value=tasks[0], visible=len(tasks) > 1)
            for name, field in self.fields.items():
                result[field] = update(visible=NEEDS.get(name, name) in options)
            result[self.fields["earlier_messages"]]["value"] = "picture" not in tasks
            for one, (key, text) in zip(self.flow, [*drawing.items(), *[("", "")] * len(self.flow)], strict=False):
                result[one] = update(label=key, placeholder=text, value="", visible=bool(key))
        return result

    def ask(self, talk: Conversation, message: Any, task: str, kinds: Any, *values: Any) -> Any:
        numbers = dict(zip(self.fields, values[6:], strict=False))
        texts = dict(zip(kinds[1], values[6 + len(numbers) :], strict=False))
        try:
            settings = AnswerSettings(task=task, flow={key: text for key, text in texts.items() if text}, **numbers)
            talk.ask(message["text"].strip(), message["files"], settings, choices_of(values))
        except UnigenError as error:
            return self._report(error)
        both = {chat: messages(self.service, talk, column) for column, chat in enumerate(self.chats)}
        return {**both, self.problem: self.gr.update(visible=False), self.box: None}

    def respond(self, talk: Conversation) -> Iterator[Any]:
        for exchange in self.service.reply(talk):
            steps = [(str(path), text) for reply in exchange.replies for path, text in reply.steps]
            both = [messages(self.service, talk, column) for column in range(2)]
            text = exchange.settings.task == "text"  # the steps of the last picture stay
            yield [*both, self.gr.skip() if text else self.gr.update(value=steps, visible=bool(steps))]

    def begin(self, talk: Conversation) -> Any:
        """Begin a new conversation. Whatever is still answered in the old one is shown nowhere."""
        talk.over = True
        return [Conversation(), [], [], self.gr.update(value=[], visible=False), self.gr.update(visible=False)]

    def last_picture(self, talk: Conversation, message: Any) -> Any:
        """Put it into the message, to be edited or read."""
        answers = [one for exchange in talk.exchanges for one in exchange.replies[0].answers]
        pictures = [str(path) for _, paths in answers for path in paths]
        if not pictures:
            return self._report("there is no picture yet")
        return {self.box: {"text": message["text"], "files": pictures[-1:]}, self.task: "picture"}

    def _report(self, error: object) -> Any:
        return {self.problem: self.gr.update(value=str(error), visible=True)}


def choices_of(values: Sequence[Any]) -> list[Choice]:
    both = [Choice(name, weights == RAW, on) for name, weights, on in (values[:3], values[3:6])]
    return [one for one in both if one.name != NONE]
