"""A vision-language model through the whole house: trained from a JSONL, packed, asked, stopped, resumed."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.support import image, picture, talk, text, write_jsonl
from tests.data.text.chat_support import CONFIG as NANOVLM_CONFIG
from tests.data.text.chat_support import NANOVLM, character_tokenizer
from tests.text_run import KeepBatches
from unigen_ds.config.registry import TRANSFORMS
from unigen_ds.core.batch import PackedBatch
from unigen_ds.data.datasets.dataset import UnifiedGenerationDataset
from unigen_ds.data.records.records import Turn
from unigen_ds.families.nanovlm.model import VLM
from unigen_ds.families.nanovlm.published import vlm_arguments
from unigen_ds.inference.answers import PackedInferencer
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.naming import NANOVLM as TEMPLATE
from unigen_ds.runner.settings.naming import name_from_template
from unigen_ds.runner.settings.tree import ModelSettings, Settings, load_config
from unigen_ds.runner.start.build import build_geometry, build_groups, build_processor
from unigen_ds.system.journals import read_lines

CONFIG = """
model = dict(
    type="VLM",
    llm=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    vit=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=16,
             patch_size=4),
    pixel_shuffle_factor=2,
)
tokenizer = dict(type="ChatTokenizer", path={tokenizer!r})
processor = dict(max_image_size=32)
train_dataloader = dict(batch_size=2, seq_length=160, packing=dict(type="BestFitPacking", window=32, max_tiles=12),
                        dataset=dict(type="UnifiedGenerationDataset", data_path={data!r}))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=5e-3), precision="fp32")
train_cfg = dict(max_epochs=30)
backend = dict(type="single")
default_hooks = dict(logger=dict(type="LoggerHook", interval=1), checkpoint=dict(type="CheckpointHook", interval=-1))
randomness = dict(seed=1)
work_dir = {work_dir!r}
"""
NAMES = ("red", "blue", "dark")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Conversations about three pictures, among them some without any."""
    folder = tmp_path_factory.mktemp("vlm")
    character_tokenizer().save_pretrained(folder / "tokenizer")
    for number, name in enumerate(NAMES):
        picture(folder / f"{name}.png", 12 + 10 * number, 14, seed=number)
    records = [
        talk(image("user", f"{NAMES[i % 3]}.png"), text("user", "?"), text("assistant", NAMES[i % 3]))
        if i % 4
        else talk(text("user", "hi"), text("assistant", "yo"))
        for i in range(16)
    ]
    write_jsonl(folder / "train.jsonl", records)
    return folder


def config(data: Path, work_dir: Path, **overrides: Any) -> Any:
    path = work_dir.with_suffix(".py")
    paths = {"tokenizer": str(data / "tokenizer"), "data": str(data / "train.jsonl"), "work_dir": str(work_dir)}
    path.write_text(CONFIG.format(**paths), encoding="utf-8")
    return load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})


def losses(work_dir: Path) -> dict[int, float]:
    return {line["update"]: line["loss"] for line in read_lines(work_dir / "metrics.jsonl") if "loss" in line}


def test_it_learns_to_name_pictures_and_goes_on_where_it_stopped(data, tmp_path) -> None:
    runner = Runner.from_cfg(config(data, tmp_path / "straight"))
    runner.train()
    straight = losses(tmp_path / "straight")
    assert straight[max(straight)] < 0.1 * straight[1]
    inferencer = PackedInferencer(runner.backend.model, runner.processor)
    for name in NAMES:
        assert inferencer.unified_generate("?", images=data / f"{name}.png", max_length=8).text == name
    assert inferencer.unified_generate("hi", max_length=8).text == "yo"
    Runner.from_cfg(config(data, tmp_path / "cut"), max_updates=11).train()
    Runner.from_cfg(config(data, tmp_path / "cut", resume=True), max_updates=24).train()
    assert losses(tmp_path / "cut") == {update: loss for update, loss in straight.items() if update <= 24}


