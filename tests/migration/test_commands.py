"""``tools/migrate.py`` on the guides' own command lines, and on whole configs; what it writes loads and trains."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.data.support import image, talk, text, write_jsonl
from tests.data.text.chat_support import NANOVLM, character_tokenizer
from tests.families.tiny_transformers import write_images
from tests.repository.old_names import GUIDES, old_names
from tests.support.golden_files import BAGEL
from tools.migrate import main
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.families.bagel.published import FILES
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import Settings, load_config
from unigen_ds.system.journals import read_lines

HERE = Path(__file__).parent
COMMANDS = [(section, name) for section, kind, name in old_names() if kind == "command"]
NO_TRAINING = re.compile(
    r"(pip|sbatch|nvidia-smi|gpustat|ls|cat|tail|watch|find|cp) |(nvidia-smi|gpustat)$|from |model\.|if |\w+ = "
)
WHOLE = "python train_unified_generation.py --model_path"


class Migration:
    """A config that was written, and what was printed."""

    def __init__(self, path: Path, output: str) -> None:
        self.text, self.output = path.read_text(encoding="utf-8"), output
        self.config = load_config(path)
        Settings.from_config(self.config)

    def get(self, path: str) -> Any:
        node: Any = self.config
        for step in path.split("."):
            node = node[int(step)] if step.isdigit() else node.get(step)
        return node

    @property
    def rest(self) -> list[str]:
        """What is a comment alone."""
        block = self.text.partition("# NOT CARRIED OVER")[2].partition("\n\n")[0]
        return re.findall(r"^# ([^ ].*)$", block, re.MULTILINE)


@pytest.fixture
def migrate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def run(guide: str, *words: str) -> Migration:
        out = tmp_path / "written.py"
        assert main([guide, "--out", str(out), "--force", "--", *words]) == 0, capsys.readouterr().err
        return Migration(out, capsys.readouterr().err)

    return run


def words_of(command: str) -> list[str]:
    return shlex.split(command)


# ---- the command lines of the guides --------------------------------------------------------------------------------

VALUES: dict[str, dict[str, Any]] = {
    'export resume_from="results/checkpoints/step_5000"': {"load_from": "results/checkpoints/step_5000"},
    'export auto_resume="True"': {"resume": "auto"},
    'export cpu_offload="True"': {"backend.cpu_offload": True, "backend.type": "fsdp"},
    "export warmup_steps=2000": {"param_scheduler.0.end": 2000, "param_scheduler.0.start_factor": 1 / 2000},
    "export text_loss_weight=2.0": {"loss_weights.text": 2.0},
    "python train_unified_generation.py --bf16 ...": {"optim_wrapper.precision": "bf16"},
    'python train_unified_generation.py --wandb_project "my-project" --wandb_run_name "unified-training-v1" ...': {
        "visualizer.vis_backends.0.project": "my-project", "visualizer.vis_backends.0.name": "unified-training-v1",
    },
    "python train_unified_generation.py --resume_from_checkpoint outputs/unified_training/step_1000 ...": {
        "load_from": "outputs/unified_training/step_1000",
    },
    "torchrun --nproc_per_node=4 train_unified_generation.py ...": {"backend.sharding_strategy": "NO_SHARD"},
    "torchrun --nproc_per_node=4 train_fsdp.py config/train300M_fsdp.yaml"
    " --resume_from checkpoints/fsdp_cpt4000.pth": {
        "load_from": "checkpoints/fsdp_cpt4000.pth", "model.llm.num_hidden_layers": 20,
        "optim_wrapper.precision": "auto",
    },
    "python train.py --lr_mp 0.01 --lr_vision_backbone 1e-4 --lr_language_backbone 1e-4": {
        "optim_wrapper.paramwise_cfg.groups.0.lr": 0.01, "optim_wrapper.paramwise_cfg.groups.1.lr": 1e-4,
        "optim_wrapper.paramwise_cfg.groups.2.lr": 1e-4,
    },
    "python train.py --resume_from_vlm_checkpoint True --vlm_checkpoint_path ./checkpoints/nanoVLM_xxx/step_10000": {
        "model.pretrained": "./checkpoints/nanoVLM_xxx/step_10000",
    },
    "python train.py --train_dataset_path /path/to/dataset --relevance_min_rating 3"
    " --image_correspondence_min_rating 3": {
        "train_dataloader.dataset.data_path": "/path/to/dataset",
        "train_dataloader.dataset.filters.0.relevance_min_rating": 3,
        "train_dataloader.dataset.filters.0.image_correspondence_min_rating": 3,
        "train_dataloader.dataset.filters.0.formatting_min_rating": 1,
    },
    "python train.py": {"model.pretrained.llm": "HuggingFaceTB/SmolLM2-360M-Instruct", "train_cfg.max_updates": 40000},
}  # fmt: skip


def test_every_command_line_of_the_guides(migrate, capsys: pytest.CaptureFixture[str]) -> None:
    """A training command becomes a config that loads; any other one is refused, with the page that has it."""
    count = 0
    for section, command in COMMANDS:
        if "|" in command:
            assert main([GUIDES[section], "--", *command.split()]) == 2, command
            assert "give the command itself" in capsys.readouterr().err, command
            continue
        if NO_TRAINING.match(command):
            assert main([GUIDES[section], "--", *command.split()]) == 2, command
            assert "docs/migrating/index.md" in capsys.readouterr().err, command
            continue
        words = words_of(command)
        if section == "S2" and "train_fsdp.py" not in command:  # variables alone: they go with a command
            words += ["torchrun", "train_fsdp.py", "config/train90M_fsdp.yaml"]
        result = migrate(GUIDES[section], *words)
        for path, value in VALUES.pop(command, {}).items():
            assert result.get(path) == value, (command, path)
        count += 1
    assert not VALUES and count == 36
    assert len(COMMANDS) == 60


def test_all_flags_of_one_command(migrate) -> None:
    command = next(command for _, command in COMMANDS if command.startswith(WHOLE))
    result = migrate("unified_generation", *words_of(command))
    expected = {
        "model.pretrained": "models/BAGEL-7B-MoT", "tokenizer.path": "models/BAGEL-7B-MoT",
        "train_dataloader.dataset.data_path": "data/train.jsonl", "val_dataloader.dataset.data_path": "data/val.jsonl",
        "work_dir": "outputs/unified_training", "train_dataloader.batch_size": 1,
        "optim_wrapper.accumulative_counts": 8, "train_cfg.max_epochs": 3, "optim_wrapper.optimizer.lr": 1e-5,
        "visualizer.vis_backends.0.project": "bagel-unified-training", "optim_wrapper.precision": "fp32",
    }  # fmt: skip
    assert {path: result.get(path) for path in expected} == expected
    assert result.rest == [] and "python tools/train.py " in result.text.splitlines()[2]


EXPORTS = {
    "model_path": "/models/BAGEL", "llm_path": "/models/llm", "vae_path": "/models/ae.safetensors",
    "vit_path": "/models/vit", "train_data_path": "/data/train.jsonl", "val_data_path": "", "num_nodes": 1,
    "node_rank": 0, "master_addr": "localhost", "master_port": 12345, "nproc_per_node": 8, "batch_size": 3,
    "gradient_accumulation_steps": 9, "total_steps": 500, "learning_rate": "2e-5", "warmup_steps": 20,
    "save_every": 50, "log_every": 7, "sharding_strategy": "HYBRID_SHARD", "num_shard": 8, "cpu_offload": "True",
    "text_loss_weight": 2.0, "image_loss_weight": 0.5, "freeze_vae": "True", "freeze_llm": "False",
    "freeze_vit": "True", "num_workers": 2, "checkpoint_dir": "results/checkpoints", "auto_resume": "True",
}  # fmt: skip


def test_a_script_of_exported_variables(migrate, tmp_path: Path) -> None:
    """Nothing is dropped: each variable is a value, in the start command, or among the comments."""
    lines = [f'export {name}="{value}"  # {name}' for name, value in EXPORTS.items()]
    lines += ["#!/bin/bash", 'export visual_gen="True"', "export log_every=7 touch=1", "touch=2"]
    lines += ["bash \\", "  scripts/train_unified_fsdp.sh"]
    (tmp_path / "run.sh").write_text("\n".join(lines), encoding="utf-8")
    result = migrate("unified_fsdp", "run.sh")
    start = result.text.splitlines()[2]
    assert "torchrun --nnodes=1 --node_rank=0 --master_addr=localhost --master_port=12345 --nproc_per_node=8" in start
    rest = {"log_every", "touch", "llm_path", "vae_path", "vit_path", "visual_gen"}
    assert {one.partition("=")[0] for one in result.rest} == rest and len(result.rest) == 7
    expected = {
        "model.pretrained": "/models/BAGEL", "tokenizer.path": "/models/BAGEL", "val_dataloader": None,
        "train_dataloader.dataset.data_path": "/data/train.jsonl", "train_dataloader.batch_size": 3,
        "train_dataloader.num_workers": 2, "optim_wrapper.accumulative_counts": 9, "optim_wrapper.optimizer.lr": 2e-5,
        "param_scheduler": [dict(type="LinearLR", unit="update", begin=0, end=20, start_factor=0.05)],
        "loss_weights": {"text": 2.0, "image": 0.5}, "train_cfg": {"max_updates": 500},
        "model.freeze": ["vit", "vae"], "default_hooks.checkpoint.interval": 50, "resume": "auto",
        "default_hooks.checkpoint.unit": "update", "default_hooks.logger.interval": 7,
        "checkpoint_dir": "results/checkpoints",
        "backend": {"type": "fsdp", "sharding_strategy": "HYBRID_SHARD", "num_shard": None, "cpu_offload": True},
        "custom_hooks.0": {"type": "EMAHook", "momentum": 0.0001}, "model.activation_checkpointing": True,
    }  # fmt: skip
    assert {path: result.get(path) for path in expected} == expected


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("MODEL=/data\npython train.py --train_dataset_path $MODEL", "'$MODEL' is of the shell"),
        ("cd nanoVLM && python train.py", "'&&' is of the shell"),
        ("python train.py --lr_mp 1 > train.log 2>&1 &", "'>' is of the shell"),
        ("set -e\npython train.py", "'set -e' is followed by 'python train.py'"),
        ("ARGS=(--lr_mp 0.01)\npython train.py", "ARGS= '(' --lr_mp"),
        ("python train.py --lr_mp 'one\ntwo'", "has no closing quotation"),
    ],
)
def test_a_script_that_computes_its_command_is_asked_for_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, why: str
) -> None:
    (tmp_path / "run.sh").write_text(script)
    for word in (str(tmp_path / "run.sh"), f" {script}"):
        assert main(["nanovlm", "--", word]) == 2, script
        error = capsys.readouterr().err
        assert why in error and "Remedy: give the command itself, with its variables in front" in error, error


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("python3.10 train.py --lr_mp 0.25", "python tools/train.py"),
        ("env WANDB_MODE=offline deepspeed train.py --lr_mp 0.25", "WANDB_MODE=offline deepspeed tools/train.py"),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nnodes=2 --node_rank=1 --master_addr 10.0.0.1 train.py --lr_mp 0.25",
         "CUDA_VISIBLE_DEVICES=0,1 torchrun --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 tools/train.py"),
        ("python -m torch.distributed.launch --nproc_per_node=2 train.py --lr_mp=0.25",
         "torchrun --nproc_per_node=2 tools/train.py"),
    ],
)  # fmt: skip
def test_how_a_training_is_started(migrate, line: str, start: str) -> None:
    for words in (shlex.split(line), [line]):
        result = migrate("nanovlm", *words)
        assert result.get("optim_wrapper.paramwise_cfg.groups.0.lr") == 0.25, words
        assert result.text.splitlines()[2].strip().startswith(f"{start} ")
        assert "train.py" not in result.rest and "argument without a name" not in result.text
    assert migrate("nanovlm", "nohup", *shlex.split(line)).rest == ["nohup"]


def test_three_parts_instead_of_a_directory(migrate, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    result = migrate("unified_fsdp", "llm_path=LLM", "vit_path=VIT", "vae_path=VAE", "freeze_vae=False", "num_shard=2")
    assert result.get("model.pretrained") == {"llm": "LLM", "vit": "VIT", "vae": "VAE"}
    assert result.get("tokenizer.path") == "LLM" and result.rest == ["freeze_vae=False"]


YAML = """
train:
  fsdp: True
  sharding_strategy: SHARD_GRAD_OP
  world_size: 4
  compile: False
  train_batch: 64
  batch_size: 4
  lr: 3e-4
