"""The page of ``tools/app.py`` in headless Chromium: ``make check-app``; not part of ``make test``.

The models are those of ``make demo`` and ``make demo-emoji`` where these are complete, else shorter trainings.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.browser.check_report import BROWSERS
from unigen_ds.examples.digits.dataset import caption, read_split, write_digits
from unigen_ds.examples.digits.report_hook import train_classifier
from unigen_ds.examples.emoji.catalogue import Variant
from unigen_ds.examples.emoji.dataset import EmojiClassifier, write_emoji

pytest.importorskip("gradio")
sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium"), pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "unified_digits": ("train_cfg.max_epochs=12", "param_scheduler.1.end=12", "custom_hooks.0.momentum=0.05"),
    "unified_emoji": (
        'train_dataloader.dataset=dict(type="EmojiDataset", root="{root}", task="edit")', "val_dataloader=None",
        "train_dataloader.batch_size=2", 'optim_wrapper.optimizer=dict(type="AdamW", lr=2e-3)',
        'custom_hooks=[dict(type="EMAHook", momentum=0.05)]', "train_cfg.max_updates=150",
        "param_scheduler.0.end=20", "param_scheduler.1.begin=20", "param_scheduler.1.end=150",
    ),
}  # fmt: skip
"""Overrides of a training in two minutes: of the emoji, the edits of one alone."""
DRAWING = {"num_timesteps": "26", "text_scale": "2", "renorm": "none"}  # as in the digits' report
SLOW = {**DRAWING, "num_timesteps": "3000"}


def model(name: str, folder: Path) -> Path:
    """A work dir."""
    demo = ROOT / "work_dirs" / name
    if (demo / "results.json").is_file():
        return demo
    edits = write_emoji(folder / "emoji") / "edit_train.jsonl"
    edits.write_text("".join(line for line in edits.read_text().splitlines(True) if "pictures/car" in line))
    options = [one.format(root=folder / "emoji") for one in SHORT[name]]
    command = [sys.executable, "tools/train.py", name, "--work-dir", str(folder / name), "--cfg-options", *options]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)  # the work dir has the log
    return folder / name


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a page with both models: the first one is that of the digits."""
    folder = tmp_path_factory.mktemp("models")
    digits, emoji = (model(name, folder) for name in SHORT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "tools/app.py", str(digits), str(emoji), "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("The page is at" in line for line in process.stderr), "it ended"
    yield f"http://127.0.0.1:{port}/"
    process.terminate()
    process.wait(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """A page of its own session. Requests to another host and errors of scripts are problems."""

    def __init__(self, browser: Any, address: str, *, width: int = 1280) -> None:
        self.page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda one: None if one.url.startswith((address, "data:", "blob:"))
                     else self.problems.append(one.url))  # fmt: skip
        self.page.goto(address)
        self.page.locator("#about strong").wait_for(timeout=60_000)
        for name in ("models", "settings"):
            self.page.locator(f"#{name} button").first.click()

    def choose(self, column: int, word: str) -> None:
        about = self.page.inner_text("#about")
        self.page.locator(f"#model{column} input").click()
        self.page.locator("[role=option]", has_text=word).first.click()
        self.page.wait_for_function("text => document.querySelector('#about').innerText !== text", arg=about)

    def send(self, text: str, task: str, *files: Path, flow: dict[str, str] | None = None) -> None:
        for key, value in (flow or {}).items():
            self.page.get_by_label(key, exact=True).fill(value)
        self.page.locator("#task label", has_text=task).click()
        if files:
            self.page.locator("#box input[type=file]").set_input_files([*files])
            self.page.locator("#box .thumbnails img, #box .thumbnail-item").first.wait_for()
        self.page.locator("#box textarea").fill(text)
        self.page.keyboard.press("Enter")

    def answers(self, column: int = 0, *, number: int = 1) -> list[Any]:
        """The last messages of the model, when it has answered so many requests."""
        chat = self.page.locator(f"#chat{column}")
        chat.locator(".bot-row").nth(number - 1).wait_for(timeout=120_000)
        self.page.wait_for_function(
            f"!document.querySelector('#chat{column}').innerText.includes('... ')", timeout=300_000
        )
        return [chat.locator(".bot-row").nth(i) for i in range(chat.locator(".bot-row").count())]

    def pictures(self, row: Any, side: int) -> list[Image.Image]:
        """The drawings in their own pixels."""
        row.locator("img").first.wait_for()  # the page loads what shows them when there is a first one
        addresses = [one.get_attribute("src") for one in row.locator("img").all()]
        files = [BytesIO(self.page.request.get(one).body()) for one in addresses]
        return [Image.open(one).convert("RGB").resize((side, side), Image.Resampling.NEAREST) for one in files]


def test_it_draws_digits_with_their_steps_and_reads_one(address: str, browser: Any, tmp_path: Path) -> None:
    page = Page(browser, address)
    page.page.get_by_label("Sampler steps").check()
    page.page.locator("#samples input").fill("5")
    page.send("draw a handwritten three", "picture", flow=DRAWING)
    (row,) = page.answers()
    pixels = np.stack([np.asarray(one.convert("L")) for one in page.pictures(row, 8)]) / 255
    classifier = train_classifier(*read_split(write_digits(tmp_path / "digits"), "train"))
    digits = classifier.predict((pixels * 16).round().reshape(5, -1) / 16).tolist()
    assert digits.count(3) >= 4, digits
    assert page.page.locator("#gallery .thumbnail-item").count() == 5 * 25
    page.page.locator("#edit").click()
    page.page.locator("#box .thumbnail-item").first.wait_for()
    page.page.locator("#samples input").fill("1")
    page.send("", "text")
    assert page.answers(number=2)[1].inner_text().strip() == caption(digits[-1])
    assert page.problems == []


def test_it_edits_an_emoji(address: str, browser: Any, tmp_path: Path) -> None:
    classifier = EmojiClassifier(tmp_path / "emoji")
    before, after = Variant("car"), Variant("car", "blue")
    page = Page(browser, address)
    page.choose(0, "unified_emoji")
    page.send(after.instruction(), "picture", tmp_path / "emoji" / before.file)
    (row,) = page.answers()
    (picture,) = page.pictures(row, 32)
    assert classifier.nearest(picture) == after, classifier.error(picture, after)
    assert page.problems == []


def test_a_request_that_fails_shows_its_message_and_the_page_continues(
    address: str, browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "upload.png").write_bytes(b"<svg></svg>")
    page = Page(browser, address)
    page.send("", "text", tmp_path / "upload.png")
    page.page.locator("#problem textarea").wait_for()
    assert "its content is none of the formats" in page.page.input_value("#problem textarea")
    page.page.locator("#box button[aria-label*='emove']").first.click()
    page.send("draw a three", "picture", flow={"num_timesteps": "many"})
    assert "error: flow.num_timesteps is 'many'" in page.answers()[0].inner_text()
    assert not page.page.locator("#problem").is_visible()
    page.send("draw a three", "picture", flow={"num_timesteps": "4"})
    assert page.answers(number=2)[1].locator("img").count() == 1


def test_two_pages_wait_for_each_other_and_a_new_conversation_has_its_own_answer_alone(
    address: str, browser: Any
) -> None:
    first, second = Page(browser, address), Page(browser, address)
    first.send("draw a one", "picture", flow=SLOW)
    first.page.get_by_text(re.compile("step [0-9]+ of 2999")).wait_for(timeout=60_000)
    second.send("draw a two", "picture", flow={"num_timesteps": "4"})
    second.page.get_by_text("... waits").wait_for()
    second.send("draw a four", "picture")  # two of one page
    first.page.locator("#new").click()
    first.send("draw a three", "picture", flow={"num_timesteps": "4"})
    assert len(second.answers(number=2)) == 2
    (row,) = first.answers()
    assert row.locator("img").count() == 1 and first.page.locator("#chat0 .user-row").all_inner_texts() == [
        "draw a three"
    ]
    assert first.problems == second.problems == []


def test_two_models_beside_each_other_on_a_narrow_screen(address: str, browser: Any) -> None:
    page = Page(browser, address, width=390)
    page.choose(1, "unified_digits")
    page.page.locator("#weights1 label", has_text="raw").click()
    page.page.locator("#about", has_text="the weights themselves").wait_for()
    page.send("draw a three", "picture", flow={"num_timesteps": "4"})
    first, second = (page.pictures(page.answers(column)[0], 8) for column in range(2))
    assert len(first) == len(second) == 1 and first[0].tobytes() != second[0].tobytes()
    assert page.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.problems == []
