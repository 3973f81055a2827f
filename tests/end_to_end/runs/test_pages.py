"""Every command of docs/finetune_bagel.md and docs/finetune_vlm.md, with tiny weights where the page downloads them.

Added by the test alone: small sizes, ``cpu`` for ``cuda``, and one process for each recipe, of ``bagel_7b_fsdp`` two.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import picture
from tests.data.text.chat_support import write_nanovlm
from tests.end_to_end.engines.jobs.users import write_parts
from tests.support.golden_files import BAGEL, NANOVLM
from tests.support.processes import ROOT, ranks
from unigen_ds.config.overrides import parse_override
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.families.bagel.published import FILES
from unigen_ds.runner.settings.tree import Settings, load_config
from unigen_ds.system.journals import read_lines

TEMPLATE = json.loads((NANOVLM / "config.json").read_text(encoding="utf-8"))["lm_chat_template"]
LOADER = (
    "train_dataloader.num_workers=0",
    "train_dataloader.dataset.index_workers=0",
    "default_hooks.logger.interval=1",
)
OF_BAGEL = (
    *LOADER, "train_dataloader.seq_length=200", "processor.vae_transform.max_size=32",
    "processor.vae_transform.min_size=16", "processor.vit_transform.max_size=28", "processor.vit_transform.min_size=14",
)  # fmt: skip
OF_NANOVLM = (
    *LOADER, "model.pretrained=models/nanoVLM-230M-8k", "tokenizer.path=models/nanoVLM-230M-8k",
    "model.llm=None", "model.vit=None",
    "model.pixel_shuffle_factor=None", "processor.max_image_size=64", "train_dataloader.seq_length=128",
)  # fmt: skip
DRAWN = ("--num-timesteps", "3", "--size", "16", "16")
WRITTEN = ("--max-length", "3")


@dataclass
class Page:
    """A page's commands, in the folder where they are run."""

    name: str
    small: tuple[str, ...]
    """Options of a config."""
    folder: Path
    updates: Counter[str] = field(default_factory=Counter)
    """Of each recipe, so far."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Commands of each kind that were run."""

    def blocks(self, language: str) -> Iterator[str]:
        text = (ROOT / "docs" / self.name).read_text(encoding="utf-8")
        yield from (body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if kind == language)

    def write_records(self, *names: str) -> None:
        """The records that the page shows, as files of its names, and their pictures."""
        rest, records = "".join(self.blocks("json")).strip(), []
        while rest:
            record, end = json.JSONDecoder().raw_decode(rest)
            records.append(json.dumps(record))
            rest = rest[end:].strip()
        for name in names:
            (self.folder / name).write_text("\n".join(records * 8), encoding="utf-8")
        for seed, name in enumerate(sorted(set(re.findall(r"\w+\.jpg", "".join(records))))):
            picture(self.folder / name, 32, 16, seed=seed)

    def run(self) -> None:
        for line in "".join(self.blocks("")).splitlines():
            kind, *words = shlex.split(line)
            self.kinds[kind] += 1
            getattr(self, "_" + kind.removeprefix("--").replace("-", "_"))(words)

    def _pip(self, words: list[str]) -> None:
        names = next(re.findall(r"\[(.*)\]", word)[0] for word in words if "[" in word)
        extras = (ROOT / "setup.py").read_text(encoding="utf-8").partition("extras_require")[2]
        assert all(f'"{extra}": ' in extras for extra in names.split(","))

    def _hf(self, words: list[str]) -> None:
        repository, folder = words[1], self.folder / words[words.index("--local-dir") + 1]
        folder.mkdir(parents=True)
        DOWNLOADED[repository](folder)

    def _cfg_options(self, words: list[str]) -> None:
        Settings.from_config(load_config("bagel_7b_fsdp", dict(map(parse_override, [*words, "backend.num_shard=1"]))))

    def _python(self, words: list[str]) -> None:
        tool = Path(words[0]).stem
        self.kinds[tool] += 1
        words = ["cpu" if word == "cuda" else word for word in words[1:]]
        if tool == "generate":
            words += WRITTEN if "--understand" in words else DRAWN if "--image" not in words else DRAWN[:2]
        if tool == "evaluate":
            words += ["--generation", "max_new_tokens=3"]
        if tool == "inspect_data":
            words += self.small
        assert importlib.import_module(f"tools.{tool}").main(words) == 0, words

    def _torchrun(self, words: list[str]) -> None:
        self._train_run(int(words[1]), words[3:])

    def _deepspeed(self, words: list[str]) -> None:
        self._train_run(int(words[1]), words[3:])

    def _train_run(self, processes: int, words: list[str]) -> None:
        """One update more of the recipe, with its own engine."""
        recipe = words[0]
        self.updates[recipe] += 1
        sharded = recipe == "bagel_7b_fsdp" and processes == 8
        size, small = 1 + sharded, [*words, *self.small, *(["backend.num_shard=2"] * sharded)]
        until = ["--max-updates", str(self.updates[recipe])]
        command = [sys.executable, str(ROOT / "tools" / "train.py"), small[0], *until, *small[1:]]
        results = ranks(command, world_size=size, cwd=self.folder)
        assert [one.status for one in results] == [0] * size, results[0].ending

    def lines(self, recipe: str) -> list[Mapping[str, Any]]:
        rows = read_lines(self.folder / "work_dirs" / recipe / "metrics.jsonl")
        return [line for line in rows if "loss" in line]

    def log(self, recipe: str) -> str:
        return (self.folder / "work_dirs" / recipe / "train.log").read_text(encoding="utf-8")


