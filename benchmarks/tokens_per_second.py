"""Useful tokens per second of a training step of our VLM, compared with the same model on nanoVLM's batches.

In: lengths and images of 2,000 long-tailed samples, and the rows of nanoVLM's own packer for them with its shipped
settings (``tests/golden/nanovlm/packing.json``: 57.6 % full), an eighth as long. Out: a table, and
``results/tokens_per_second_<date>.json``. Accepted if at least 1.6 times the tokens per second of each peer.

A step is one buffer of nanoVLM's packer, about 50 samples: forward and backward in micro-batches of eight rows, then
AdamW. All sides train on the same samples of a step, so the ratio of times is the ratio of useful (non-padding) tokens
per second. They run in turns (A B C ... C B A), each with its own copy of the same weights. Batches are made in
advance, by our own data code. The model has the proportions of nanoVLM's default: SigLIP2-base and SmolLM2-360M, 16
patches per token, an eighth of the layers, a tenth of the width and the vocabulary.

The peers run our modules over rows, as nanoVLM's code does: left padding, scaled dot-product attention over the whole
row with a mask for padding, the output head on every position of a row. Samples in the same row attend to each other.

* ``longest``: one sample per row, padded to the longest of the micro-batch.
* ``max_length``: one sample per row, padded to the maximal length, which is nanoVLM's collator without packing.
* ``packed``: the rows of its packer.
* ``packed, head on targets``: not nanoVLM's, without a limit: the output head is computed on the targets only, as ours.

Padding to the longest does not change the result: its loss must be equal to ours, which is checked on the first step.

    python benchmarks/tokens_per_second.py [--threads N] [--steps 12]

Exit status: 1 if a peer is significantly (the whole confidence interval) faster than accepted, otherwise 0.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shared.conversations import make_tokenizer, write_conversations
from shared.record import RESULTS, ROOT, interval, write_result
from shared.timing import Block, Stopwatch

from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.batches.loader import collate, load, pack_documents
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.order.order import Draw
from unigen_ds.data.order.packing import BestFitPacking
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.processor import VLMProcessor
from unigen_ds.models.layers import rotary_tables

LIMIT = 1.6
LIMITED = ("longest", "max_length", "packed")
SCALE = 8
NUM_WORDS, VOCABULARY = 4_800, 4_900
LLM = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 3}
LLM |= {"num_key_value_heads": 1, "vocab_size": VOCABULARY}
VIT = {"hidden_size": 80, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 5}
VIT |= {"image_size": 48, "patch_size": 4}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 8
"""Rows of a micro-batch, of every side."""


@dataclass(frozen=True)
class Public:
    """Stored results of nanoVLM's packer: sample lengths, and the rows of each buffer."""

    seq_length: int
    max_images: int
    samples: list[tuple[int, int]]
    buffers: list[list[list[int]]]
    utilisation: float

    @classmethod
    def read(cls, name: str) -> Public:
        golden = json.loads((ROOT / "tests" / "golden" / "nanovlm" / "packing.json").read_text(encoding="utf-8"))
        settings, record = golden["settings"], golden["lists"][name]
        return cls(
            seq_length=settings["seq_length"] // SCALE,
            max_images=settings["max_images_per_knapsack"],
            samples=[(tokens // SCALE, images) for tokens, images in record["samples"]],
            buffers=record["stream"]["groups"],
            utilisation=record["stream"]["utilisation"],
        )


class MicroBatch(Protocol):
    """The input of one loss of a side."""

    @property
    def num_positions(self) -> int:
        """Positions of the language model, padding included."""
        ...

    def loss_sum(self, model: VLM) -> Tensor: ...
    def to(self, device: str) -> MicroBatch: ...


@dataclass(frozen=True)
class Flat:
    """Ours: all sequences one after the other, without padding."""

    batch: PackedBatch

    @property
    def num_positions(self) -> int:
        return self.batch.num_tokens

    def loss_sum(self, model: VLM) -> Tensor:
        return model(self.batch).sums["text"]

    def to(self, device: str) -> Flat:
        return Flat(self.batch.to(device))


@dataclass(frozen=True)
class Rows:
    """nanoVLM's: rows of one length, padded on the left."""

    batch: PackedBatch
    shape: tuple[int, int]
    index: Tensor
    """[T] flat index of each token in the rows."""
    labels: Tensor
    """[rows * length] -100 where there is no target."""
    mask: Tensor
    """[rows, 1, 1, length] added to the scores: 0, or for padding the smallest number."""
    head_everywhere: bool

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[list[LoadedSplit]]],
        processor: VLMProcessor,
        *,
        length: int | None,
        everywhere: bool,
    ) -> Rows:
        batch = pack_documents([document for row in rows for document in row], processor)
        counts = [sum(pack_documents([document], processor).num_tokens for document in row) for row in rows]
        shape = (len(rows), length or max(counts))
        index = torch.cat([torch.arange((i + 1) * shape[1] - n, (i + 1) * shape[1]) for i, n in enumerate(counts)])
        labels = torch.full((shape[0] * shape[1],), -100)
        labels[index[batch.text_target_index]] = batch.text_target_ids
        padding = torch.ones(shape[0] * shape[1], dtype=torch.bool).index_fill(0, index, False)
        mask = padding.view(shape[0], 1, 1, shape[1]) * torch.finfo(torch.float32).min
        return cls(batch, shape, index, labels, mask, everywhere)

    @property
    def num_positions(self) -> int:
        return self.shape[0] * self.shape[1]

    def to(self, device: str) -> Rows:
        names = ("batch", "index", "labels", "mask")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})

    def loss_sum(self, model: VLM) -> Tensor:
        lm = model.language_model
        pad = lm.model.embed_tokens.weight[0].expand(self.num_positions, -1)
        x_PD = pad.index_copy(0, self.index, model._embed(self.batch))
        positions = torch.arange(self.shape[1], device=x_PD.device).repeat(self.shape[0])
        rotary = rotary_tables(positions, head_width=lm.model.head_width, theta=lm.model.theta)
        for layer in lm.model.layers:
            x_PD = layer(x_PD, rotary, self._attend)
        hidden, labels = lm.model.norm(x_PD), self.labels
        if not self.head_everywhere:
            hidden, labels = hidden[labels >= 0], labels[labels >= 0]
        return F.cross_entropy(lm.lm_head(hidden), labels, ignore_index=-100, reduction="sum")

    def _attend(self, q_PHE: Tensor, k_PHE: Tensor, v_PHE: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q_PHE, k_PHE, v_PHE))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)


