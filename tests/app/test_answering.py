"""What the page of ``tools/app.py`` asks of models, without Gradio: answers, uploads, errors, several at a time."""

from __future__ import annotations

import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.end_to_end.models.test_lora import base, config  # noqa: F401 - a fixture
from tests.families.tiny_transformers import write_images
from tests.plugin.data import RowsProcessor
from tests.plugin.family import Predictor, RowsNetwork
from tests.tiny import tiny_config
from unigen_ds.app.ability import Ability, AnswerSettings
from unigen_ds.app.answering import Choice, Conversation, Models, Service
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.images.image_files import UnreadableImage
from unigen_ds.families.decoder_lm.family import TextInferencer
from unigen_ds.inference.generated import Generated
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer

FAST = {"num_timesteps": "4"}
DRAW = AnswerSettings(task="picture", flow=FAST)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    average = [{"type": "EMAHook", "momentum": 0.5}]
    config = tiny_config(tmp_path_factory.mktemp("app") / "run", digits, custom_hooks=average)
    Runner.from_cfg(config, max_updates=2).train()
    return Path(config.work_dir)


def service_of(folder: Path, *paths: Path) -> Service:
    return Service(Models(paths, device="cpu", dtype=torch.float32), folder)


@pytest.fixture
def service(run: Path, tmp_path: Path) -> Service:
    return service_of(tmp_path, run)


def ask(
    service: Service, talk: Conversation, text: str, settings: AnswerSettings, *choices: Choice, files: Any = ()
) -> Any:
    """The replies when they are complete."""
    choices = choices or (Choice(next(iter(service.models.names()))),)
    talk.ask(text, [*map(str, files)], settings, choices)
    exchanges = [*service.reply(talk)]
    assert exchanges[-1] is talk.exchanges[-1] and not any(reply.progress for reply in exchanges[-1].replies)
    return exchanges[-1].replies


def test_a_drawing_with_its_steps_is_that_of_the_inferencer(run: Path, service: Service) -> None:
    times: list[float] = []
    settings = AnswerSettings(task="picture", sampler_steps=True, seed=3, samples=2, flow=FAST)
    (reply,) = ask(service, Conversation(), "draw a handwritten three", settings)
    (_, [first]), (_, [second]) = reply.answers
    expected = open_inferencer(run).unified_generate(
        "draw a handwritten three", seed=3, flow={"num_timesteps": 4}, on_picture=lambda t, _: times.append(t)
    )
    assert Image.open(first).tobytes() == expected.images[0].tobytes() != Image.open(second).tobytes()
    assert (
        [text for _, text in reply.steps] == [f"t {t:.2f}" for t in times] * 2 and len(times) == 3 and times[0] == 1.0
    )
    assert Image.open(reply.steps[0][0]).size == (192, 192) and not reply.notes
    (reply,) = ask(service, Conversation(), "", AnswerSettings(max_length=4), files=[first])
    assert reply.answers == [
        (open_inferencer(run).unified_generate("", images=first, understand=True, max_length=4).text, [])
    ]


def test_weights_and_models_beside_each_other(run: Path, service: Service) -> None:
    (name,) = service.models.names()
    average, raw = ask(service, Conversation(), "draw a three", DRAW, Choice(name), Choice(name, raw=True))
    for reply, is_raw in ((average, False), (raw, True)):
        expected = open_inferencer(run, raw=is_raw).unified_generate("draw a three", flow={"num_timesteps": 4})
        assert Image.open(reply.answers[0][1][0]).tobytes() == expected.images[0].tobytes()
    assert [service.describe(Choice(name, raw=is_raw))[2:] for is_raw in (False, True)] == [(True, False)] * 2
    (reply,) = ask(service, Conversation(), "draw a three", DRAW, Choice(str(run.parent / "other")))
    assert "there is no model" in reply.error and name in reply.error


def test_adapters_on_and_off(base: Path, tmp_path: Path) -> None:  # noqa: F811
    Runner.from_cfg(config(tmp_path, base), max_updates=8).train()
    service = service_of(tmp_path, tmp_path / "run")
    (name,) = list(service.models.names())[:1]
    with_adapters, without = (Choice(name, adapters=on) for on in (True, False))
    replies = ask(
        service, Conversation(), "one two", AnswerSettings(max_length=8), with_adapters, without, with_adapters
    )
    texts = [reply.answers[0][0] for reply in replies]
    expected = [open_inferencer(one).unified_generate("one two", max_length=8).text for one in (tmp_path / "run", base)]
    assert texts == [*expected, expected[0]] and expected[0] != expected[1]
    assert [service.describe(one)[1].rpartition(", ")[2] for one in (with_adapters, without)] == [
        "with adapters",
        "without its adapters",
    ]


