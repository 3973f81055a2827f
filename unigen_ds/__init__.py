"""unigen_ds: train unified text + image models, VLMs and language models; kill a run anywhere and resume it anywhere.

Its packages form layers (``docs/architecture.md``), which import only lower layers. The names below are what code
outside of the package needs (``docs/extending``): ``from unigen_ds import Runner, load_config``. A name's module is
imported at its first use, so ``import unigen_ds`` alone loads nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "1.0.0.dev0"

PUBLIC = {
    "runner": "Runner",
    "runner.settings.tree": "load_config",
    "runner.open.trained": "open_inferencer open_model",
    "config.registry": "AUTOENCODERS BACKENDS CURVES DATASETS DRY_RUN_CHECKS FAMILIES FILTERS FOREIGN_STATES HOOKS "
    "LAYOUTS METRICS MODELS OPTIMIZERS PACKERS RESUME_CHECKS SOURCES TOKENIZERS TRANSFORMS WRITERS checked",
    "config.section": "Section",
    "core.errors": "CheckpointError ConfigError DataError TrainingError",
    "core.batch": "CAUSAL FULL NOISE Batch LossTerms PackedBatch",
    "core.shards": "Shard ShardReader slices_of",
    "system.dist": "is_main",
    "system.files": "new_directory",
    "system.outputs": "StateFiles",
    "system.seeding": "generator",
    "data.samples.sample": "IGNORED Sample Split Tally TextTokenizer",
    "data.samples.splits": "ImageSplit PackedBuilder TextSplit TokenSplit count_image",
    "data.samples.processor": "ConversationProcessor",
    "data.records.records": "Turn",
    "data.images.image_files": "ImageTransform StoredImage UnreadableImage",
    "data.sources.base": "Arrays RecordSource Row",
    "data.datasets.dataset": "PlannedDataset ScannedDataset",
    "data.datasets.filters": "CheckedRecord RecordFilter",
    "data.batches.loader": "pack_documents",
    "schedule.curves": "Curve Point",
    "tracking.writer": "Writer",
    "models.weights": "Pretrained PretrainedModel Stored stored_tensors",
    "models.llama": "LlamaLM",
    "models.losses": "text_loss_sum",
    "backends.base": "Backend",
    "backends.single": "SingleBackend",
    "families.base": "ConversationFamily Family PublishedFormat",
    "inference.generated": "Generated Request to_picture",
    "inference.prompts": "Sampling",
    "inference.answers": "chooser continue_prompts device_of idle_arguments",
    "evaluation.metrics": "Metric build_metrics evaluated",
    "hooks.base": "Hook Run UpdateResult",
    "hooks.log.logger": "global_losses",
    "checkpoint.manifest": "Manifest",
    "checkpoint.foreign": "ForeignState",
    "checkpoint.layouts.safetensors": "SafetensorsReader",
    "resume.finding": "Finding Proposal",
    "checks.dry_run.known": "Checked Known ok problem warning",
}
"""Module -> its public names."""
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in PUBLIC.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