@dataclass
class Data:
    """The samples of every step, as batches of each side."""

    public: Public
    dataset: UnifiedGenerationDataset
    processor: VLMProcessor

    def ours(self, step: int) -> Iterator[Flat]:
        numbers = sorted(number for row in self.public.buffers[step] for number in row)
        tokens, tiles = (column[numbers].tolist() for column in self.dataset.lengths())
        packer = BestFitPacking(max_tiles=self.public.max_images)
        rows = [
            tuple(Draw(0, numbers[i], 0) for i in group)
            for group in packer.plan(tokens, tiles, self.public.seq_length, key=step)
        ]
        for some in _chunks(rows):
            yield Flat(collate(some, [self.dataset], self.processor, seq_length=self.public.seq_length))

    def peer(self, step: int, *, packed: bool, length: int | None, everywhere: bool = True) -> Iterator[Rows]:
        rows = self.public.buffers[step]
        if not packed:
            rows = [[number] for row in rows for number in row]
        for some in _chunks(rows):
            documents = [[self._document(number) for number in row] for row in some]
            yield Rows.of(documents, self.processor, length=length, everywhere=everywhere)

    def _document(self, number: int) -> list[LoadedSplit]:
        length = self.public.seq_length
        return load(Draw(0, number, 0), self.dataset, self.processor, seq_length=length, seed=0, name=str(number))


