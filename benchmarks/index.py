"""Speed of the index and the loader: short texts per second, and images per second, compared with common alternatives.

In: nothing. Out: a table, and ``results/index_<date>.json``. Texts: planning a JSONL file of documents of 8 to 30 words
(``unigen_ds/data/planning.py``: parse, tokenize, count, digest of each record), compared with ``datasets.map`` of the
package ``datasets`` (``batched=True``; its own JSON reader is not measured), a plain loop over the same file that
parses each line and calls the same tokenizer on 1,000 texts at a time, one call for each text, and the upper limit: the
tokenizer alone, without parsing, one thread per core. Images: ``UpdateLoader`` without workers, compared with torch's
``DataLoader`` with a data set that opens, converts, resizes and normalises the same files and divides them into the
patches of a vision tower. All sides run in turns in one process; ratios are paired.
The tokenizer is a byte-level BPE trained on the documentation of this project.

    pip install -e '.[bench]' -c constraints.txt
    python benchmarks/index.py [--texts 40000] [--pictures 400] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.record import ROOT, interval, write_result

from unigen_ds.core.cores import num_cores
from unigen_ds.core.progress import Geometry
from unigen_ds.data.array_cache import InMemory
from unigen_ds.data.datasets import UnifiedGenerationDataset
from unigen_ds.data.loader import UpdateLoader
from unigen_ds.data.order import GlobalOrder
from unigen_ds.data.planning import plan_all
from unigen_ds.data.records import Layout
from unigen_ds.data.sources.json_lines import JsonSource
from unigen_ds.data.stream import SequenceStream
from unigen_ds.data.tokenizers import PretrainedTokenizer
from unigen_ds.data.transforms import ImageTransform, patchify
from unigen_ds.families.bagel.processor import UnifiedProcessor

SIDE, PATCH, BATCH = 256, 16, 8


def write_tokenizer(folder: Path) -> PretrainedTokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train(sorted(map(str, (ROOT / "docs").glob("*.md"))), trainers.BpeTrainer(initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(str(folder))
    return PretrainedTokenizer(path=str(folder))


def text_sides(folder: Path, number: int) -> dict[str, Callable[[], Any]]:
    tokenizer = write_tokenizer(folder / "tokenizer")
    # without spelled special tokens, which ours encodes as text and the peers as tokens
    words = [word for word in (ROOT / "docs" / "data.md").read_text().split() if "<" not in word]
    draw = random.Random(1)
    texts = [" ".join(draw.choices(words, k=draw.randint(8, 30))) for _ in range(number)]
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    processor, plain = UnifiedProcessor(tokenizer), tokenizer._tokenizer

    def read() -> list[str]:
        with path.open() as lines:
            return [json.loads(line)["text"] for line in lines]

    def batches() -> int:
        found = read()
        return sum(len(ids) for i in range(0, number, 1000) for ids in plain(found[i : i + 1000])["input_ids"])

    def alone() -> int:
        chunks = [texts[i : i + 256] for i in range(0, number, 256)]
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with ThreadPoolExecutor(num_cores()) as threads:
            found = sum(threads.map(lambda chunk: sum(map(len, tokenizer.encode_texts_unprotected(chunk))), chunks))
        del os.environ["TOKENIZERS_PARALLELISM"]
        return found

    return {
        "ours": lambda: planned_tokens(JsonSource(path), processor, Layout(folder)) - 2 * number,
        "batches of 1,000": batches,
        "one at a time": lambda: sum(len(plain(text)["input_ids"]) for text in read()),
        "the tokenizer alone": alone,
        **mapped(path, folder, plain),
    }


def planned_tokens(source: JsonSource, processor: UnifiedProcessor, layout: Layout) -> int:
    new = InMemory()
    plan_all(source, processor, layout, 0, new)
    return int(new.read("tokens").sum())


def mapped(path: Path, folder: Path, plain: Any) -> dict[str, Callable[[], Any]]:
    """``datasets.map``, if the package is installed."""
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


class Pictures(Dataset[torch.Tensor]):
    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __getitem__(self, index: int) -> torch.Tensor:
        image = Image.open(self._paths[index]).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        return patchify(torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5), PATCH)

    def __len__(self) -> int:
        return len(self._paths)


def write_pictures(folder: Path, number: int) -> tuple[list[Path], Path]:
    """Pictures of 512 px, and a file of conversations about them."""
    draw, paths = np.random.default_rng(0), []
    for i in range(number):
        small = Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        paths.append(folder / f"{i}.jpg")
        small.resize((512, 512), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    talk = [[{"role": "user", "type": "image", "image_path": path.name},
             {"role": "assistant", "type": "text", "content": "a picture"}] for path in paths]  # fmt: skip
    path = folder / "pictures.jsonl"
    path.write_text("".join(json.dumps({"conversations": turns}) + "\n" for turns in talk))
    return paths, path


def picture_sides(folder: Path, number: int, tokenizer: PretrainedTokenizer) -> dict[str, Callable[[], Any]]:
    paths, path = write_pictures(folder, number)
    processor = UnifiedProcessor(tokenizer, vit_transform=ImageTransform(SIDE, SIDE, PATCH), vit_patch_size=PATCH)
    data = UnifiedGenerationDataset(path, processor)
    stream = SequenceStream([data], GlobalOrder([number], seed=0), packer=None, seq_length=4096)

    def ours() -> int:
        # an update is one batch: the peer does not keep its batches either
        loader = UpdateLoader(stream, processor=processor, geometry=Geometry(BATCH, 1, 1))
        seen = sum(len(micro.batch.vit_patches) for [micro] in islice(loader, number // BATCH))
        loader.close()
        return seen // (SIDE // PATCH) ** 2

    def theirs() -> int:
        return sum(len(batch) for batch in DataLoader(Pictures(paths), batch_size=BATCH, shuffle=True))

    return {"ours": ours, "torch's DataLoader": theirs}


def measure(sides: dict[str, Callable[[], Any]], number: int, rounds: int) -> dict[str, Any]:
    """Units per second of each side; ratios of ours to each peer, paired by round."""
    results = {name: side() for name, side in sides.items()}  # warm, and the same work
    assert len(set(results.values())) == 1, results
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            sides[name]()
            rates[name].append(number / (time.perf_counter() - start))
    peers = [name for name in sides if name != "ours"]
    ratios = {name: interval([a / b for a, b in zip(rates["ours"], rates[name], strict=True)]) for name in peers}
    return {"number": number, "per_second": {k: float(np.median(v)) for k, v in rates.items()}, "ours_to": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=int, default=40_000)
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {"texts": measure(text_sides(folder, arguments.texts), arguments.texts, arguments.rounds)}
        sides = picture_sides(folder, arguments.pictures, PretrainedTokenizer(path=str(folder / "tokenizer")))
        found["pictures"] = measure(sides, arguments.pictures, arguments.rounds)
    parallel = os.environ.get("TOKENIZERS_PARALLELISM", "default")
    load = {"load_before": before, "load_after": os.getloadavg()[0], "tokenizers_parallelism": parallel}
    path = write_result("index", {**found, **load})
    print(json.dumps(found, indent=1), path, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
