"""Planned memory of BAGEL-7B and nanoVLM with every engine on 1, 8 and 64 devices, and the time of a plan.

    python benchmarks/plan_table.py [--minutes N]    # what the newest result file lacks; N: begins nothing after that
    python benchmarks/plan_table.py --seconds        # only the time of a plan for 1,024 processes
    python benchmarks/plan_table.py --show FILE      # of a result file, as docs/planning.md has it

The recipes are the shipped ones. BAGEL-7B is a directory whose weights are files of headers alone, with the shapes of
the published ones: a plan reads no value. The data is made, so that one record or 18 fill a sequence: ``write_edits``,
``write_talks``. No plan of these sizes was compared with a run. Results: ``results/plan_table_<date>.json``, written
after each engine.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # torch reads them
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GIB = 2**30
DEVICES, MEMORY, PER_NODE = (1, 8, 64), (24, 40, 80), 8
DEVICE_RESERVE, FRAGMENTATION, PROCESS_RESERVE = "2GiB", 0.05, "4GiB"
"""Those of tools/plan.py."""
RECIPES = {
    "bagel": ("bagel_7b_fsdp", "BAGEL-7B, all but the VAE trained (`bagel_7b_fsdp`, `bagel_7b_zero3`)"),
    "lora": ("bagel_lora", "BAGEL-7B, adapters of rank 16 trained (`bagel_lora`)"),
    "nanovlm": ("nanovlm_460m", "nanoVLM-460M (`nanovlm_460m`)"),
}
ENGINES = (
    "single", "deepspeed:zero1", "deepspeed:zero2", "deepspeed:zero2_offload", "deepspeed:zero3",
    "deepspeed:zero3_offload", "fsdp:NO_SHARD", "fsdp:SHARD_GRAD_OP", "fsdp:FULL_SHARD", "fsdp:HYBRID_SHARD",
)  # fmt: skip
"""Those of tools/plan.py."""
FIRST = (
    ("bagel", 8, "fsdp:HYBRID_SHARD"), ("bagel", 64, "fsdp:FULL_SHARD"), ("nanovlm", 8, "fsdp:NO_SHARD"),
    ("lora", 1, "fsdp:FULL_SHARD"), ("lora", 8, "fsdp:FULL_SHARD"), ("bagel", 8, "deepspeed:zero3"),
    ("nanovlm", 1, "single"), ("bagel", 64, "deepspeed:zero3"), ("bagel", 64, "fsdp:HYBRID_SHARD"),
    ("nanovlm", 8, "deepspeed:zero2"), ("bagel", 8, "deepspeed:zero3_offload"), ("nanovlm", 64, "fsdp:NO_SHARD"),
)  # fmt: skip
WORDS = tuple(f"word{i}" for i in range(100))
BAGEL: dict[str, Any] = {
    "llm": {
        "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    },
    "vit": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16,
        "image_size": 980, "patch_size": 14, "num_channels": 3,
    },
    "vae": {"type": "FluxAutoencoder", "base_channels": 128, "channel_multipliers": [1, 2, 4, 4], "num_blocks": 2,
            "latent_channels": 16, "channels": 3},
}  # fmt: skip
"""Sizes of BAGEL-7B-MoT's files: Qwen2.5-7B twice, 26 of 27 layers of SigLIP-so400m, FLUX's autoencoder."""


def write_headers(path: Path, shapes: Mapping[str, Sequence[int]], *, dtype: str, width: int) -> None:
    """A safetensors file whose values are a hole, ``width`` bytes each: it needs nothing on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        numel = 1
        for size in shape:
            numel *= size
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [end, end + numel * width]}
        end += numel * width
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def write_bagel(folder: Path) -> Path:
    """A directory with the files, names and shapes of BAGEL-7B-MoT, without values; its tokenizer knows ``WORDS``."""
    import torch

    from unigen_ds.data.text.tokenizers import WordTokenizer
    from unigen_ds.families.bagel.model import UnifiedModel
    from unigen_ds.families.bagel.published import FILES, VIT_SELECT_LAYER

    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in UnifiedModel(**BAGEL).state_dict().items()}
    folder.mkdir(parents=True)
    llm = {"model_type": "qwen2", "hidden_act": "silu", "tie_word_embeddings": False, **BAGEL["llm"]}
    vit = {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh", **BAGEL["vit"]}
    vit["num_hidden_layers"] -= 1 + VIT_SELECT_LAYER
    for name, config in zip(FILES[:2], (llm, vit), strict=True):
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
    rest = {name: shape for name, shape in shapes.items() if not name.startswith("vae.")}
    vae = {name.removeprefix("vae."): shape for name, shape in shapes.items() if name.startswith("vae.")}
    write_headers(folder / FILES[2], rest, dtype="BF16", width=2)
    write_headers(folder / FILES[3], vae, dtype="F32", width=4)
    WordTokenizer(words=WORDS).save_pretrained(str(folder))
    return folder


def write_edits(folder: Path) -> str:
    """Edits of 1,024 x 1,024 pixels: a picture that is read and encoded, 3,000 words, and the picture to draw."""
    return _write(folder, side=1024, turns=[("user", None), ("user", 40), ("assistant", 3000), ("assistant", None)])


def write_talks(folder: Path) -> str:
    """Conversations about a picture of 512 x 512 pixels, of which 18 fill nanoVLM's sequence."""
    return _write(folder, side=512, turns=[("user", None), ("user", 40), ("assistant", 105)])


def write_mixed(folder: Path) -> str:
    """Texts, and pictures of three sizes that are read, edited and drawn: of a sequence with the most tokens, with the
    most targets and with the most images each is another.
    """
    kinds = (
        [("user", 40), ("assistant", 300)],
        [("user", None), ("user", 40), ("assistant", 300)],
        [("user", None), ("user", 40), ("assistant", None)],
        [("user", 60), ("assistant", None)],
    )
    for side in (1024, 512, 256):
        for i, turns in enumerate(kinds):
            _write(folder, side=side, turns=turns, name=f"{side}-{i}")
    lines = [path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob("*-*.jsonl"))]
    path = folder / "mixed.jsonl"
    path.write_text("".join(f"{line}\n" for same in zip(*lines, strict=True) for line in same), encoding="utf-8")
    return str(path)