unheard_of: !!python/object/apply:os.system ["touch started"]
"""


def test_a_yaml_file(migrate, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train300M_fsdp.yaml"
    path.write_text(YAML, encoding="utf-8")
    assert main(["decoder_fsdp", "--", "torchrun", "train_fsdp.py", str(path)]) == 2
    assert "no tag may name Python code" in capsys.readouterr().err and not (tmp_path / "started").exists()
    path.write_text(YAML.partition("unheard_of")[0] + "  n_heads: 8\n", encoding="utf-8")
    result = migrate("decoder_fsdp", "torchrun", "--nproc_per_node=4", "train_fsdp.py", str(path))
    expected = {
        "backend": {"type": "fsdp", "sharding_strategy": "SHARD_GRAD_OP"}, "world_size": 4,
        "model.compile": False, "train_dataloader.global_batch_size": 64, "optim_wrapper.accumulative_counts": 4,
        "train_dataloader.batch_size": None,
        "optim_wrapper.optimizer.lr": 3e-4, "model.llm.hidden_size": 1024,
    }  # fmt: skip
    assert {path: result.get(path) for path in expected} == expected
    assert result.rest == ["train.n_heads: 8"]


def test_nanovlms_other_settings(migrate) -> None:
    words = "python train.py --train_dataset_path ORG/DATA --train_dataset_name one,two --eval_interval 200"
    words += " --lmms_eval_tasks mme --use_lmms_eval True --hf_repo_name me/model --no_log_wandb --lr_vision_backbone 0"
    words += " --max_img_size 1024 --max_length 2048 --lm_max_length 4096 --val_size 9 --batch_size many"
    words += " --stats_log_interval 50"
    result = migrate("nanovlm", *words_of(words))
    names = [source["format"]["config"] for source in result.get("train_dataloader.dataset")]
    assert names == ["one", "two"] and result.get("train_dataloader.dataset.1.on_error") == "skip"
    expected = {
        "custom_hooks.0.interval": 200, "default_hooks.checkpoint.interval": 200, "custom_hooks.1.interval": 400,
        "custom_hooks.2.repo": "me/model", "visualizer.vis_backends": [], "processor.max_image_size": 1024,
        "optim_wrapper.paramwise_cfg.groups.1.lr": 0, "train_dataloader.seq_length": 2048,
        "train_dataloader.batch_size": 2, "default_hooks.logger.statistics_interval": 50,
    }  # fmt: skip
    assert {path: result.get(path) for path in expected} == expected
    assert "--lmms-tasks mme" in result.get("custom_hooks.1.command")
    assert sorted(result.rest) == ["--batch_size many", "--lm_max_length 4096", "--val_size 9"]


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nanovlm", "python", "train.py", "--lr_mp", "0.01"])
    assert "unigen-migrate nanovlm -- python train.py --lr_mp 0.01" in capsys.readouterr().err
    out = tmp_path / "out.py"
    for words, part in (
        (["nanovlm", "--", "--max_grad_norm", "-1"], "max_norm"),
        (["nanovlm", "--out", str(tmp_path / "out.txt"), "--", "train.py"], "ends with .py"),
        (["xtuner", "--", str(tmp_path / "missing.py")], "missing.py cannot be read"),
        (["unified_fsdp", "--", str(tmp_path / "missing.sh")], "missing.sh cannot be read"),
        (["decoder_fsdp", "--", "train_fsdp.py"], "0 YAML files are given"),
    ):
        assert main(words) == 2, words
        assert part in capsys.readouterr().err
    assert main(["nanovlm", "--out", str(out), "--", "train.py"]) == 0
    assert main(["nanovlm", "--out", str(out), "--", "train.py"]) == 2 and "exists" in capsys.readouterr().err


def test_hostile_values_stay_values(migrate, tmp_path: Path) -> None:
    """In a docstring, a comment and a text of the config: nothing of them becomes code."""
    evil = 'x\n"""\nimport os; os.mkdir(\'started\')\n""" \\'
    words = [
        f"WANDB_NAME={evil}",
        "train.py",
        "--train_dataset_path",
        evil,
        f"--unknown={evil}",
        "--wandb_entity",
        "\udc80",
    ]
    result = migrate("nanovlm", *words)
    assert result.get("train_dataloader.dataset.data_path") == evil
    assert result.get("visualizer.vis_backends.0.entity") == "\udc80"
    assert not (tmp_path / "started").exists() and len(result.rest) == 1
    text = copy_config("llava", tmp_path).read_text().replace("custom_hooks = [", "other = [")
    path = tmp_path / "own.py"
    path.write_text(f"custom_hooks = [{{'type': 'EMAHook', 'class': 1, 'a b': 2}}]\n{text}")
    result = migrate("xtuner", path.name)
    assert result.get("custom_hooks.0") == {"type": "EMAHook"} and "custom_hooks[0].class = 1" in result.rest


def copy_config(name: str, folder: Path) -> Path:
    """A config of xtuner with its base. What it imports is not installed, and it computes values."""
    shutil.copyfile(HERE / f"{name}.config", folder / f"{name}.py")
    shutil.copyfile(HERE / "runtime.config", folder / "frozen_runtime.py")
    return folder / f"{name}.py"


# ---- whole configs --------------------------------------------------------------------------------------------------


def test_a_config_in_the_style_of_xtuners_llava(migrate, tmp_path: Path) -> None:
    result = migrate("xtuner", copy_config("llava", tmp_path).name)
    expected = {
        "model": {"type": "ImageTextToText", "pretrained": "llava-hf/llava-1.5-7b-hf", "freeze": ["vision_tower"],
                  "activation_checkpointing": True},
        "tokenizer": {"type": "ModelTokenizer", "path": "llava-hf/llava-1.5-7b-hf"},
        "train_dataloader": {
            "batch_size": 16, "num_workers": 0, "seq_length": 2048, "overflow": "truncate",
            "dataset": {"type": "UnifiedGenerationDataset", "data_path": "./data/pictures/talks.json",
                        "image_root": "./data/pictures/images"},
        },
        "optim_wrapper": {
            "optimizer": {"type": "AdamW", "lr": 2e-5, "betas": (0.9, 0.999), "weight_decay": 0},
            "clip_grad": {"max_norm": 1}, "accumulative_counts": 2, "loss_scale": "dynamic", "precision": "fp16",
        },
        "param_scheduler.0.end": 0.03, "param_scheduler.1.type": "CosineAnnealingLR",
        "backend": {"type": "deepspeed", "config": "zero2"},
        "default_hooks.checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 500, "max_keep_ckpts": 2},
        "custom_hooks": [], "randomness": {"seed": None}, "resume": False, "env": {"log_level": "INFO"},
    }  # fmt: skip
    assert {path: result.get(path) for path in expected} == expected
    for name in (
        "model.pretrained_pth", "tokenizer.trust_remote_code", "LengthGroupedSampler", "log_processor",
        "pad_image_to_square", "DatasetInfoHook", "EvaluateChatHook", "env_cfg.mp_cfg",
    ):  # fmt: skip
        assert name in result.text.partition("\nmodel = ")[0], name
    assert f"{len(result.rest)} settings could not be carried over" in result.output


def test_a_config_in_the_style_of_flmm(migrate, tmp_path: Path) -> None:
    """With a base and a loop, and DeepSpeed by the command line."""
    copy_config("frozen", tmp_path)
    words = "NPROC_PER_NODE=2 xtuner train frozen.py --deepspeed deepspeed_zero3 --work-dir work_dirs/frozen"
    result = migrate("xtuner", *words_of(words))
    expected = {
        "model.pretrained": "deepseek-community/deepseek-vl-1.3b-chat", "model.type": "ImageTextToText",
        "train_dataloader.batch_size": 64, "optim_wrapper.accumulative_counts": 2, "train_cfg": {"max_epochs": 8},
        "optim_wrapper.precision": "bf16", "resume": True, "randomness": {"seed": 3}, "work_dir": "work_dirs/frozen",
        "backend": {"type": "deepspeed", "config": "zero3"}, "param_scheduler.1.begin": 0.24,
    }  # fmt: skip
    assert {path: result.get(path) for path in expected} == expected
    assert "torchrun --nproc_per_node=2 tools/train.py" in result.text.splitlines()[2]
    for name in ("PNGDataset", "RefCocoDataset", "model.mask_head", "model.loss_mask"):
        assert name in result.text.partition("\nmodel = ")[0], name


def test_options_of_the_command_of_xtuner(migrate, tmp_path: Path) -> None:
    """``--cfg-options`` are read as if the file had them."""
    copy_config("llava", tmp_path)
    line = "xtuner train llava.py --deepspeed deepspeed_zero3"
    line += " --cfg-options train_dataloader.batch_size=7 custom_hooks=[] x"
    result = migrate("xtuner", *line.split())
    expected = {"train_dataloader.batch_size": 7, "custom_hooks": [], "backend.config": "zero3"}
    assert {path: result.get(path) for path in expected} == expected
    assert "--cfg-options x" in result.rest and "batch_size=16" not in result.text


def test_settings_of_a_config_alone(migrate) -> None:
    words = (
        "batch_size=64 accumulative_counts=2 num_gpus=2 save_steps=500 save_total_limit=1 resume=True load_from=None"
    )
    result = migrate("xtuner", *words.split(), "current_epoch=3.85")
    expected = {
        "train_dataloader.batch_size": 64, "optim_wrapper.accumulative_counts": 2, "resume": True,
        "default_hooks.checkpoint.interval": 500, "world_size": 2,
        "default_hooks.checkpoint.max_keep_ckpts": 1, "load_from": None,
    }  # fmt: skip
    assert {path: result.get(path) for path in expected} == expected
    assert result.rest == ["current_epoch=3.85"]


# ---- what is written trains -----------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "backend": {"type": "single"}, "train_dataloader.num_workers": 0, "default_hooks.checkpoint.interval": -1,
    "visualizer": None, "optim_wrapper.precision": "fp32",
}  # fmt: skip
COLOURS = {"red": (230, 20, 20), "green": (20, 200, 20)}


