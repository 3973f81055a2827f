"""A digest of short trainings through ``tools/train.py``: two trees have the same core where their digests are equal.

    python benchmarks/same_numbers.py --out before.json [--keep FOLDER]     # in the one tree
    python benchmarks/same_numbers.py --compare before.json [--resume FOLDER]   # in the other

20 updates of the demos' configs, and of the decoder's recipe at a small size, under ``single``, ZeRO-2, ZeRO-3 and
FULL_SHARD on two processes. The digest has each update's losses, norm and learning rates, each line of the ledger, and
of the last checkpoint every tensor of weights, moments, averages and generators. With ``--resume`` each run continues
from update 10 of a folder that ``--keep`` wrote, maybe by the other tree. The result is in ``results/``; exit status 1
where something differs. Digests hold for one machine and one torch: other kernels round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from shared.record import write_result

ROOT = Path(__file__).resolve().parents[1]
UPDATES, SAVED = 20, 10
ENGINES = {"single": 1, "deepspeed:zero2": 2, "deepspeed:zero3": 2, "fsdp:FULL_SHARD": 2}
WORDS = [f"word{k}" for k in range(15)]
SAVES = [
    "default_hooks.checkpoint.unit=update", f"default_hooks.checkpoint.interval={SAVED}",
    "default_hooks.checkpoint.form=both", "default_hooks.checkpoint.max_keep_ckpts=-1",
    "default_hooks.logger.interval=1", "train_dataloader.packing.window=512",
    "custom_hooks=[dict(type='EMAHook',momentum=0.05)]",
]  # fmt: skip
ADAMW = "optim_wrapper.optimizer=dict(_delete_=True,type='AdamW',lr=0.002,betas=(0.9,0.95),weight_decay=0.02)"
TEXT = [
    f"tokenizer=dict(_delete_=True,type='WordTokenizer',words={WORDS!r})", "model.llm.vocab_size=24",
    "model.llm.hidden_size=32", "model.llm.intermediate_size=64", "model.llm.num_hidden_layers=2",
    "model.llm.num_attention_heads=4", "model.llm.num_key_value_heads=2", "train_dataloader.seq_length=64",
    "train_dataloader.batch_size=2", "optim_wrapper.accumulative_counts=2", "train_dataloader.num_workers=1",
    "train_dataloader.dataset.index_workers=0", "train_cfg.max_tokens=100000",
]  # fmt: skip
CASES: dict[str, tuple[str, list[str]]] = {
    "digits": ("unified_digits", []),
    "emoji": ("unified_emoji", [ADAMW, "val_dataloader=None"]),
    "decoder": ("decoder_lm_90m", TEXT),
}
"""Name -> shipped config, and what is set otherwise."""
TIMES = (
    "time",
    "share",
    "tokens_per_second",
    "samples_per_second",
    "epoch_tokens_per_second",
    "eta",
    "tflops",
    "memory",
    "mfu",
    "loader",
    "host",
)
"""Beginnings of the names of a line that no two runs have alike."""


def write_texts(path: Path) -> None:
    """Documents of 3 to 40 words."""
    lines = []
    for k in range(400):
        words = [WORDS[(k * 7 + n * n) % len(WORDS)] for n in range(3 + k * 13 % 38)]
        lines.append(json.dumps({"text": " ".join(words)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def train(case: str, engine: str, folder: Path, *, packer: str | None, resume: Path | None) -> None:
    """Train ``case`` in ``folder``, from update ``SAVED`` of the run in ``resume`` if there is one."""
    config, options = CASES[case]
    processes = ENGINES[engine]
    options = [*SAVES, *options]
    if case == "decoder":
        data = folder.parent / "texts.jsonl"
        if not data.exists():
            write_texts(data)
        options.append(f"train_dataloader.dataset.data_path={data}")
    if packer is not None:
        options.append(f"train_dataloader.packing.type={packer}")
    start = ["--nproc-per-node", str(processes)] if processes > 1 else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *start] if start else [sys.executable]
    command = [*launcher, "tools/train.py", config, "--backend", engine, "--work-dir", str(folder)]
    command += ["--max-updates", str(UPDATES), *(["--resume", str(checkpoint(resume, SAVED))] if resume else [])]
    process = subprocess.run(
        [*command, "--cfg-options", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(
            f"{case} under {engine} ended with {process.returncode}:\n{process.stdout[-3000:]}{process.stderr[-3000:]}"
        )


def checkpoint(folder: Path, update: int) -> Path:
    """That of ``update``: its iteration is a multiple of it."""
    for path in sorted(folder.glob("iter_*.pth")):
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["progress"]["updates"] == update:
            return path
    raise SystemExit(f"{folder} has no checkpoint of update {update}")


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """(``update 7 loss``, value) of every line of a journal, without times."""
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "update" not in line or line.get("event"):
            continue
        for key, value in line.items():
            if key != "update" and not key.startswith(TIMES):
                yield f"{path.name} {line['update']} {key}", json.dumps(value)


def tensors(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of every tensor of a checkpoint, in the layout of ``single`` whatever the engine."""
    whole = folder / "full" if (folder / "full").is_dir() else folder
    for path in sorted(whole.rglob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                value = file.get_tensor(name)
                digest = hashlib.sha256(value.tobytes()).hexdigest()[:16]
                yield f"{path.relative_to(whole)} {name} {value.dtype}{[*value.shape]}", digest


def digest(folder: Path) -> dict[str, str]:
    """Everything that must be equal of the run in ``folder``."""
    journals = [entry for name in ("metrics.jsonl", "ledger.jsonl") for entry in lines(folder / name)]
    return dict([*journals, *tensors(checkpoint(folder, UPDATES))])


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What is not the same of two digests."""
    return [
        f"{key}: {before.get(key, 'nothing')} -> {after.get(key, 'nothing')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def compare(name: str, before: Mapping[str, str], after: Mapping[str, str], *, resumed: bool) -> int:
    """Print what differs, ten lines at most. Returns how much; of a resumed run the updates after ``SAVED`` count."""
    if resumed:
        before = {key: value for key, value in before.items() if key in after or not _is_early(key)}
    lines = differences(before, after)
    print(f"{name}: {len(after)} values, {len(lines)} differ", *lines[:10], sep="\n  ", flush=True)
    return len(lines)


def _is_early(key: str) -> bool:
    words = key.split()
    return words[0].endswith(".jsonl") and int(words[1]) <= SAVED


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the digests to this file")
    parser.add_argument("--compare", type=Path, help="compare them with those of this file")
    parser.add_argument("--commit", help="commit of the tree that wrote that file, for the result")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--resume", type=Path, help="continue each run from its checkpoint in this folder")
    parser.add_argument("--packer", help="train_dataloader.packing.type")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    arguments = parser.parse_args(argv)
    out = arguments.keep or Path(tempfile.mkdtemp(prefix="same_numbers-"))
    out.mkdir(parents=True, exist_ok=True)
    digests: dict[str, Any] = {}
    for case in arguments.cases:
        for engine in arguments.engines:
            name = f"{case} {engine}@{ENGINES[engine]}"
            folder = out.resolve() / name.replace(" ", "_").replace(":", "_")
            resume = arguments.resume.resolve() / folder.name if arguments.resume else None
            train(case, engine, folder, packer=arguments.packer, resume=resume)
            digests[name] = digest(folder)
            print(f"{name}: {len(digests[name])} values", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")
    if not arguments.keep:
        shutil.rmtree(out)
    if not arguments.compare:
        return 0
    before = json.loads(arguments.compare.read_text())
    resumed = arguments.resume is not None
    numbers = {name: compare(name, before[name], values, resumed=resumed) for name, values in digests.items()}
    runs = {name: {"values": len(digests[name]), "differ": number} for name, number in numbers.items()}
    print(write_result("same_numbers", {"before": arguments.commit, "resumed": resumed, "runs": runs}))
    return int(any(numbers.values()))


if __name__ == "__main__":
    sys.exit(main())
