"""The same weights as other trainers write them, each by its own code: paths by name, for ``test_neighbours.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.processes import ranks
from tools.zero_to_fp32 import main as zero_to_fp32


def write_merged(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """What ``tools/zero_to_fp32.py`` writes, in one file and in several."""
    small = ["--max-shard-size", "4KB"]
    for name, words in {"bin": [], "bins": small, "st": ["--safe-serialization"],
                        "sts": [*small, "--safe-serialization"]}.items():  # fmt: skip
        assert zero_to_fp32([str(checkpoint), str(folder / name), *words]) == 0
    return {
        "merged bin": folder / "bin" / "pytorch_model.bin",
        "merged bin's folder": folder / "bin",
        "merged bin's shards": folder / "bins",
        "index of bin": folder / "bins" / "pytorch_model.bin.index.json",
        "merged safetensors": folder / "st" / "model.safetensors",
        "merged safetensors' shards": folder / "sts",
        "one shard of them": next((folder / "sts").glob("model-00002-of-*.safetensors")),
    }


def plain_torch(model: nn.Module, folder: Path) -> dict[str, Path]:
    state = model.state_dict()
    contents: dict[str, Any] = {
        "plain.pth": state,
        "state_dict.pth": {"epoch": 3, "state_dict": state, "best": 0.5},
        "model.pt": {"model": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}},
        "tutorial.ckpt": {"epoch": 1, "model_state_dict": state},
        "parallel.pth": {"state_dict": nn.DataParallel(model).state_dict()},
        "compiled.pth": torch.compile(model).state_dict(),
    }
    for name, content in contents.items():
        torch.save(content, folder / name)
    torch.save(state, folder / "before_1.6.pth", _use_new_zipfile_serialization=False)
    return {name: folder / name for name in [*contents, "before_1.6.pth"]}


def mmengine(model: nn.Module, folder: Path) -> dict[str, Path]:
    """mmengine's own Runner: one iteration, without change."""
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class WrapperModel(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, part in model.named_children():
                self.add_module(name, part)

        def forward(self, x: Tensor, mode: str = "tensor") -> dict[str, Tensor]:
            return {"loss": sum(p.sum() for p in self.parameters()) * 0}

    runner = Runner(
        WrapperModel(),
        work_dir=str(folder),
        train_dataloader={"dataset": [torch.zeros(1)] * 2, "sampler": {"type": "DefaultSampler", "shuffle": False},
                          "batch_size": 1, "num_workers": 0},
        train_cfg={"type": "IterBasedTrainLoop", "max_iters": 1},
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": 0.0}},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1, "by_epoch": False}},
        experiment_name="neighbour",
    )  # fmt: skip
    runner.train()
    return {"mmengine's file": folder / "iter_1.pth", "mmengine's work dir": folder}


def accelerate(model: nn.Module, folder: Path) -> dict[str, Path]:
    """accelerate's own ``save_fsdp_model`` (``{"model": ...}`` in a DCP folder) and ``save_state``."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    save_fsdp_model(plugin, accelerator, model, str(folder / "fsdp"))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    save_fsdp_model(plugin, accelerator, model, str(folder / "full"))
    accelerator.prepare(model)
    accelerator.save_state(str(folder / "state"))
    return {
        "accelerate's FSDP": folder / "fsdp",
        "its DCP folder": folder / "fsdp" / "pytorch_model_fsdp_0",
        "a file in it": next((folder / "fsdp" / "pytorch_model_fsdp_0").glob("*.distcp")),
        "accelerate's full FSDP": folder / "full",
        "accelerate's state": folder / "state",
    }


def hugging_face(export: Path, folder: Path) -> dict[str, Path]:
    """transformers' own Trainer: one step without change, under a learning rate of 0; and its shards."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    causal: Any = AutoModelForCausalLM.from_pretrained(export)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=1, save_steps=1, learning_rate=0.0, weight_decay=0.0,
        per_device_train_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    row = {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}
    Trainer(causal, arguments, train_dataset=[row] * 2).train()
    causal.save_pretrained(folder / "shards", max_shard_size="4KB")
    checkpoint = folder / "trainer" / "checkpoint-1"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 1
    return {
        "Trainer's checkpoint": checkpoint,
        "its trainer_state.json": checkpoint / "trainer_state.json",
        "its file": checkpoint / "model.safetensors",
        "transformers' shards": folder / "shards",
        "their index": folder / "shards" / "model.safetensors.index.json",
    }


DEEPSPEED = """
import sys
from pathlib import Path

import deepspeed
import torch

from unigen_ds.backends.deepspeed.deepspeed import leave_out_operator
from unigen_ds.runner.open.trained import open_model

leave_out_operator()
deepspeed.init_distributed(dist_backend="gloo")
for stage in (2, 3):
    model, _ = open_model(Path(sys.argv[1]), raw=True)
    given = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
             "zero_force_ds_cpu_optimizer": False,
             "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.0),
                                      config=given, dist_init_required=False)
    engine.save_checkpoint(f"{sys.argv[2]}/zero{stage}", tag="global_step2")
    engine.destroy()
"""


def write_deepspeed(work_dir: Path, folder: Path) -> Path:
    """DeepSpeed's own engine, in two processes: below ``folder``, what it saves of stages 2 and 3."""
    processes = ranks([sys.executable, "-c", DEEPSPEED, str(work_dir), str(folder)])
    assert [one.status for one in processes] == [0, 0], processes[0].ending
    return folder


WRITERS: dict[str, Callable[..., dict[str, Path]]] = {"plain_torch": plain_torch, "mmengine": mmengine,
                                                      "accelerate": accelerate}  # fmt: skip
