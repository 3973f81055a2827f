"""A tiny ``DecoderLM`` on a few documents, as a config or a file, with a hook that keeps the model's inputs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.data.support import talk, text, write_jsonl
from unigen_ds.config.registry import HOOKS
from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.hooks.base import Hook
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CONFIG = """
model = dict(type="DecoderLM", llm=dict(model_type="llama", vocab_size=20, hidden_size=8, intermediate_size=12,
             num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64))
tokenizer = dict(type="WordTokenizer", words={words!r})
train_dataloader = dict(batch_size=1, seq_length=16, packing=dict(type="BestFitPacking", window=64),
                        dataset=dict(type="UnifiedGenerationDataset", data_path={data!r}))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=5e-3))
train_cfg = dict(max_epochs=1)
backend = dict(type="single")
default_hooks = dict(logger=dict(interval=100), checkpoint=dict(interval=-1))
custom_hooks = [dict(type="KeepBatches")]
randomness = dict(seed=1)
work_dir = {work_dir!r}
"""


@HOOKS.register_module(force=True)
class KeepBatches(Hook):
    """Every micro-batch, in order."""

    def __init__(self) -> None:
        self.batches: list[PackedBatch] = []

    def before_train_iter(self, run: Any, index: int, batch: PackedBatch) -> None:
        self.batches.append(batch)

    @property
    def ids(self) -> list[str]:
        return [sample for batch in self.batches for sample in batch.sample_ids]

    @property
    def targets(self) -> Counter[int]:
        return Counter(i for batch in self.batches for i in batch.text_target_ids.tolist())


def text_config(folder: Path, records: list[Any], **overrides: Any) -> Any:
    """``overrides``: dotted paths with ``__`` instead of dots."""
    data = write_jsonl(folder / "train.jsonl", records)
    body = CONFIG.format(words=list(WORDS), data=str(data), work_dir=str(folder / "run"))
    (folder / "config.py").write_text(body, encoding="utf-8")
    return load_config(folder / "config.py", {key.replace("__", "."): value for key, value in overrides.items()})


def run_config(config: Any) -> tuple[Runner, KeepBatches]:
    runner = Runner.from_cfg(config)
    runner.train()
    return runner, next(hook for hook in runner.hooks if isinstance(hook, KeepBatches))


def log(folder: Path) -> str:
    return (folder / "run" / "train.log").read_text(encoding="utf-8")


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "run" / "metrics.jsonl") if line.get("event") == "evaluation"]


def words(number: int, first: int = 0) -> str:
    return " ".join(WORDS[(first + k) % 10] for k in range(number))


def count_up(number: int) -> list[dict[str, str]]:
    return [{"text": words(2 + i % 12, i)} for i in range(number)]


def talks(number: int, *, answer: int = 5) -> list[dict[str, Any]]:
    """Conversations of a question of three words and an answer."""
    return [talk(text("user", words(3, k)), text("assistant", words(answer, k))) for k in range(number)]


def counting_recipe(folder: Path, number: int) -> dict[str, Any]:
    """Overrides of the config ``decoder_lm_90m``: a tiny model, and documents and a tokenizer, which are written."""
    WordTokenizer(words=WORDS).save_pretrained(str(folder / "tokenizer"))
    llm = {
        "vocab_size": 20, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 48,
    }  # fmt: skip
    return {
        "tokenizer.path": str(folder / "tokenizer"), "tokenizer.bos": "<|im_start|>", "tokenizer.eos": "<|im_end|>",
        "train_dataloader.dataset.data_path": str(write_jsonl(folder / "train.jsonl", count_up(number))),
        "train_dataloader.num_workers": 0, "train_dataloader.dataset.index_workers": 0,
        "train_dataloader.seq_length": 48, "backend": {"type": "single"}, "default_hooks.logger.interval": 1,
        **{f"model.llm.{key}": value for key, value in llm.items()},
    }  # fmt: skip


def word_config(folder: Path, **options: Any) -> Any:
    """Of ``folder / 'train.jsonl'``, into ``folder / 'run'``; ``options``: as of ``text_config``."""
    return load_config(write_text_config(folder), {key.replace("__", "."): value for key, value in options.items()})


def write_text_config(folder: Path) -> Path:
    """The config as a file: 4 sequences an update, 6 updates, a checkpoint after every second one."""
    llm = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    config = {
        "model": {"type": "DecoderLM", "llm": llm},
        "tokenizer": {"type": "WordTokenizer", "words": WORDS},
        "train_dataloader": {
            "batch_size": 4, "num_workers": 0, "seq_length": 32,
            "dataset": {"type": "UnifiedGenerationDataset", "data_path": str(folder / "train.jsonl")},
        },
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-2}},
        "train_cfg": {"max_updates": 6},
        "default_hooks": {"logger": {"interval": 1}, "checkpoint": {"interval": 2}},
        "work_dir": str(folder / "run"),
    }  # fmt: skip
    path = folder / "config.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in config.items()), encoding="utf-8")
    return path