def _write(folder: Path, *, side: int, turns: Sequence[tuple[str, int | None]], name: str = "train") -> str:
    """100 equal records. ``turns``: (role, words), of an image None."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side)).save(folder / f"{side}.png")
    messages = [
        {"role": role, "type": "text", "content": " ".join(WORDS[i % len(WORDS)] for i in range(words))}
        if words
        else {"role": role, "type": "image", "image_path": f"{side}.png"}
        for role, words in turns
    ]
    path = folder / f"{name}.jsonl"
    path.write_text(f"{json.dumps({'conversations': messages})}\n" * 100, encoding="utf-8")
    return str(path)


def overrides(model: str, folder: Path, *, data: str) -> dict[str, Any]:
    """What the shipped recipe lacks here: weights, tokenizer and data. No condition is dropped from the batch."""
    common = {"train_dataloader.dataset.index_workers": 0, "train_dataloader.num_workers": 0,
              "train_dataloader.dataset.data_path": data, "work_dir": str(folder / "run")}  # fmt: skip
    if model == "nanovlm":
        return {**common, "tokenizer.path": str(folder / "bagel"), "model.llm": {"vocab_size": 49_218},
                "train_dataloader.dataset.filters": None}  # fmt: skip
    dropouts = {f"processor.{kind}_dropout": 0.0 for kind in ("text", "vae", "vit")}
    return {**common, **dropouts, "model.pretrained": str(folder / "bagel"), "tokenizer.path": str(folder / "bagel")}


def plan_row(model: str, folder: Path, *, data: str, world: int, engine: str | None = None) -> dict[str, Any]:
    """One engine, None: the recipe's own, as plain values; ``seconds`` by the clock and of all processes together."""
    from unigen_ds.checks.memory.planned import Reserve, plan_memory, report_values
    from unigen_ds.checks.resume import as_launched
    from unigen_ds.config.overrides import with_backend
    from unigen_ds.core.errors import ConfigError
    from unigen_ds.runner.settings.tree import load_settings
    from unigen_ds.system.pipes import size

    per_node, start, cpu_before = min(PER_NODE, world), time.perf_counter(), sum(os.times()[:4])
    options = overrides(model, folder, data=data)
    request = {"model": model, "devices": world, "engine": engine}
    try:
        with as_launched(world, per_node=per_node):
            settings = load_settings(RECIPES[model][0], with_backend(options, engine) if engine else options)
        report = plan_memory(settings, world_size=world, per_node=per_node, alternatives=False)
    except ConfigError as error:  # this engine is not for so many processes
        return {**request, "problem": str(error)}
    values = report_values(report, Reserve(size(DEVICE_RESERVE), FRAGMENTATION, size(PROCESS_RESERVE)))
    (one,) = values["engines"]
    row = {
        **request, "problem": one["problem"], "micro_batches": [facts(batch) for batch in report.largest.batches],
        "geometry": values["geometry"], "seconds": time.perf_counter() - start,
        "cpu_seconds": sum(os.times()[:4]) - cpu_before, "load": os.getloadavg(),
    }  # fmt: skip
    if one["problem"] is None:
        device = max(one["device"].values())
        row |= {
            "device_gib": device / GIB, "phase": max(one["device"], key=one["device"].__getitem__),
            "node_gib": per_node * max(one["host"].values()) / GIB,
            "enough_gb": next((gb for gb in MEMORY if device <= gb * GIB), None), "traced": one["traced"],
        }  # fmt: skip
    return row