def train_config(path: Path, work_dir: Path, **overrides: Any) -> list[float]:
    """Losses of two updates of a written config, with sizes for a test."""
    changes = {
        **SMALL,
        "work_dir": str(work_dir),
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    Runner.from_cfg(load_config(path, changes), max_updates=2).train()
    return [line["loss"] for line in read_lines(work_dir / "metrics.jsonl") if "loss" in line]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        Image.new("RGB", (16, 20), colour).save(tmp_path / f"{name}.png")
    pictures = [talk(image("user", f"{n}.png"), text("user", "what colour"), text("assistant", n)) for n in COLOURS]
    write_jsonl(tmp_path / "train.jsonl", pictures * 8)
    return tmp_path


def test_bagels_command_trains(migrate, pictures: Path) -> None:
    model = pictures / "model"
    model.mkdir()
    for name in FILES:
        shutil.copyfile(BAGEL / name, model / name)
    WordTokenizer(words=["what", "colour", *COLOURS]).save_pretrained(str(model))
    words = "train_unified_generation.py --model_path model --train_data_path train.jsonl --num_epochs 2 --batch_size 2"
    words += " --gradient_accumulation_steps 2 --warmup_steps 2 --lr_scheduler cosine --max_sequence_length 200"
    migrate("unified_generation", "python", *words.split())
    transforms = {
        f"processor__{part}_transform": {"type": "ImageTransform", "max_size": side, "min_size": side, "stride": side}
        for part, side in (("vit", 14), ("vae", 16))
    }
    losses = train_config(pictures / "written.py", pictures / "run", default_hooks__logger__interval=1, **transforms)
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)


