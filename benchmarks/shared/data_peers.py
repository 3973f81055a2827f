"""What the loading of data is compared with in ``benchmarks/data.py``, and the files that all sides read.

Each function ``..._sides`` makes its files in a folder and returns the sides by name, ours as ``ours``; a side returns
a number that shows that it did the same work.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from PIL import Image
from shared.record import ROOT
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import UpdateLoader
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.cache.array_cache import load_or_fill
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.images.image_files import ImageTransform, patchify
from unigen_ds.data.images.tiles import GLOBAL_TOKEN, IMAGE_TOKEN, split_tiles, tile_token
from unigen_ds.data.index.index import Plan, plan_all
from unigen_ds.data.order.order import GlobalOrder
from unigen_ds.data.order.packing import BestFitPacking
from unigen_ds.data.records.records import Layout
from unigen_ds.data.sources.text_files import JsonSource
from unigen_ds.data.text.tokenizers import ChatTokenizer, PretrainedTokenizer
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.nanovlm.processor import VLMProcessor
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
    """As nanoVLM's packer, whose default number of spare sequences is 5; its limit of images is not reached here."""
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


# --- a vision-language model: conversations about pictures -> packed batches ------------------------------------------

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TILE, LARGEST, SHUFFLE = 256, 512, 4
IGNORED = -100


def write_talks(folder: Path, number: int) -> Path:
    """Conversations of three questions and answers about a photograph each, of 40 in four sizes."""
    draw, words = random.Random(0), passages(6 * number, 8, 60, seed=1)
    folder.mkdir()
    for i in range(40):
        size = draw.choice([(512, 384), (384, 512), (640, 480), (300, 400)])
        photograph(draw).resize(size).save(folder / f"{i}.jpg", quality=90)

    def record(i: int) -> dict[str, Any]:
        turns = [{"role": "user", "type": "image", "image_path": f"{i % 40}.jpg"}]
        for k in range(6):
            role = "assistant" if k % 2 else "user"
            turns.append({"role": role, "type": "text", "content": words[6 * i + k]})
        return {"conversations": turns}

    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(record(i)) + "\n" for i in range(number)))
    return path


