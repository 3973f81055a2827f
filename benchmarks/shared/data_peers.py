"""What the loading of data is compared with in ``benchmarks/data.py``, and the files that all sides read.

Each function ``..._sides`` makes its files in a folder and returns the sides by name, ours as ``ours``; a side returns
a number that shows that it did the same work.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from PIL import Image
from shared.record import ROOT
from torch.utils.data import Dataset

from unigen_ds.data.cache.array_cache import load_or_fill
from unigen_ds.data.images.image_files import ImageTransform, patchify
from unigen_ds.data.index.index import Plan, plan_all
from unigen_ds.data.records.records import Layout
from unigen_ds.data.sources.text_files import JsonSource
from unigen_ds.data.text.tokenizers import PretrainedTokenizer
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.system.machine import num_cores

SIDE, PATCH = 256, 16
"""Pixels of an image after its transform, and of a patch."""
Sides = dict[str, Callable[[], Any]]


@cache
def running_text() -> list[str]:
    """The words of real text: Python's own documentation, and the descriptions of the packages that are installed."""
    descriptions = (distribution.metadata.get_payload() for distribution in distributions())
    texts = [*topics.values(), *sorted({text for text in descriptions if isinstance(text, str)})]
    # without spelled special tokens, which ours encodes as text and the peers as tokens
    return [word for text in texts for word in text.split() if "<" not in word]


def passages(number: int, least: int, most: int, *, seed: int) -> list[str]:
    """Pieces of the running text, of ``least`` to ``most`` words."""
    words, draw = running_text(), random.Random(seed)
    texts = []
    for _ in range(number):
        length = draw.randint(least, most)
        start = draw.randrange(len(words) - length)
        texts.append(" ".join(words[start : start + length]))
    return texts