def write_bagel(folder: Path) -> None:
    for name in FILES:
        shutil.copyfile(BAGEL / name, folder / name)
    words("ByteDance-Seed/BAGEL-7B-MoT").save_pretrained(str(folder))


def words(_: str) -> WordTokenizer:
    return WordTokenizer(words=("a", "red", "fox", "in", "the", "snow", "make", "it", "night", "what", "is", "this"))


def write_part(part: str, folder: Path) -> None:
    write_parts(folder / "parts", side=28, patch=14, channels=3)
    for file in (folder / "parts" / part).iterdir():
        file.rename(folder / file.name)
    shutil.rmtree(folder / "parts")
    if part == "llm":
        words(part).save_pretrained(str(folder))


DOWNLOADED = {
    "ByteDance-Seed/BAGEL-7B-MoT": write_bagel,
    "Qwen/Qwen2.5-0.5B-Instruct": lambda folder: write_part("llm", folder),
    "HuggingFaceM4/siglip-so400m-14-980-flash-attn2-navit": lambda folder: write_part("vit", folder),
    "black-forest-labs/FLUX.1-schnell": lambda folder: shutil.copyfile(
        BAGEL / "ae.safetensors", folder / "ae.safetensors"
    ),
    "lusxvr/nanoVLM-230M-8k": lambda folder: write_nanovlm(folder, "{% if messages %}a{% endif %}" + TEMPLATE),
}
"""What stands for a repository of the hub."""


@pytest.mark.slow
def test_every_command_of_the_page_about_bagel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe with its own engine, precision, curve, packing, average and dropouts; a resume on other processes."""
    monkeypatch.chdir(tmp_path)
    page = Page("finetune_bagel.md", OF_BAGEL, tmp_path)
    page.write_records("my.jsonl")
    page.run()
    assert page.kinds >= Counter(hf=4, torchrun=5, deepspeed=1, generate=4, inspect_data=1, export=2, pip=1)
    updates = {"bagel_7b_fsdp": 3, "bagel_7b_zero3": 1, "bagel_lora": 1, "bagel_from_parts": 1}
    assert {recipe: [line["update"] for line in page.lines(recipe)] for recipe in updates} == {
        recipe: [*range(1, number + 1)] for recipe, number in updates.items()
    }
    for recipe, number in updates.items():
        assert all(line["loss/text"] > 0 and line["loss/image"] > 0 for line in page.lines(recipe))
        assert "First update: losses image" in (log := page.log(recipe))
        from_parts = recipe == "bagel_from_parts"
        assert ("the loss image is" in log) == (not from_parts), "random weights, whose first loss is near chance"
        assert next((tmp_path / "work_dirs" / recipe).glob(f"iter_{number}.pth/ema" if number == 1 else "iter_*/ema"))
    assert "HYBRID_SHARD (2 shard(s))" in page.log("bagel_7b_fsdp") and "ZeRO-3" in page.log("bagel_7b_zero3")
    assert {path.name for path in (tmp_path / "after").iterdir()} >= {"00000.png", "grid-00000.png"}
    for out in ("exported", "merged"):
        assert {*FILES, "tokenizer.json"} <= {path.name for path in (tmp_path / out).iterdir()}
    page._python(["tools/generate.py", "merged", "--prompt", "a red fox", "--out", "again"])


@pytest.mark.slow
def test_every_command_of_the_page_about_vision_language_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Page("finetune_vlm.md", OF_NANOVLM, tmp_path)
    page.write_records("my.jsonl", "held_out.jsonl")
    page.run()
    assert page.kinds >= Counter(hf=1, torchrun=2, generate=2, inspect_data=1, evaluate=1, export=1)
    assert [line["update"] for line in page.lines("nanovlm_230m")] == [1, 2]
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["lm_chat_template"] == TEMPLATE
