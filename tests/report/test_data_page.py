"""``inspect_data.py --html`` against real runs: the same samples, tokens, targets and images, for every family."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.support import image, picture, talk, text, write_jsonl
from tests.data.text.chat_support import character_tokenizer
from tests.end_to_end.engines.jobs.users import write_rows
from tests.end_to_end.models.test_vlm_run import config as vlm_config
from tests.report.test_page import Page
from tests.text_run import KeepBatches, text_config, words
from tests.tiny import tiny_config
from tools.inspect_data import main
from unigen_ds.config.overrides import plain_values
from unigen_ds.config.registry import FILTERS
from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.batches.display import ShownImage, ShownToken, display_samples
from unigen_ds.data.datasets.filters import RecordFilter
from unigen_ds.examples.digits.dataset import write_digits
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines, sample_digest


@dataclass(frozen=True)
class Shown:
    """The page of a config, taken apart."""

    text: str

    @property
    def page(self) -> Page:
        return Page(self.text)

    @property
    def sequences(self) -> list[str]:
        return re.split(r'<details class="sequence"', self.text)[1:]

    @property
    def ids(self) -> list[list[str]]:
        return [[html.unescape(name) for name in re.findall(r'class="which"><code>(.*?)</code>', one)]
                for one in self.sequences]  # fmt: skip

    def tokens(self, css: str = "") -> int:
        """Text tokens that are shown with that class."""
        classes = re.findall(r"<i(?: class=\"([a-z ]+)\")?>", "".join(self.sequences))
        return sum(css in each.split() if css else True for each in classes)

    def images(self, role: str) -> list[str]:
        return re.findall(rf'<figure class="im {role}".*?</figure>', "".join(self.sequences), re.DOTALL)


def page_of(config: Path | str, *more: str, out: Path) -> Shown:
    assert main([str(config), "--html", str(out), *more]) == 0
    return Shown(out.read_text(encoding="utf-8"))


def digits(folder: Path) -> Path:
    """The tiny unified model, with dropout and two sources: pictures to draw, and edits."""
    config = tiny_config(folder / "run", folder / "digits", train_dataloader__batch_size=3)
    dropout = {"text_dropout": 0.2, "vit_dropout": 0.2, "vae_dropout": 0.2, "augment": [{"type": "RandomFlip"}]}
    config["processor"] = {**config["processor"], **dropout}
    for number in range(3):
        picture(folder / f"{number}.png", 8, 8, seed=number)
    edits = write_jsonl(folder / "edits.jsonl", [
        talk(image("user", f"{i % 3}.png"), text("user", "draw a"), image("assistant", f"{(i + 1) % 3}.png"))
        for i in range(8)
    ])  # fmt: skip
    files = [write_digits(folder / "digits") / "val.jsonl", edits]
    sources = [{"type": "UnifiedGenerationDataset", "data_path": str(file)} for file in files]
    packing = {"type": "BestFitPacking", "window": 24}
    config["train_dataloader"] |= {"seq_length": 96, "packing": packing, "max_sample_tokens": 48, "dataset": sources}
    return save_config(folder, config)


def save_config(folder: Path, config: Any) -> Path:
    path = folder / "config.json.py"
    values = plain_values(config)
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in values.items()), encoding="utf-8")
    return path


def vlm(folder: Path) -> Path:
    character_tokenizer().save_pretrained(folder / "tokenizer")
    for number, name in enumerate(("red", "blue", "dark")):
        picture(folder / f"{name}.png", 12 + 10 * number, 14, seed=number)
    records = [
        talk(image("user", f"{name}.png"), text("user", "?"), text("assistant", name))
        if i % 4
        else talk(text("user", "hi"), text("assistant", "yo\nyo"))
        for i in range(4)
        for name in ("red", "blue", "dark")
    ]
    write_jsonl(folder / "train.jsonl", records)
    vlm_config(folder, folder / "run")
    return folder / "run.py"


def documents(folder: Path) -> Path:
    """Short and long texts: the long ones are split."""
    text_config(folder, [{"text": words(1 + 3 * i % 40, i) + " eleven" * (i % 7 == 0)} for i in range(30)])
    return folder / "config.py"


@pytest.mark.parametrize("family", [digits, vlm, documents])
def test_the_page_shows_the_first_batches_of_a_real_run(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = family(tmp_path)
    runner = Runner.from_cfg(load_config(config, {"custom_hooks": [{"type": "KeepBatches"}]}), max_updates=4)
    runner.train()
    batches = next(hook for hook in runner.hooks if isinstance(hook, KeepBatches)).batches
    (folder,) = {path.parent for path in tmp_path.rglob("ledger.jsonl")}
    lines = [*read_lines(folder / "ledger.jsonl")]
    number = lines[-1]["sequences"][1]
    html = page_of(config, "--num", str(number), out=tmp_path / "page.html")
    assert len(html.ids) == number
    for line in lines:
        first, stop = line["sequences"]
        assert sample_digest(name for row in html.ids[first:stop] for name in row) == line["digest"]
    assert [name for row in html.ids for name in row] == [name for one in batches for name in one.sample_ids]
    assert html.tokens() == sum(len(one.text_ids) + predicted_elsewhere(one) for one in batches)
    assert html.tokens("l") == sum(len(one.text_target_ids) for one in batches) > 0
    sizes = [len(image) for one in batches for image in latents(one, target=True)]
    assert [int(re.search(r"(\d+) tokens?</figcaption>", one)[1]) for one in html.images("target")] == sizes  # type: ignore[index]
    assert len(html.images("edited")) == sum(len(latents(one, target=False)) for one in batches)
    assert len(html.images("condition")) == sum(len(one.vit_lengths) for one in batches)
    facts = "".join(re.findall("<summary>.*?</summary>", "".join(html.sequences)))
    for term, numbers in (("text", [len(one.text_target_ids) for one in batches]), ("image", map(sum, [sizes]))):
        assert sum(map(int, re.findall(rf"(\d+) {term} targets", facts))) == sum(numbers)
    assert f"Sequence {number - 1}" in html.text


def predicted_elsewhere(batch: PackedBatch) -> int:
    """Targets that are not the next token of their sample: they are shown once more."""
    ids = dict(zip(batch.text_index.tolist(), batch.text_ids.tolist(), strict=True))
    documents = batch.document_ids.tolist()
    return sum(
        ids.get(at + 1) != target or documents[at + 1] != documents[at]
        for at, target in zip(batch.text_target_index.tolist(), batch.text_target_ids.tolist(), strict=True)
    )


def latents(batch: PackedBatch, *, target: bool) -> list[list[float]]:
    """Time steps of each image of the autoencoder that is a target, or is not."""
    times, first = [], 0
    for rows, columns in batch.latent_shapes:
        times.append(batch.timesteps[first : first + rows * columns].tolist())
        first += rows * columns
    return [one for one in times if np.isfinite(one).all() == target]


# ---- what is left out ---------------------------------------------------------------------------------------------


def rows_of(html: Shown, part: str, number: int = 0) -> list[list[str]]:
    return html.page.tables[part][number][1:]


EMPTY = "an empty text (a caption, a question or an answer)"


def test_what_is_left_out_is_counted_with_examples(tmp_path: Path) -> None:
    records = [{"text": words(3, i)} for i in range(20)]
    records[2] = {"text": "one eleven twelve"}
    records[4] = {"text": " "}
    records[5] = {"text": "three <b>four</b>"}
    records[6] = talk(text("user", "one"), text("assistant", words(30)))
    records[7] = {"text": words(60)}
    records[8] = {"text": "one two <|im_end|>"}
    text_config(tmp_path, records)
    limits = "[{'type':'KeepsPlain'}]"
    more = [f"train_dataloader.dataset.filters={limits}", "train_dataloader.dataset.num_used_data=18"]
    html = page_of(tmp_path / "config.py", "--cfg-options", *more, out=tmp_path / "page.html")
    left_out = {row[1]: (row[2], row[4]) for row in rows_of(html, "left-out")}
    assert left_out["after the first num_used_data"][0] == "2"
    assert left_out["removed by KeepsPlain"][0] == "1"
    assert "train:5" in left_out["removed by KeepsPlain"][1]
    assert left_out["longer than seq_length 16: left out"][0] == "1"
    assert "train:6" in left_out["longer than seq_length 16: left out"][1]
    rest = {row[1]: (row[2], row[4]) for row in rows_of(html, "left-out", 1)}
    assert rest["longer than seq_length 16: split into pieces"][0] == "1"
    assert rest[EMPTY][0] == "1" and "train:4" in rest[EMPTY][1]
    assert "train:2" in rest["words that the tokenizer does not have (<unk>)"][1]


@FILTERS.register_module()
class KeepsPlain(RecordFilter):
    def keeps(self, record: Any) -> bool:
        return "<b>" not in "".join(record.texts)


def test_a_sample_that_cannot_be_read_is_shown_as_the_padding_it_is(tmp_path: Path) -> None:
    picture(tmp_path / "one.png", 8, 8)
    (tmp_path / "broken.png").write_bytes((tmp_path / "one.png").read_bytes()[:60])
    names = ["one.png", "broken.png", "gone.png"]
    data = write_jsonl(tmp_path / "own.jsonl", [{"text_prompt": "draw a two", "image_path": name} for name in names])
    settings = tiny_config(tmp_path / "run", tmp_path, train_dataloader__batch_size=1)
    settings["train_dataloader"]["dataset"] = {"type": "UnifiedGenerationDataset", "data_path": str(data)}
    html = page_of(save_config(tmp_path, settings), "--num", "1", out=tmp_path / "page.html")
    assert len(re.findall('class="skipped"', html.text)) == 2 and "tokens of padding: image " in html.text
    left_out = {row[1]: row for row in rows_of(html, "left-out")}
    row = left_out["an image that cannot be read: padding in their position"]
    assert row[2] == "1" and "own:2" in row[4]


# ---- the page -----------------------------------------------------------------------------------------------------


def test_everything_of_the_data_is_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    wild = '</i><script>alert(1)</script>"&\x00\ud7ff'
    records = [talk(text("user", wild), text("assistant", "one")), {"text": wild}] * 3
    text_config(tmp_path, records)
    tokenizer = tmp_path / "tokenizer"
    character_tokenizer().save_pretrained(tokenizer)
    more = [f"tokenizer={{'type':'PretrainedTokenizer','path':'{tokenizer}'}}", "model.llm.vocab_size=600",
            "train_dataloader.seq_length=64"]  # fmt: skip
    html = page_of(tmp_path / "config.py", "--cfg-options", *more, out=tmp_path / "page.html")
    assert "<script>alert" not in html.text and html.text.count("</script>") == len(html.page.classes("script"))
    assert len(html.page.loads_nothing()) == 5


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--num", "3"], "give --html OUT, too"),
        (["--html", "page.html", "--ledger", "ledger.jsonl"], "ask one after the other"),
        (["--html", "page.html", "--num", "3", "--sequences", "0:2"], "give one of them"),
        (["--html", "page.html", "--sequences", "0:2000"], "at most 64"),
    ],
)
def test_wrong_use_is_refused_before_the_data_is_read(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    text_config(tmp_path, [{"text": "one"}])
    (tmp_path / "train.jsonl").unlink()
    assert main(["config.py", *arguments]) == 2
    assert problem in capsys.readouterr().err and not (tmp_path / "page.html").exists()


def test_a_family_without_texts_and_images_has_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.txt")
    path = f"train_dataloader.dataset.path={tmp_path / 'rows.txt'}"
    html = page_of("tests/plugin/config.py", "--cfg-options", path, out=tmp_path / "page.html")
    assert len(html.ids) == 8 and all(html.ids) and "label targets" in html.text


# ---- a batch, taken apart -----------------------------------------------------------------------------------------


def test_pixels_are_those_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = Runner.from_cfg(load_config(vlm(tmp_path), {"custom_hooks": [{"type": "KeepBatches"}]}), max_updates=2)
    runner.train()
    batches = next(hook for hook in runner.hooks if isinstance(hook, KeepBatches)).batches
    parts = [part for one in batches for sample in display_samples(one, runner.processor) for part in sample.parts]
    images = [part for part in parts if isinstance(part, ShownImage)]
    patches = torch.cat([one.vit_patches for one in batches])
    assert len(images) == sum(len(one.vit_lengths) for one in batches) and {one.size for one in images} == {(16, 16)}
    pixels = np.stack([one.pixels for one in images if one.pixels is not None])
    first = pixels.reshape(-1, 4, 4, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 48)
    assert np.abs(first / 255 - patches.numpy()).max() < 0.5 / 255 + 1e-6
    tokens = [part for part in parts if isinstance(part, ShownToken)]
    whole = "".join(token.text for token in tokens)
    assert "<|im_start|>user" in whole and "<|global_image|>" in whole and "yo\nyo" in whole
    learned = "".join(token.text for token in tokens if token.learned)
    assert learned and not re.sub(r"(red|blue|dark|yo\nyo)<\|im_end\|>\n", "", learned), "the answers alone"


def test_a_character_of_several_tokens_is_shown_once() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from unigen_ds.data.text.tokenizers import _Tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=["<a>", "<b>"])
    tokenizer = _Tokenizer(fast, ["<a>", "<b>", "<a>", "<b>"])
    text = "a é 😀 �x"
    ids = tokenizer.encode(text)
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == len(ids) == len(text.encode()) and "".join(pieces) == text
    assert pieces[2:4] == ["", "é"]
    assert tokenizer.pieces([ids[2], tokenizer.bos_id]) == ["", "�<a>"], "bytes that are no character"