def facts(batch: Any) -> dict[str, Any]:
    """Tokens, and targets by term, of a micro-batch."""
    return {"tokens": int(batch.num_tokens), **{f"{k}_targets": int(v) for k, v in batch.target_counts().items()}}


def table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Markdown of one model: a row for each engine, a column for each number of devices."""
    cells = {(one["engine"], one["devices"]): _cell(one) for one in rows}
    names = [name for name in ENGINES if any(cells.get((name, devices)) for devices in DEVICES)]
    lines = ["| engine |" + "".join(f" {n} device{'s' * (n > 1)} |" for n in DEVICES), "|---|" + "---|" * len(DEVICES)]
    return lines + [
        f"| `{name}` | " + " | ".join(cells.get((name, n), "not planned") for n in DEVICES) + " |" for name in names
    ]


def _cell(one: Mapping[str, Any]) -> str:
    if one["problem"] is not None:
        return ""
    enough = f"**{one['enough_gb']} GB**" if one["enough_gb"] else "too large"
    return f"{one['device_gib']:.1f} / {one['node_gib']:.0f}: {enough}"


def page(record: Mapping[str, Any]) -> str:
    """The tables of docs/planning.md."""
    parts = []
    for model, (_, title) in RECIPES.items():
        rows = [row for row in record["rows"] if row["model"] == model]
        batch = next((row["micro_batches"][0] for row in rows if row["problem"] is None), None)
        if batch is not None:
            size = f"{batch['tokens']:,} tokens in a micro-batch, {batch['text_targets']:,} text targets"
            parts.append("\n".join([f"{title}, {size}:", "", *table(rows)]))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", action="store_true", help="only the time of a plan for 1,024 processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no engine after this time")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a result file")
    arguments = parser.parse_args()
    if arguments.show:
        print(page(json.loads(arguments.show.read_text(encoding="utf-8"))))
        return 0
    with tempfile.TemporaryDirectory(prefix="plan-table-") as path:
        folder = Path(path)
        write_bagel(folder / "bagel")
        if arguments.seconds:
            seconds(folder)
        else:
            complete(folder, until=time.monotonic() + 60 * arguments.minutes)
    return 0


def seconds(folder: Path) -> None:
    from shared.record import write_result

    row = plan_row("bagel", folder, data=write_mixed(folder / "mixed"), world=1024)
    print(json.dumps({key: row[key] for key in ("seconds", "cpu_seconds", "load", "micro_batches", "problem")}))
    print(f"Written: {os.path.relpath(write_result('plan_seconds', row))}")


def complete(folder: Path, *, until: float) -> None:
    """Plan what the newest result file does not have, the recipes' own engines first."""
    from shared.record import RESULTS, write_result

    former = sorted(RESULTS.glob("plan_table_*.json"))
    rows = json.loads(former[-1].read_text(encoding="utf-8"))["rows"] if former else []
    path = former[-1] if former else None
    keys = {(row["model"], row["devices"], row["engine"]) for row in rows}
    models = ("nanovlm", "bagel", "lora")  # the quick one first
    everything = [(model, n, engine) for model in models for n in DEVICES for engine in ENGINES]
    data = {model: (write_talks if model == "nanovlm" else write_edits)(folder / f"data-{model}") for model in RECIPES}
    reserve = {"device": DEVICE_RESERVE, "fragmentation": FRAGMENTATION, "process": PROCESS_RESERVE}
    for model, devices, engine in dict.fromkeys((*FIRST, *everything)):
        if (model, devices, engine) in keys:
            continue
        if time.monotonic() > until:
            print("There is more to plan.")
            return
        rows.append(plan_row(model, folder, data=data[model], world=devices, engine=engine))
        print({key: value for key, value in rows[-1].items() if key != "traced"}, flush=True)
        if path is not None:
            path.unlink()
        path = write_result("plan_table", {"reserve": reserve, "memory_gib": MEMORY, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