def _chunks(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (rows[i : i + ROWS] for i in range(0, len(rows), ROWS))


class Side:
    """One kind of batches: its copy of the weights, its optimizer, its times."""

    def __init__(self, model: VLM, batches: Callable[[int], Iterator[MicroBatch]]) -> None:
        self.model, self.batches = copy.deepcopy(model).to(DEVICE), batches
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.blocks: list[Block] = []
        self.positions = self.tokens = 0

    def loss(self, step: int) -> float:
        """Sum over the targets of a step, with the current weights."""
        with torch.no_grad():
            return sum(float(micro_batch.to(DEVICE).loss_sum(self.model)) for micro_batch in self.batches(step))

    def step(self, step: int, *, timed: bool) -> None:
        micro_batches: list[Any] = [micro_batch.to(DEVICE) for micro_batch in self.batches(step)]
        targets = sum(len(each.batch.text_target_ids) for each in micro_batches)
        watch = Stopwatch()
        for micro_batch in micro_batches:
            (micro_batch.loss_sum(self.model) / targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        block = watch.block(0.0)
        if timed:
            self.blocks.append(block)
            self.positions += sum(each.num_positions for each in micro_batches)
            self.tokens += sum(each.batch.num_tokens for each in micro_batches)


def measure(data: Data, *, steps: int) -> dict[str, Any]:
    """Train all sides for ``steps`` timed steps."""
    torch.manual_seed(0)
    model, length = VLM(llm=LLM, vit=VIT, pixel_shuffle_factor=4), data.public.seq_length
    sides = {
        "ours": Side(model, data.ours),
        "longest": Side(model, lambda k: data.peer(k, packed=False, length=None)),
        "max_length": Side(model, lambda k: data.peer(k, packed=False, length=length)),
        "packed": Side(model, lambda k: data.peer(k, packed=True, length=length)),
        "packed, head on targets": Side(model, lambda k: data.peer(k, packed=True, length=length, everywhere=False)),
    }
    losses = {name: side.loss(0) for name, side in sides.items()}
    for name in ("longest", "max_length"):
        assert abs(losses[name] / losses["ours"] - 1) < 1e-4, f"not the same model: {losses}"
    for step in range(steps + 1):
        for side in list(sides.values())[:: 1 if step % 2 else -1]:
            side.step(step, timed=step > 0)  # the first step is a warm-up
    tokens = sides["ours"].tokens
    assert all(side.tokens == tokens for side in sides.values())
    seconds = {name: sum(block.wall for block in side.blocks) for name, side in sides.items()}
    return {
        "tokens_per_step": tokens / steps,
        "sides": {
            name: {
                "tokens_per_second": tokens / seconds[name],
                "utilisation": tokens / side.positions,
                "blocks": [dataclasses.asdict(block) for block in side.blocks],
            }
            for name, side in sides.items()
        },
        "ratios": {
            name: {
                kind: interval(
                    [
                        getattr(a, kind) / getattr(b, kind)
                        for a, b in zip(side.blocks, sides["ours"].blocks, strict=True)
                    ]
                )
                for kind in ("wall", "cpu")
            }
            for name, side in sides.items()
            if name != "ours"
        },
    }


def verdict(ratio: Mapping[str, float]) -> str:
    if ratio["median"] >= LIMIT:
        return "accepted" if ratio["low"] >= LIMIT else "accepted, not significant"
    return "too slow" if ratio["high"] < LIMIT else "too slow, not significant"


def show(result: Mapping[str, Any]) -> None:
    print(f"{'':26}{'useful tokens/s':>16}{'positions used':>16}{'ours is faster by (95 %)':>28}{'CPU time':>10}")
    for name, side in result["sides"].items():
        line = f"{name:26}{side['tokens_per_second']:16.0f}{side['utilisation']:16.1%}"
        if ratio := result["ratios"].get(name):
            wall = "{median:.2f} ({low:.2f} - {high:.2f})".format(**ratio["wall"])
            line += f"{wall:>28}{ratio['cpu']['median']:10.2f}  {verdict(ratio['wall']) if name in LIMITED else ''}"
        print(line)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, help="torch threads; default: torch's own")
    p.add_argument("--steps", type=int, default=12, help="timed steps of each side")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = p.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    public, load_before = Public.read("long_tailed"), os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="tokens-") as name:
        folder = Path(name)
        tokenizer = make_tokenizer(folder / "tokenizer", num_words=NUM_WORDS)
        processor = VLMProcessor(tokenizer, **VLM.processor_sizes({"vit": VIT}))
        samples = public.samples[
            : 1 + max(n for rows in public.buffers[: arguments.steps + 1] for r in rows for n in r)
        ]
        dataset = write_conversations(folder, samples, processor, num_words=NUM_WORDS, tile=VIT["image_size"])
        result = measure(Data(public, dataset, processor), steps=arguments.steps)
    show(result)
    record = {
        "limit": LIMIT,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "model": {"llm": LLM, "vit": VIT, "seq_length": public.seq_length, "rows_of_a_micro_batch": ROWS},
        "public_utilisation": public.utilisation,
        "verdict": {name: verdict(result["ratios"][name]["wall"]) for name in LIMITED},
        "load_before": load_before,
        "load_after": os.getloadavg(),
        **result,
    }
    print(f"Written: {os.path.relpath(write_result('tokens_per_second', record, folder=arguments.out))}")
    return int(any(result["ratios"][name]["wall"]["high"] < LIMIT for name in LIMITED))


if __name__ == "__main__":
    sys.exit(main())
