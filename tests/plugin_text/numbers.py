"""A family beside the ones of this package: texts with numbers in them. A number is one token, read and predicted.

It shows what a family of texts has from the package: text splits, packing, attention by documents, Llama's layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unigen_ds import (
    CAUSAL,
    DATASETS,
    FAMILIES,
    MODELS,
    ConversationFamily,
    ConversationProcessor,
    Generated,
    LlamaLM,
    LossTerms,
    PackedBatch,
    PackedBuilder,
    Sample,
    ScannedDataset,
    Split,
    Tally,
    TextSplit,
    pack_documents,
    text_loss_sum,
)


@dataclass(frozen=True)
class NumberSplit(Split):
    value: float
    num_tokens = 1

    def count(self, tally: Tally) -> None:
        tally.other_targets += 1

    def load(self, processor: Any, key: tuple[object, ...] | None) -> NumberSplit:
        return self

    def place(self, builder: NumbersBuilder, position: int) -> int:
        builder.add_number(self.value, position)
        return position + 1


@dataclass(frozen=True, kw_only=True)
class NumbersBatch(PackedBatch):
    numbers: Tensor
    """[N] float32; each is predicted by the token before it."""
    number_index: Tensor
    """[N] their indices among the tokens."""

    def target_counts(self) -> dict[str, float]:
        return {"text": float(self.text_target_weight.sum()), "number": float(len(self.numbers))}


class NumbersBuilder(PackedBuilder):
    def __init__(self, processor: Any) -> None:
        super().__init__(processor)
        self.numbers: list[float] = []
        self.index: list[int] = []

    def add_number(self, value: float, position: int) -> None:
        self.numbers.append(value)
        self.index.append(self.num_tokens)
        self.add_split(1, CAUSAL, torch.tensor([position]))

    def batch(self, *fields: Any) -> NumbersBatch:
        numbers, index = torch.tensor(self.numbers), torch.tensor(self.index, dtype=torch.int64)
        return NumbersBatch(**vars(super().batch(*fields)), numbers=numbers, number_index=index)


class NumbersProcessor(ConversationProcessor):
    def builder(self) -> NumbersBuilder:
        return NumbersBuilder(self)

    def splits(self, line: str) -> Iterator[Split]:
        """``a number such as 2.5`` is a text and a number; a record begins with a text."""
        for is_text, words in groupby(line.split(), lambda word: word[0] not in "-0123456789"):
            if is_text:
                yield TextSplit(tuple(self.tokenizer.encode(" ".join(words))), loss=True)
            else:
                yield from (NumberSplit(float(word)) for word in words)


@DATASETS.register_module()
class NumbersFile(ScannedDataset):
    """A text file with one record a line."""

    name = "numbers"

    def __init__(self, path: str, processor: NumbersProcessor) -> None:
        self.lines, self.processor = Path(path).read_text(encoding="utf-8").splitlines(), processor

    def __len__(self) -> int:
        return len(self.lines)

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        return Sample(tuple(self.processor.splits(self.lines[index])))


@MODELS.register_module()
class NumbersLM(nn.Module):
    forward_methods = ("predict",)

    def __init__(self, *, llm: Mapping[str, Any]) -> None:
        super().__init__()
        self.llm_config, self.vocab_size = dict(llm), llm["vocab_size"]
        self.language_model = LlamaLM(llm)
        self.number_in, self.number_out = nn.Linear(1, llm["hidden_size"]), nn.Linear(llm["hidden_size"], 1)

    def arguments(self) -> dict[str, Any]:
        return {"llm": self.llm_config}

    def shard_units(self) -> list[nn.Module]:
        return list(self.language_model.model.layers)

    def hidden_states(self, batch: NumbersBatch) -> Tensor:
        backbone = self.language_model.model
        words, numbers = backbone.embed_tokens(batch.text_ids), self.number_in(batch.numbers[:, None])
        x_TD = words.new_zeros(len(batch.position_ids), words.shape[1])
        return backbone(x_TD.index_copy(0, batch.text_index, words).index_copy(0, batch.number_index, numbers), batch)

    def forward(self, batch: NumbersBatch) -> LossTerms:
        hidden_TD = self.hidden_states(batch)
        logits = self.language_model.lm_head(hidden_TD[batch.text_target_index])
        text = text_loss_sum(logits, batch.text_target_ids, batch.text_target_weight)
        errors = self.number_out(hidden_TD[batch.number_index - 1])[:, 0] - batch.numbers
        return LossTerms({"text": text, "number": errors.square().sum()})

    def predict(self, batch: NumbersBatch) -> Tensor:
        """[T] the number that each token predicts."""
        return self.number_out(self.hidden_states(batch))[:, 0]


class Predictor:
    """The number that follows a text."""

    def __init__(self, model: NumbersLM, processor: NumbersProcessor) -> None:
        self.model, self.processor = model, processor

    @torch.no_grad()
    def unified_generate(self, prompt: str, **_: Any) -> Generated:
        loaded = [split.load(self.processor, None) for split in self.processor.splits(prompt)]
        return Generated(f"{self.model.predict(pack_documents([loaded], self.processor))[-1].item():.4f}", [])


@FAMILIES.register_module()
class Numbers(ConversationFamily):
    model = NumbersLM
    processor_type = NumbersProcessor
    terms = ("text", "number")
    inferencer = Predictor