class NanoVLM:
    """The data path of huggingface/nanoVLM (``data/``: processors, datasets, advanced_datasets, collators), by hand.

    Pictures: PIL's bicubic resize to multiples of the tile, floats in [0, 1], the whole in the size of one tile before
    its tiles; PIL and torch do what torchvision does there. Texts: the chat template tokenized for the whole
    conversation, and once more for each message, whose lengths are the mask. Packing: buffers of ``buffer_sequences``
    sequences, each sample with a token of padding after it, joined token by token as published, or by ``torch.cat``
    (``join``). Its thread and its own reader of records are left out: the records are in memory.
    """

    def __init__(
        self, path: Path, tokenizer: Any, *, tokens_per_tile: int, seq_length: int, buffer_sequences: int, join: bool
    ) -> None:
        self.folder, self.tokenizer, self.tokens_per_tile = path.parent, tokenizer, tokens_per_tile
        self.seq_length, self.buffer_length, self.join = seq_length, seq_length * buffer_sequences, join
        self.records = [json.loads(line)["conversations"] for line in path.read_text().splitlines()]
        beginning = self._tokens([{"role": "assistant", "content": "xzyvd"}], text=True).partition("xzyvd")[0]
        self.prefix = len(tokenizer.encode(beginning))

    def _tokens(self, messages: list[dict[str, str]], *, text: bool = False) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=not text, return_dict=False, add_special_tokens=False
        )

    def tiles(self, path: Path) -> tuple[Tensor, tuple[int, int]]:
        """[tiles, 3, TILE, TILE], and rows and columns."""
        image = Image.open(path)
        if image.mode != "RGB":
            image = image.convert("RGB")
        long, short = max(image.size), min(image.size)
        target = min(LARGEST, math.ceil(long / TILE) * TILE)
        other = max(TILE, math.ceil(short * (target / long) / TILE) * TILE)
        width, height = (target, other) if image.width >= image.height else (other, target)
        pixels = np.array(image.resize((width, height), Image.Resampling.BICUBIC), copy=True)
        whole = torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div(255)[None]
        rows, columns = height // TILE, width // TILE
        parts = whole.view(3, rows, TILE, columns, TILE).permute(1, 3, 0, 2, 4).reshape(-1, 3, TILE, TILE)
        if rows * columns > 1:
            small = F.interpolate(whole, size=(TILE, TILE), mode="bilinear", antialias=True, align_corners=False)
            parts = torch.cat([small, parts])
        return parts, (rows, columns)

    def sample(self, turns: list[dict[str, str]]) -> dict[str, Any]:
        images, (rows, columns) = self.tiles(self.folder / turns[0]["image_path"])
        heads = [GLOBAL_TOKEN]
        if rows * columns > 1:
            heads += [tile_token(row, column) for row in range(rows) for column in range(columns)]
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns[1:]]
        for message in messages:
            message["content"] = message["content"].replace(IMAGE_TOKEN, "")
        prefix = "".join(head + IMAGE_TOKEN * self.tokens_per_tile for head in heads)
        messages[0]["content"] = prefix + messages[0]["content"]
        ids = torch.tensor(self._tokens(messages))
        mask, start = torch.zeros(len(ids), dtype=torch.bool), 0
        for message in messages:
            length = len(self._tokens([message]))
            if message["role"] == "assistant":
                mask[start + self.prefix : start + length] = True
            start += length
        labels = ids.masked_fill(~mask, IGNORED).roll(-1)
        labels[-1] = IGNORED
        return {"ids": ids, "labels": labels, "attended": torch.ones_like(ids), "images": [images]}

    def batches(self) -> Iterator[dict[str, Any]]:
        """One sequence each, padded on the left."""
        buffer, length = list[dict[str, Any]](), 0
        for turns in self.records:
            sample = self.sample(turns)
            if len(sample["ids"]) >= self.seq_length:
                continue
            for key, value in (("ids", 0), ("labels", IGNORED), ("attended", 0)):
                sample[key] = torch.cat([sample[key], torch.tensor([value])])
            buffer.append(sample)
            length += len(sample["ids"])
            if length >= self.buffer_length:
                yield from self._packed(buffer)
                buffer, length = [], 0
        yield from self._packed(buffer)

    def _packed(self, buffer: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for group in emptiest_first([len(sample["ids"]) for sample in buffer], self.seq_length):
            batch: dict[str, Any] = {"images": [image for i in group for image in buffer[i]["images"]]}
            for key, value in (("ids", 0), ("labels", IGNORED), ("attended", 0)):
                parts = [buffer[i][key] for i in group]
                row = torch.cat(parts) if self.join else torch.stack([token for part in parts for token in part])
                batch[key] = F.pad(row, (self.seq_length - len(row), 0), value=value)[None]
            yield batch


def vlm_sides(folder: Path, number: int, *, seq_length: int, buffer_sequences: int) -> Sides:
    """Tokens of packed batches, padding not counted; ours of about all conversations, nanoVLM's of each."""
    path = write_talks(folder / "talks", number)
    if not (folder / "tokenizer").exists():
        _write_tokenizer(folder / "tokenizer")
    tokenizer = ChatTokenizer(path=str(folder / "tokenizer"), chat_template=TEMPLATE)
    processor = VLMProcessor(
        tokenizer, tile_size=TILE, vit_patch_size=PATCH, pixel_shuffle_factor=SHUFFLE, max_image_size=LARGEST
    )
    data = UnifiedGenerationDataset(path, processor)
    tokens = int(data.index.counts.tokens.sum())
    packer, order = BestFitPacking(128), GlobalOrder([number], seed=0)
    num_sequences = tokens // seq_length
    stream = SequenceStream([data], order, packer=packer, seq_length=seq_length, sequences_per_epoch=num_sequences)

    def peer(join: bool) -> NanoVLM:
        sizes = {"tokens_per_tile": processor.tokens_per_tile, "buffer_sequences": buffer_sequences}
        return NanoVLM(path, tokenizer.chat, seq_length=seq_length, join=join, **sizes)

    def ours() -> int:
        loader = UpdateLoader(stream, processor=processor, geometry=Geometry(1, 1, 1), num_workers=0)
        count = sum(micro.batch.num_tokens for [micro] in islice(loader, num_sequences))
        loader.close()
        return count

    def theirs(nanovlm: NanoVLM) -> int:
        return sum(int(batch["attended"].sum()) for batch in nanovlm.batches())

    published, joined = peer(join=False), peer(join=True)
    pictures = [path.parent / f"{i}.jpg" for i in range(40)]
    for picture in pictures:
        tiles = split_tiles(processor.tiling.pixels(Image.open(picture)), TILE)
        assert torch.equal(torch.stack(tiles), published.tiles(picture)[0]), f"other pixels of {picture}"
    counts = [int(batch["labels"].ne(IGNORED).sum()) for batch in joined.batches()]
    assert theirs(joined) == tokens, (theirs(joined), tokens)
    assert sum(counts) == int(data.index.counts.text_targets.sum()), "other targets"
    return {"ours": ours, "nanoVLM": lambda: theirs(published), "nanoVLM with torch.cat": lambda: theirs(joined)}
