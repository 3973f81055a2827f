"""The page of ``tools/app.py``, in Gradio: chats beside each other, a message with pictures, models and settings.

Every event has the conversation of its page as its state. A message is checked and shown at once; its answer waits in
one queue with those of all pages. Nothing is requested from another host, and nothing is sent to one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unigen_ds.app.ability import Settings
from unigen_ds.app.answering import Choice, Conversation, Models, Reply, Service
from unigen_ds.checkpoint.convert import DTYPES
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.families.base import families
from unigen_ds.system.log import logger
from unigen_ds.system.machine import import_optional

MODEL = {"concurrency_id": "model", "concurrency_limit": 1}
"""Events that need a model wait for each other."""
NONE = "none"
MAX_UPLOAD = "256mb"
CSS = """
.gradio-container {max-width: 1100px !important; margin: auto}
footer {display: none !important}
@media (max-width: 480px) {.gradio-container {padding: 4px !important}}
"""


def gradio() -> Any:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "False"
    return import_optional("gradio", "tools/app.py", install="'unigen_ds[app]'")


def serve(
    paths: Sequence[Path], *, host: str, port: int, raw: bool, device: str | None, dtype: str | None, **source: Any
) -> None:
    """Open the first model and serve the page until the process is interrupted. ``source``: of ``open_inferencer``."""
    gr = gradio()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = DTYPES[dtype or ("fp32" if device == "cpu" else "bf16")]
    with tempfile.TemporaryDirectory(prefix="unigen-app-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = str(Path(folder) / "uploads")
        service = Service(Models(paths, device=device, dtype=kind, **source), Path(folder))
        first = Choice(next(iter(service.models.names())), raw)
        service.describe(first)  # what cannot be opened is an error of the command
        page = build(gr, service, first)
        options = {"share": False, "quiet": True, "ssr_mode": False, "run_history": False, "footer_links": [],
                   "max_file_size": MAX_UPLOAD, "enable_monitoring": False, "show_error": True, "css": CSS}  # fmt: skip
        try:
            page.queue(api_open=False).launch(server_name=host, server_port=port, prevent_thread_lock=True, **options)
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be used: {error}", remedy="another --port or --host") from error
        logger().info("The page is at %s; Ctrl-C ends it.", page.local_url)
        if host not in ("127.0.0.1", "localhost", "::1"):
            logger().warning("Whoever can reach %s:%d can use the models of this page.", host, port)
        page.block_thread()


def messages(service: Service, conversation: Conversation, column: int) -> list[dict[str, Any]]:
    """A conversation with one model, as Gradio's chat has it."""
    result: list[dict[str, Any]] = []
    for exchange in conversation.exchanges:
        asked = [{"path": str(service.copy(path)), "alt_text": "your picture"} for path in exchange.pictures]
        result += [{"role": "user", "content": one} for one in (*asked, exchange.text) if one]
        if column < len(exchange.replies):
            contents = content_of(service, exchange.replies[column], exchange.settings)
            result += [{"role": "assistant", "content": one} for one in contents]
    return result


def content_of(service: Service, reply: Reply, settings: Settings) -> list[Any]:
    contents: list[Any] = []
    for number, (text, pictures) in enumerate(reply.answers):
        contents += [text] if text or not pictures else []
        alt = f"picture, seed {settings.seed + number}"
        contents += [{"path": str(service.copy(path)), "alt_text": alt} for path in pictures]
    if reply.progress:
        contents += [{"path": str(reply.steps[-1][0]), "alt_text": "step"}] if reply.steps else []
        contents.append(f"... {reply.progress}")
    return [*contents, *(f"note: {one}" for one in reply.notes), *([f"error: {reply.error}"] if reply.error else [])]