@cache
def _photographs() -> list[Image.Image]:
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def photograph(draw: random.Random) -> Image.Image:
    """A square part of one of the two photographs that scikit-learn has (640 x 427), of at least half their height."""
    whole = draw.choice(_photographs())
    side = draw.randint(whole.height // 2, whole.height)
    x, top = draw.randint(0, whole.width - side), draw.randint(0, whole.height - side)
    return whole.crop((x, top, x + side, top + side))


def image_processor(folder: Path) -> UnifiedProcessor:
    """Its tokenizer is a byte-level BPE trained on the documentation of this project."""
    if not (folder / "tokenizer").exists():
        _write_tokenizer(folder / "tokenizer")
    tokenizer = PretrainedTokenizer(path=str(folder / "tokenizer"))
    return UnifiedProcessor(tokenizer, vit_transform=ImageTransform(SIDE, SIDE, PATCH), vit_patch_size=PATCH)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train(sorted(map(str, (ROOT / "docs").rglob("*.md"))), trainers.BpeTrainer(initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(str(folder))


def text_sides(folder: Path, number: int, *, short: bool) -> Sides:
    """Tokens of a JSONL file of texts: of 5 to 15 words, as captions have, or of 100 to 300."""
    processor = image_processor(folder)
    plain = processor.tokenizer._tokenizer
    texts = passages(number, *((5, 15) if short else (100, 300)), seed=1)
    path = folder / f"{'short' if short else 'documents'}-{number}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def read() -> list[str]:
        with path.open() as lines:
            return [json.loads(line)["text"] for line in lines]

    def batches() -> int:
        texts = read()
        return sum(len(ids) for i in range(0, number, 1000) for ids in plain(texts[i : i + 1000])["input_ids"])

    def alone() -> int:
        chunks = [texts[i : i + 256] for i in range(0, number, 256)]
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        encode = plain.backend_tokenizer.encode_batch_fast

        def tokens(chunk: list[str]) -> int:
            return sum(len(one.ids) for one in encode(chunk, add_special_tokens=False))

        with ThreadPoolExecutor(num_cores()) as threads:
            total = sum(threads.map(tokens, chunks))
        del os.environ["TOKENIZERS_PARALLELISM"]
        return total

    return {
        "ours": lambda: count_planned(path, processor, Layout(folder), "tokens") - 2 * number,
        "batches of 1,000": batches,
        "the tokenizer alone": alone,
        **_map_sides(path, folder, plain),
    }


def count_planned(path: Path, processor: UnifiedProcessor, layout: Layout, column: str) -> int:
    """The sum of a column of the index."""
    plan = Plan(JsonSource(path), processor, layout)
    return int(load_or_fill(None, "", lambda new: plan_all(plan, 0, new, "error"))[column].sum())


def _map_sides(path: Path, folder: Path, plain: Any) -> Sides:
    """``datasets.map``, if the package is installed; its own reader of JSON is not measured."""
    try:
        import datasets
    except ImportError:
        print("not installed: datasets (pip install -e '.[bench]' -c constraints.txt)")
        return {}
    datasets.disable_progress_bars()
    table = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))
    lengths: list[int] = []

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        ids = plain(batch["text"])["input_ids"]
        lengths.append(sum(map(len, ids)))
        return {"input_ids": ids}

    def run() -> int:
        lengths.clear()
        table.map(tokenize, batched=True, load_from_cache_file=False, new_fingerprint=f"run{time.time_ns()}")
        return sum(lengths)

    return {"datasets.map": run}


def header_sides(folder: Path, number: int) -> Sides:
    """Images of a JSONL file of captions."""
    folder = folder / f"headers-{number}"
    folder.mkdir()
    draw, names = random.Random(0), [f"{i}.jpg" for i in range(number)]
    for i, name in enumerate(names):
        photograph(draw).save(folder / name, quality=90) if i < 100 else os.link(folder / names[i % 100], folder / name)
    path = folder / "headers.jsonl"
    path.write_text("".join(json.dumps({"image": name, "caption": "a picture"}) + "\n" for name in names))
    processor = image_processor(folder.parent)
    return {
        "ours": lambda: count_planned(path, processor, Layout(folder, "understand"), "images"),
        "a loop of Image.open": lambda: sum(Image.open(folder / name).size[0] > 0 for name in names),
    }


def write_pictures(folder: Path, number: int) -> tuple[list[Path], Path]:
    """Photographs, 100 different ones, and a file of conversations about them."""
    draw, paths = random.Random(0), [folder / f"{i}.jpg" for i in range(number)]
    for i, path in enumerate(paths):
        photograph(draw).save(path, quality=90) if i < 100 else os.link(paths[i % 100], path)
    talk = [[{"role": "user", "type": "image", "image_path": path.name},
             {"role": "assistant", "type": "text", "content": "a picture"}] for path in paths]  # fmt: skip
    path = folder / "pictures.jsonl"
    path.write_text("".join(json.dumps({"conversations": turns}) + "\n" for turns in talk))
    return paths, path


class Pictures(Dataset[torch.Tensor]):
    """For torch's ``DataLoader``: opens, converts, resizes and normalises a file and divides it into patches."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __getitem__(self, index: int) -> torch.Tensor:
        image = Image.open(self._paths[index]).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        return patchify(torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5), PATCH)

    def __len__(self) -> int:
        return len(self._paths)


def emptiest_first(lengths: Sequence[int], seq_length: int, spare: int = 5) -> list[list[int]]:
    """As nanoVLM's packer, whose default number of spare sequences is 5; none of the samples has images here."""
    number = -(-sum(lengths) // seq_length) + spare
    loads, groups = [0] * number, [list[int]() for _ in range(number)]
    for sample in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        for k in sorted(range(len(loads)), key=loads.__getitem__):
            if loads[k] + lengths[sample] <= seq_length:
                break
        else:
            k = len(loads)
            loads.append(0)
            groups.append([])
        loads[k] += lengths[sample]
        groups[k].append(sample)
    return [group for group in groups if group]
