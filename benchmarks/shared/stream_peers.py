"""What streaming is compared with in ``benchmarks/data.py``: the same shards as a mapped source, and as an
``IterableDataset`` of the package ``datasets``; all sides read a pass of tokenized rows, in batches, without workers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from shared.data_peers import Sides, image_processor, passages
from torch.utils.data import DataLoader

from unigen_ds.core.progress import Geometry
from unigen_ds.data.batches.loader import UpdateLoader
from unigen_ds.data.batches.stream import SequenceStream
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.datasets.overflow import Overflow
from unigen_ds.data.datasets.streamed_units import fit_source
from unigen_ds.data.order.order import GlobalOrder
from unigen_ds.families.bagel.processor import UnifiedProcessor

SHARDS, BATCH, SEQ_LENGTH, BUFFER = 16, 8, 4096, 1000
"""``BUFFER``: rows that ``datasets`` shuffles together; ours shuffles those of 4 shards."""


def write_shards(folder: Path, number: int) -> list[Path]:
    """Parquet files of texts of 50 to 150 words."""
    folder.mkdir()
    paths = [folder / f"part-{shard:03}.parquet" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        parquet.write_table(pa.table({"text": passages(number // SHARDS, 50, 150, seed=3 + shard)}), path)
    return paths


def stream_sides(folder: Path, number: int, *, cold: bool) -> Sides:
    """``cold``: nothing is known of the data, as in the first pass of a first run; otherwise its index is there."""
    processor, shards = image_processor(folder), folder / "shards"
    paths = sorted(shards.glob("*.parquet")) or write_shards(shards, number)

    def ours(streaming: bool) -> int:
        cache = folder / f"cache-{streaming}"
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        data = UnifiedGenerationDataset(
            str(shards / "*.parquet"), processor, name="texts", cache_dir=cache, streaming=streaming
        )
        return _read(data, processor, number)

    sides: Sides = {"ours": lambda: ours(True), "mapped": lambda: ours(False)}
    theirs = _iterable([str(path) for path in paths], processor, number)
    return sides if theirs is None else {**sides, "datasets": theirs}


def _read(data: UnifiedGenerationDataset, processor: UnifiedProcessor, number: int) -> int:
    """Rows of a pass."""
    order = GlobalOrder([len(fit_source(data, Overflow(SEQ_LENGTH)))], [1.0], seed=0)
    stream = SequenceStream([data], order, packer=None, seq_length=SEQ_LENGTH)
    loading = UpdateLoader(stream, processor=processor, geometry=Geometry(BATCH, 1, 1), num_workers=0)
    rows = sum(micro.batch.num_samples for [micro] in islice(loading, number // BATCH))
    loading.close()
    return rows


def _iterable(paths: list[str], processor: Any, number: int) -> Callable[[], int] | None:
    """``load_dataset(..., streaming=True)``, shuffled by its buffer, tokenized row by row, in a ``DataLoader``."""
    try:
        import datasets
    except ImportError:
        print("not installed: datasets (pip install -e '.[bench]' -c constraints.txt)")
        return None
    encode = processor.tokenizer._tokenizer.encode

    def run() -> int:
        dataset = datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)
        rows = dataset.shuffle(seed=0, buffer_size=BUFFER).map(lambda row: {"ids": encode(row["text"])})
        loading: Any = DataLoader(rows, batch_size=BATCH, collate_fn=list)
        return sum(map(len, islice(loading, number // BATCH)))

    return run