def test_a_recipe_of_a_decoder_trains(migrate, tmp_path: Path) -> None:
    (tmp_path / "train90M_fsdp.yaml").write_text(
        "train_batch: 4\nlr: 0.01\nseq_length: 16\ntrain_data_path: train.jsonl\n"
    )
    write_jsonl(tmp_path / "train.jsonl", [{"text": "a b c " * (i % 4)} for i in range(1, 40)])
    WordTokenizer(words=list("abc")).save_pretrained(str(tmp_path / "tokenizer"))
    migrate("decoder_fsdp", "train90M_fsdp.yaml")
    small = dict(vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=1)
    small |= dict(num_attention_heads=2, num_key_value_heads=1)
    losses = train_config(
        tmp_path / "written.py", tmp_path / "run", tokenizer__path=str(tmp_path / "tokenizer"),
        tokenizer__bos="<|im_start|>", tokenizer__eos="<|im_end|>", train_dataloader__dataset__index_workers=0,
        **{f"model__llm__{key}": value for key, value in small.items()},
    )  # fmt: skip
    assert len(losses) == 2 and all(2 < loss < 4 for loss in losses)


def test_nanovlms_command_trains(migrate, pictures: Path) -> None:
    """From a folder of nanoVLM's own, as its ``--resume_from_vlm_checkpoint`` reads it."""
    character_tokenizer().save_pretrained(str(pictures / "tokenizer"))
    words = f"python train.py --resume_from_vlm_checkpoint True --vlm_checkpoint_path {NANOVLM} --max_img_size 64"
    words += " --train_dataset_path train.jsonl --lr_vision_backbone 0 --lm_tokenizer tokenizer --eval_in_epochs False"
    migrate("nanovlm", *words.split())
    losses = train_config(
        pictures / "written.py", pictures / "run", train_dataloader__dataset__index_workers=0,
        train_dataloader__seq_length=120, optim_wrapper__accumulative_counts=1,
    )  # fmt: skip
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)


@pytest.mark.parametrize("name", ["llava", "frozen"])
def test_configs_of_xtuner_train(migrate, pictures: Path, name: str) -> None:
    write_images(pictures / "model", "llava")
    migrate("xtuner", "xtuner", "train", copy_config(name, pictures).name, "--cfg-options", "resume=False")
    losses = train_config(
        pictures / "written.py", pictures / "run", model__pretrained=str(pictures / "model"),
        tokenizer__path=str(pictures / "model"), train_dataloader__batch_size=2, optim_wrapper__accumulative_counts=1,
        default_hooks__logger__interval=1, custom_hooks=[], train_dataloader__seq_length=96,
        train_dataloader__dataset={"type": "UnifiedGenerationDataset", "data_path": str(pictures / "train.jsonl")},
    )  # fmt: skip
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)
