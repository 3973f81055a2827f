"""What runs on the pretended device: three models and two of transformers; each engine and way to start with one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.end_to_end.engines.jobs import pictures, texts
from tests.end_to_end.engines.jobs.model_cases import FLUX, VLM
from tests.families import tiny_transformers
from tests.support.golden_files import GOLDEN
from tests.tiny import tiny_config

UPDATES, MICRO_BATCHES = 3, 2
"""Of a case. The first and the last update log and save as well; the second does nothing but train."""
RESUMED_AT = 1
"""The update after which the ordinary CPU run saves the checkpoint that the ``resume`` cases start from."""
TIMEOUT_S = 77.0
WORLD, MANY = 8, 1024
FILES = {
    "unified": "drawings/mixed.jsonl", "vlm": "talks/mixed.jsonl", "decoder_lm": "documents.jsonl",
    "qwen3": "talks/texts.jsonl", "llava": "talks/mixed.jsonl",
}  # fmt: skip
_TRANSFORM = {"type": "ImageTransform", "max_size": 28, "min_size": 14, "stride": 14}


@dataclass(frozen=True)
class Case:
    model: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.kind}"

    @property
    def world(self) -> int:
        if self.kind == "single" or (self.model, self.kind) == ("decoder_lm", "resume"):
            return 1
        return MANY if self.kind == "hybrid" else WORLD

    @property
    def sequences(self) -> int:
        """Of an update, at most; one a process and micro-batch where there are more processes."""
        return 8 if self.world == 1 else MICRO_BATCHES * WORLD

    @property
    def offload(self) -> bool:
        return self.kind.startswith("offload")

    @property
    def precision(self) -> str:
        return "fp32" if self.kind == "resume" else "bf16"


CASES = {case.name: case for case in (
    Case("unified", "single"), Case("unified", "offload_published"), Case("vlm", "full_shard"), Case("vlm", "resume"),
    *(Case("decoder_lm", kind) for kind in ("offload", "resume", "no_shard", "hybrid")),
    Case("qwen3", "full_shard"), Case("llava", "single"),
)}  # fmt: skip
TRANSFORMERS = ("qwen3", "llava")
"""Models of transformers: rows of several documents, and images."""


def write_data(folder: Path) -> None:
    """Records with images of several sizes, conversations about pictures, documents, and a published Llama."""
    pictures.write_drawings(folder / "drawings")
    pictures.write_talks(folder / "talks")
    texts.write_documents(folder / "documents.jsonl")
    texts.write_decoder(folder / "decoder")
    tiny_transformers.write(folder / "models", ["qwen3", "llava"])


def _backend(case: Case) -> dict[str, Any]:
    if case.world == 1:
        return {"type": "single"}
    others: dict[str, dict[str, Any]] = {
        "no_shard": {"sharding_strategy": "NO_SHARD"},
        "hybrid": {"sharding_strategy": "HYBRID_SHARD", "num_shard": 8},
    }
    return {"type": "fsdp", "cpu_offload": case.offload, **others.get(case.kind, {})}


def _model(case: Case, data: Path) -> dict[str, Any]:
    """Overrides of ``tests/tiny.py`` that choose the model and its data."""
    published = case.kind == "offload_published"
    if case.model in TRANSFORMERS:
        folder = str(data / "models" / case.model)
        type_ = "ImageTextToText" if case.model in tiny_transformers.IMAGE else "CausalLM"
        return {
            "model": {"type": type_, "pretrained": folder}, "tokenizer": {"type": "ModelTokenizer", "path": folder},
            "processor": None, "train_dataloader__seq_length": 2 * pictures.LONGEST,
            "train_dataloader__overflow": "truncate",
        }  # fmt: skip
    if case.model == "unified":
        if not published:
            return {**FLUX, "model__llm__dropout": 0.1, "model__llm__num_hidden_layers": 1}
        processor = {"vit_transform": {**_TRANSFORM}, "vae_transform": {**_TRANSFORM, "stride": 16, "min_size": 16}}
        model = {"type": "UnifiedModel", "pretrained": str(GOLDEN / "bagel")}
        return {"model": model, "processor": processor, "train_dataloader__seq_length": 200}
    if case.model == "vlm":
        vlm = {**VLM, "tokenizer": {"type": "ChatTokenizer", "path": str(data / "talks" / "tokenizer")}}
        if published:
            vlm["model"] = {"type": "VLM", "pretrained": str(GOLDEN / "nanovlm")}
            vlm |= {"processor": {"max_image_size": 64}, "train_dataloader__seq_length": 400}
        return vlm
    model = {"type": "DecoderLM", "llm": {**texts.LLM, "attention_dropout": 0.0}, "dropout": 0.1}
    if published:
        model = {"type": "DecoderLM", "pretrained": str(data / "decoder")}
    return {"model": model, "processor": {}}


def config(case: Case, work_dir: Path, data: Path, *, on_cpu: bool = False, **overrides: Any) -> Any:
    """The config of a case; ``on_cpu``: of the ordinary run whose checkpoint it resumes from."""
    world = 1 if on_cpu else case.world
    file = FILES[case.model]
    source = {"type": "UnifiedGenerationDataset", "data_path": str(data / file)}
    arguments = {"type": "AdamW", "lr": 1e-3}
    if case.kind == "resume":
        arguments["fused"] = True
    options = {
        **_model(case, data),
        "backend": {"type": "single"} if on_cpu else _backend(case),
        "train_dataloader__dataset": [source, source] if case.kind == "single" else source,
        "train_dataloader__batch_size": max(1, case.sequences // MICRO_BATCHES // world),
        "train_dataloader__packing": None,
        "optim_wrapper__accumulative_counts": MICRO_BATCHES,
        "optim_wrapper__optimizer": arguments,
        "optim_wrapper__precision": case.precision,
        "param_scheduler": [],
        "train_cfg__max_epochs": 99,
        "train_dataloader__drop_last": False,  # an iteration of 1,024 sequences is more than an epoch has
        "env": {"dist_timeout_s": TIMEOUT_S},
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.1}, {"type": "SpikeHook", "interval": 1000}],
        "default_hooks__logger__interval": 1000,
        **overrides,
    }
    return tiny_config(work_dir, data, **options)