def build(gr: Any, service: Service, first: Choice) -> Any:
    """The page. Its components are in the order in which a narrow screen shows them."""
    slots = max(12, *(len(getattr(each.drawing, "__dataclass_fields__", ())) for each in families()))
    names = list(service.models.names())
    with gr.Blocks(title="unigen_ds", analytics_enabled=False) as page:
        conversation, keys = gr.State(Conversation), gr.State([])
        about = gr.Markdown(elem_id="about")
        with gr.Row():
            chats = [
                gr.Chatbot(label=label, elem_id=f"chat{number}", height=420, min_width=300, render_markdown=False,
                           visible=not number, buttons=["copy"], feedback_options=None)
                for number, label in enumerate(("Model", "Compared model"))
            ]  # fmt: skip
        problem = gr.Textbox(label="Message", elem_id="problem", visible=False, interactive=False, lines=2)
        task = gr.Radio(["text", "picture"], value="text", label="Answer", elem_id="task")
        box = gr.MultimodalTextbox(label="Your message", elem_id="box", file_count="multiple", sources=["upload"],
                                   placeholder="a text, with or without pictures", max_plain_text_length=1_000_000)  # fmt: skip
        with gr.Row():
            new = gr.Button("New conversation", elem_id="new", min_width=120)
            edit = gr.Button("Edit the last picture", elem_id="edit", min_width=120)
        gallery = gr.Gallery(label="Steps of the sampler", elem_id="steps", visible=False, columns=6, height="auto")
        with gr.Accordion("Models", open=False, elem_id="models"), gr.Row():
            columns = []
            for number, choices in enumerate((names, [NONE, *names])):
                with gr.Column(min_width=280):
                    label = "Compare with" if number else "Model"
                    name = gr.Dropdown(choices, value=choices[0], label=label, elem_id=f"model{number}")
                    raw = gr.Radio(["average (EMA)", "raw"], type="index", value="raw" if first.raw else "average (EMA)",
                                   label="Weights", visible=False, elem_id=f"weights{number}")  # fmt: skip
                    adapters = gr.Checkbox(True, label="Adapters", visible=False, elem_id=f"adapters{number}")
                columns.append((name, raw, adapters))
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            number_of = partial(gr.Number, min_width=120)
            with gr.Row():
                fields = {
                    "remember": gr.Checkbox(label="With the earlier messages", elem_id="remember"),
                    "think": gr.Checkbox(label="Think first"),
                    "steps": gr.Checkbox(label="Show the sampler's steps", elem_id="show_steps"),
                    "seed": number_of(0, label="Seed", precision=0, elem_id="seed"),
                    "samples": number_of(1, label="Answers", precision=0, elem_id="samples"),
                    "max_length": number_of(1000, label="Most tokens", precision=0, elem_id="max_length"),
                    "temperature": number_of(0, label="Temperature"),
                    "top_p": number_of(1, label="Top p"),
                    "height": number_of(None, label="Height", precision=0, placeholder="the model's"),
                    "width": number_of(None, label="Width", precision=0, placeholder="the model's"),
                }
            with gr.Row():
                flow = [gr.Textbox(visible=False, min_width=140, elem_classes="flow") for _ in range(slots)]

        every_choice = [component for column in columns for component in column]

        def choices_of(values: Sequence[Any]) -> list[Choice]:
            both = [Choice(name, bool(raw), adapters) for name, raw, adapters in (values[:3], values[3:6])]
            return [one for one in both if one.name != NONE]

        def chats_of(talk: Conversation) -> list[Any]:
            return [messages(service, talk, column) for column in range(2)]

        def describe(*values: Any) -> Any:
            choices = choices_of(values)
            try:
                facts = [service.describe(choice) for choice in choices]
            except UnigenError as error:
                return {problem: gr.update(value=str(error), visible=True)}
            abilities = [one[0] for one in facts]
            options = frozenset[str]().union(*(one.options for one in abilities))
            drawing = {key: text for one in reversed(abilities) for key, text in one.drawing.items()}
            tasks = [
                name
                for name, able in (("text", "writes"), ("picture", "draws"))
                if any(getattr(one, able) for one in abilities)
            ]
            update: dict[Any, Any] = {problem: gr.update(visible=False)}
            update[about] = "\n\n".join(
                f"**{choice.name}**: {one[1]}" for choice, one in zip(choices, facts, strict=True)
            )
            update[chats[0]] = gr.update(label=choices[0].name)
            update[chats[1]] = gr.update(label=choices[-1].name, visible=len(choices) > 1)
            for (_, raw, adapters), one in zip(columns, facts, strict=False):
                update |= {raw: gr.update(visible=one[2]), adapters: gr.update(visible=one[3])}
            update[task] = gr.update(choices=tasks, value=tasks[0], visible=len(tasks) > 1)
            update[fields["remember"]] = gr.update(
                visible=any(one.converses for one in abilities), value="picture" not in tasks
            )
            update[edit] = gr.update(visible="picture" in tasks and any(one.reads_images for one in abilities))
            shows = {"think": "think", "steps": "on_picture", "max_length": "max_length", "temperature": "temperature",
                     "top_p": "top_p", "height": "size", "width": "size"}  # fmt: skip
            update |= {fields[key]: gr.update(visible=option in options) for key, option in shows.items()}
            named = [*drawing.items(), *[("", "")] * slots][:slots]
            update |= {
                one: gr.update(label=key, placeholder=text, value="", visible=bool(key))
                for one, (key, text) in zip(flow, named, strict=True)
            }
            return {**update, keys: list(drawing)}

        def ask(talk: Conversation, message: dict[str, Any], answer: str, labels: list[str], *values: Any) -> Any:
            texts = dict(zip(labels, values[6 + len(fields) :], strict=False))
            try:
                settings = Settings(draw=answer == "picture", flow={key: text for key, text in texts.items() if text},
                                    **dict(zip(fields, values[6:], strict=False)))  # fmt: skip
                talk.ask(message["text"].strip(), message["files"], settings, choices_of(values))
            except UnigenError as error:
                return {problem: gr.update(value=str(error), visible=True)}
            return {problem: gr.update(visible=False), box: None, **dict(zip(chats, chats_of(talk), strict=True))}

        def respond(talk: Conversation) -> Iterator[Any]:
            for exchange in service.reply(talk):
                pictures = [(str(path), text) for reply in exchange.replies for path, text in reply.steps]
                yield [*chats_of(talk), gr.update(value=pictures, visible=bool(pictures))]

        def begin(talk: Conversation) -> Any:
            talk.closed = True
            return [Conversation(), [], [], gr.update(value=[], visible=False), gr.update(visible=False)]

        def last_picture(talk: Conversation, message: dict[str, Any]) -> Any:
            pictures = [path for one in talk.exchanges for _, paths in one.replies[0].answers[:1] for path in paths]
            if not pictures:
                return {problem: gr.update(value="there is no picture yet", visible=True)}
            return {box: {"text": message["text"], "files": [str(pictures[-1])]}, task: "picture"}

        private = {"api_visibility": "private", "show_progress": "hidden"}
        described = [problem, about, *chats, task, edit, keys, *every_choice, *fields.values(), *flow]
        page.load(lambda: [gr.update(choices=[*extra, *service.models.names()]) for extra in ([], [NONE])],
                  None, [column[0] for column in columns], queue=False, **private).then(
            describe, every_choice, described, **MODEL, **private)  # fmt: skip
        for component in every_choice:
            component.input(describe, every_choice, described, **MODEL, **private)
        inputs = [conversation, box, task, keys, *every_choice, *fields.values(), *flow]
        box.submit(ask, inputs, [problem, box, *chats], queue=False, trigger_mode="multiple", **private).then(
            respond, conversation, [*chats, gallery], trigger_mode="multiple", **MODEL, **private
        )
        new.click(begin, conversation, [conversation, *chats, gallery, problem], queue=False, **private)
        edit.click(last_picture, [conversation, box], [problem, box, task], queue=False, **private)
    return page