def png(width: int, height: int) -> bytes:
    """A small file that claims a size, and ends in its first pixels."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b"x"))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", "its content is none of the formats"),
        (png(14_000, 14_000), "exceeds limit of 178956970 pixels"),
        (png(8, 8), "cannot be decoded"),
    ],
    ids=["no picture", "a bomb", "a part of a file"],
)
def test_an_upload_is_checked_as_a_picture_of_a_record(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "upload.png").write_bytes(content)
    talk = Conversation()
    with pytest.raises(UnreadableImage, match=message):
        talk.ask("what is this", [str(tmp_path / "upload.png")], AnswerSettings(), [])
    with pytest.raises(ConfigError, match="the message is empty"):
        talk.ask("", [], AnswerSettings(), [])
    assert talk.exchanges == []


def test_a_chat_with_pictures_reads_the_earlier_messages(tmp_path: Path) -> None:
    service = service_of(tmp_path, write_images(tmp_path / "model", "llava"))
    picture, talk = tmp_path / "red.png", Conversation()
    Image.new("RGB", (16, 16), "red").save(picture)
    inferencer, _ = service.models.open(Choice(str(tmp_path / "model")))
    prompts: list[str] = []
    write = inferencer.write
    inferencer.write = lambda several, *rest: prompts.append(decode(inferencer, several[0])) or write(several, *rest)
    (first,) = ask(service, talk, "what colour is it", AnswerSettings(max_length=3), files=[picture])
    ask(service, talk, "and so", AnswerSettings(max_length=3, earlier_messages=True))
    ask(service, talk, "and so", AnswerSettings(max_length=3))
    assert prompts[0] in prompts[1] and first.answers[0][0] in prompts[1].partition(prompts[0])[2]
    assert prompts[2].count("user") == 1 < prompts[1].count("user") == 2
    (reply,) = ask(service, talk, "a cat", AnswerSettings(task="picture"))
    assert "does not answer with a picture" in reply.error and not reply.answers


def decode(inferencer: Any, splits: Any) -> str:
    return inferencer.processor.tokenizer.chat.decode([i for split in splits for i in getattr(split, "ids", ())])


class Painter:
    """An inferencer of one's own. It draws step by step, and waits in the second one for ``go_on``."""

    answers = ("image",)

    def __init__(self) -> None:
        self.model, self.processor = RowsNetwork(num_inputs=3), None
        self.go_on, self.running, self.ended = threading.Event(), threading.Event(), list[str]()

    def unified_generate(self, prompt: str, *, seed: int, on_step: Any = None, **_: Any) -> Generated:
        assert not self.running.is_set(), "two at a time"
        self.running.set()
        try:
            for step in range(3):
                on_step(step)
                assert step != 1 or self.go_on.wait(20)
            if prompt == "fail":
                raise MemoryError("no memory is left")
            self.ended.append(prompt)
            return Generated("", [Image.new("RGB", (8, 8), prompt)])
        finally:
            self.running.clear()


class OneModel:
    """In place of ``Models``."""

    def __init__(self, inferencer: Any) -> None:
        self.open = lambda choice: (inferencer, False)


def test_requests_wait_for_each_other_and_a_new_conversation_receives_its_own_answer_alone(tmp_path: Path) -> None:
    painter = Painter()
    service = Service(OneModel(painter), tmp_path)  # type: ignore[arg-type]
    first, second, settings = Conversation(), Conversation(), AnswerSettings(task="picture")
    for talk, colour in ((first, "red"), (second, "blue"), (second, "green")):
        talk.ask(colour, [], settings, [Choice("own")])
    news = service.reply(first)
    assert next(news).replies[0].progress and painter.running.wait(20)
    others = [service.reply(second), service.reply(second)]
    threads = [threading.Thread(target=lambda other=other: [*other]) for other in others]
    for thread in threads:
        thread.start()
    first.over = True  # what the button does
    assert [*news] == [] and painter.ended == []
    painter.go_on.set()
    for thread in threads:
        thread.join(20)
    assert first.exchanges[0].replies[0].answers == [] and sorted(painter.ended) == ["blue", "green"]
    colours = [Image.open(one.replies[0].answers[0][1][0]).getpixel((0, 0)) for one in second.exchanges]
    assert colours == [(0, 0, 255), (0, 128, 0)]


def test_after_a_request_that_fails_the_next_one_is_answered(tmp_path: Path) -> None:
    painter, talk = Painter(), Conversation()
    service = Service(OneModel(painter), tmp_path)  # type: ignore[arg-type]
    painter.go_on.set()
    choice, settings = Choice("own"), AnswerSettings(task="picture", think=True, flow={"num_timesteps": "4"})
    (reply,) = ask(service, talk, "fail", settings, choice)
    assert reply.error.startswith("MemoryError: no memory is left") and not reply.answers
    assert reply.notes == ["without effect on RowsNetwork: think, num_timesteps"]
    (reply,) = ask(service, talk, "red", settings, choice)
    assert reply.answers and not reply.error
    (reply,) = ask(service, talk, "red", AnswerSettings(), choice)
    assert "RowsNetwork does not answer with a text. Allowed: picture" in reply.error


def test_what_a_model_of_ones_own_declares_is_what_is_offered() -> None:
    network = RowsNetwork(num_inputs=3)
    predictor = Ability.of(Predictor(network, RowsProcessor(num_inputs=3, tokenizer=None, seed=0)))
    assert predictor.tasks == ("text",) and not predictor.options & {"images", "history", "temperature", "think"}
    painter = Ability.of(Painter())
    assert painter.tasks == ("picture",) and {"seed", "on_step"} < painter.options and not painter.drawing
    decoder = Ability.of(TextInferencer(network, None))
    assert decoder.tasks == ("text",) and {"max_length", "top_p"} < decoder.options
    assert not decoder.options & {"images", "history", "think", "size", "flow", "on_picture"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_length": 0}, "settings.max_length is 0"),
        ({"samples": 99}, "settings.samples is 99"),
        ({"seed": None}, "settings.seed is None"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_wrong_settings_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AnswerSettings(**values)