@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_it_begins_with_the_weights_of_a_published_directory(data, tmp_path, file: str) -> None:
    """A file of the directory means the directory; its names are nanoVLM's."""
    base = VLM(pretrained=str(NANOVLM))
    model = {"type": "VLM", **vlm_arguments(NANOVLM_CONFIG)}
    tile = model["vit"]["image_size"]
    changes = {"model": model, "processor": {"max_image_size": tile}, "train_dataloader__seq_length": 400}
    changes["optim_wrapper__optimizer__lr"] = 0.0
    runner = Runner.from_cfg(config(data, tmp_path / "x", load_from=str(NANOVLM / file), **changes), max_updates=1)
    runner.train()
    parameters = dict(runner.backend.model.named_parameters())
    assert len(parameters) == len(list(base.parameters()))
    for name, parameter in base.named_parameters():
        assert torch.equal(parameters[name], parameter), name
    log = (tmp_path / "x" / "train.log").read_text()
    assert log.count(f"Loaded weights only from {NANOVLM}; progress starts at zero.") == 1


@TRANSFORMS.register_module(force=True)
class Negation:
    """A random change of a user's own: -x, so that it is seen in every number."""

    def __call__(self, image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        assert image.shape[0] == 3 and not image.shape[1] % 16 and not image.shape[2] % 16, "the whole resized picture"
        return -image


def batches(config: Any, *, updates: int = 2) -> list[PackedBatch]:
    config.custom_hooks = [{"type": "KeepBatches"}]
    runner = Runner.from_cfg(config, max_updates=updates)
    runner.train()
    (keep,) = [hook for hook in runner.hooks if isinstance(hook, KeepBatches)]
    return keep.batches


def test_random_changes_of_pictures_are_made_in_training_alone(data, tmp_path) -> None:
    plain = batches(config(data, tmp_path / "plain"))
    changes = {"processor": {"max_image_size": 32, "vit_augment": [{"type": "Negation"}]}}
    with_changes = batches(config(data, tmp_path / "changed", **changes))
    for own, other in zip(with_changes, plain, strict=True):
        assert torch.equal(own.vit_patches, -other.vit_patches)
        assert torch.equal(own.text_ids, other.text_ids) and own.sample_ids == other.sample_ids
    assert sum(batch.vit_patches.abs().sum() for batch in plain) > 0
    settings = config(data, tmp_path / "x", **changes)
    processor = build_processor(ModelSettings.of(settings), seed=0)
    sample = processor.plan([Turn("user", "image", str(data / "dark.png")), Turn("user", "text", "?")], reply=True)
    (prompt,) = [split.load(processor, None) for split in sample.splits if split.num_encoded]
    assert (prompt.vit_patches >= 0).all(), "a prompt is shown as it is"


def test_tiles_of_a_sample_and_of_a_sequence_have_limits_and_what_exceeds_is_counted(data, tmp_path) -> None:
    """nanoVLM's 4 and 18: an image of two tiles and the global one has 3."""
    dataset = {"type": "UnifiedGenerationDataset", "data_path": str(data / "train.jsonl")}
    packing = {"type": "BestFitPacking", "window": 32, "max_tiles": 2}
    loader = {"train_dataloader__dataset": dataset, "train_dataloader__packing": packing}
    free = batches(config(data, tmp_path / "free", **loader))
    numbers = UnifiedGenerationDataset(data / "train.jsonl", build_processor(
        ModelSettings.of(config(data, tmp_path / "x")), seed=0)).lengths()[1]  # fmt: skip
    over, log = int((numbers > 2).sum()), (tmp_path / "free" / "train.log").read_text()
    assert over > 0 and f"{over} of 16 records (50 %): more than packing.max_tiles=2 condition images" in log
    assert max(len(batch.vit_lengths) for batch in free) > 2 * 2
    dataset["filters"] = [{"type": "ImageCountFilter", "max_tiles": 2}]
    with_limits = batches(config(data, tmp_path / "capped", **loader))
    assert max(len(batch.vit_lengths) for batch in with_limits) <= 2 * 2, "two sequences an iteration"
    log = (tmp_path / "capped" / "train.log").read_text()
    assert f"filters remove {over} of 16 records" in log and "more than packing.max_tiles" not in log


GUIDE = {  # the guide's name of each number -> its value, and the key here
    "lr_mp": (0.00512, "optim_wrapper.paramwise_cfg.groups.0.lr"),
    "lr_vision_backbone": (5e-5, "optim_wrapper.paramwise_cfg.groups.1.lr"),
    "lr_language_backbone": (5e-5, "optim_wrapper.paramwise_cfg.groups.2.lr"),
    "batch_size": (2, "train_dataloader.batch_size"),
    "gradient_accumulation_steps": (8, "optim_wrapper.accumulative_counts"),
    "max_training_steps": (40_000, "train_cfg.max_updates"),
    "max_grad_norm": (1.0, "optim_wrapper.clip_grad.max_norm"),
    "eval_interval": (500, "custom_hooks.0.interval"),
    "eval_interval's unit": ("update", "custom_hooks.0.unit"),
    "validation batches": (64, "custom_hooks.0.max_batches"),
    "checkpoint at each evaluation": (500, "default_hooks.checkpoint.interval"),
    "checkpoint's unit": ("update", "default_hooks.checkpoint.unit"),
    "batch_loss": (1, "default_hooks.logger.interval"),
    "batch_loss's unit": ("update", "default_hooks.logger.unit"),
    "stats_log_interval": (100, "default_hooks.logger.statistics_interval"),
    "seq_length": (4096, "train_dataloader.seq_length"),
    "max_sample_length": (None, "train_dataloader.max_sample_tokens"),  # None: seq_length
    "max_images_per_example": (4, "train_dataloader.dataset.filters.1.max_tiles"),
    "max_images_per_knapsack": (18, "train_dataloader.packing.max_tiles"),
    "max_img_size": (2048, "processor.max_image_size"),
    "mp_pixel_shuffle_factor": (4, "model.pixel_shuffle_factor"),
    "num_workers": (3, "train_dataloader.num_workers"),
    "num_workers of validation": (1, "val_dataloader.num_workers"),
    "batch_size of validation": (None, "val_dataloader.batch_size"),  # None: that of the training
    "warmup_steps": (0.03, "param_scheduler.warmup_ratio"),
    "min_lr": (0.1, "param_scheduler.min_ratio"),
    "manual_seed": (0, "randomness.seed"),
    "autocast": ("bf16", "optim_wrapper.precision"),
    **{f"{name}_min_rating": (1, f"train_dataloader.dataset.filters.0.{name}_min_rating")
       for name in ("relevance", "image_correspondence", "visual_dependency", "formatting")},
}  # fmt: skip
NAME = (
    "nanoVLM_siglip2-base-patch16-512_2048_mp4_SmolLM2-360M-Instruct_8xGPU_bs128_40000"
    "_lr_vision_5e-05-language_5e-05-0.00512_1229-143022"
)


def test_the_recipe_has_nanovlms_numbers(tmp_path) -> None:
    """And the guide's own name for a run of them, on 8 GPUs, from the guide's two parts."""
    recipe = load_config("nanovlm_460m", {"work_dir": str(tmp_path)})
    values = {name: reduce(lambda node, key: node[int(key)] if key.isdigit() else node.get(key), key.split("."), recipe)
             for name, (_, key) in GUIDE.items()}  # fmt: skip
    assert values == {name: value for name, (value, _) in GUIDE.items()}
    settings = Settings.from_config(recipe)
    parts = {"vit": "google/siglip2-base-patch16-512", "llm": "HuggingFaceTB/SmolLM2-360M-Instruct"}
    other = load_config("nanovlm_460m", {"model.pretrained": parts, "model.vit": None, "model.llm": None})
    own = Settings.from_config(other)
    assert name_from_template(TEMPLATE, own, build_geometry(own, dp_size=8), date="1229-143022") == NAME
    with torch.device("meta"):
        model = settings.model.build()
    parameters = dict(model.named_parameters())
    groups = build_groups(settings, parameters.items())
    assert [group.name for group in groups] == ["connector", "vision", "language"]
    assert 400e6 < sum(p.numel() for p in parameters.values()) < 500e6
