"""Adapters on models of transformers: peft puts them on transformers' own model, and the hub's revision is recorded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.data.support import image, talk, text, write_jsonl
from tests.families.tiny_transformers import write_images
from unigen_ds.models.quantized import QuantizedLinear
from unigen_ds.runner import Runner
from unigen_ds.runner.open.publish import export_checkpoint
from unigen_ds.runner.open.trained import open_model
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

pytest.importorskip("bitsandbytes")
PeftModel = pytest.importorskip("peft").PeftModel
CONFIG = """
model = dict(type={type!r}, pretrained={name!r})
tokenizer = dict(type="ModelTokenizer", path={name!r})
train_dataloader = dict(batch_size=2, seq_length=96, packing=dict(type="BestFitPacking", window=32),
                        dataset=dict(type="UnifiedGenerationDataset", data_path={data!r}))
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=2e-2))
train_cfg = dict(max_epochs=40)
backend = dict(type="single")
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=-1))
lora = {lora!r}
work_dir = {work_dir!r}
"""


def trained(folder: Path, *, kind: str, name: Path | str, data: Path, lora: dict[str, Any]) -> Path:
    """The checkpoint of two updates, stopped between them."""
    type_ = "ImageTextToText" if kind == "llava" else "CausalLM"
    values = {"type": type_, "name": str(name), "data": str(data), "lora": lora, "work_dir": str(folder / "run")}
    (folder / "config.py").write_text(CONFIG.format(**values), encoding="utf-8")
    for last in (1, 2):
        Runner.from_cfg(load_config(folder / "config.py", {"resume": "auto"}), max_updates=last).train()
    losses = [line["loss"] for line in read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 2
    return folder / "run" / "iter_2.pth"


def test_a_packed_model_that_reads_images(tmp_path: Path) -> None:
    """QLoRA on all its linear layers; merged, transformers loads it."""
    write_images(tmp_path / "llava", "llava")
    Image.new("RGB", (16, 20), "red").save(tmp_path / "red.png")
    shown = talk(image("user", "red.png"), text("user", "what colour"), text("assistant", "red"))
    data = write_jsonl(tmp_path / "data.jsonl", [shown, talk(text("user", "what"), text("assistant", "a"))] * 6)
    shutil.copytree(tmp_path / "llava", tmp_path / "copy")
    lora = {"r": 4, "alpha": 16, "quantize": "nf4", "target_modules": ["language_model.*_proj", "vision_tower.*v_proj"]}
    checkpoint = trained(tmp_path, kind="llava", name=tmp_path / "llava", data=data, lora=lora)
    shutil.rmtree(tmp_path / "llava")
    ours = open_model(checkpoint, base=str(tmp_path / "copy"))[0].eval()
    assert sum(isinstance(layer, QuantizedLinear) for layer in ours.modules()) > 14
    export_checkpoint(checkpoint, tmp_path / "out", base=str(tmp_path / "copy"), merge=True, dtype=torch.float32)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[5, 30, 31, 40]])
    with torch.no_grad():
        expected = ours.transformers_model(ids).logits  # type: ignore[operator]
        torch.testing.assert_close(theirs(ids).logits, expected, atol=1e-4, rtol=1e-4)
