"""Planned memory of BAGEL-7B and nanoVLM with every engine on 1, 8 and 64 devices, and the time of a plan.

    python benchmarks/plan_table.py                  # the table, half an hour on two cores
    python benchmarks/plan_table.py --seconds        # only the time of a plan for 1,024 processes

The recipes are the shipped ones. BAGEL-7B is a directory whose weights are files of headers alone, with the shapes of
the published ones: a plan reads no value. The data is made: pictures of the largest size of the recipe, drawn, edited
and read, with texts of the length that ``DATA`` states, so that packed sequences are full. No plan of these sizes was
compared with a run. Results: ``results/plan_table_<date>.json``; docs/planning.md has what ``tables`` makes of it.
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
RECIPES = {
    "bagel": ("bagel_7b_fsdp", "BAGEL-7B, all but the VAE trained (`bagel_7b_fsdp`, `bagel_7b_zero3`)"),
    "lora": ("bagel_lora", "BAGEL-7B, adapters of rank 16 trained (`bagel_lora`)"),
    "nanovlm": ("nanovlm_460m", "nanoVLM-460M (`nanovlm_460m`)"),
}
WORDS = tuple(f"word{i}" for i in range(100))
DATA = {"caption": 60, "instruction": 40, "answer": 300}
"""Words of a text; each is a token."""
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

    from unigen_ds.data.tokenizers import WordTokenizer
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


def write_records(folder: Path, *, sides: Sequence[int], draws: bool) -> Path:
    """1,200 records: texts, pictures of ``sides`` pixels that are read, and where the model ``draws`` drawn and edited."""
    from PIL import Image

    folder.mkdir(parents=True)
    for side in sides:
        Image.new("RGB", (side, side)).save(folder / f"{side}.png")

    def words(kind: str, i: int) -> str:
        return " ".join(WORDS[(i + k) % len(WORDS)] for k in range(DATA[kind]))

    def record(i: int) -> Any:
        picture = {"type": "image", "image_path": f"{sides[i // 4 % len(sides)]}.png"}
        question = {"role": "user", "type": "text", "content": words("instruction", i)}
        answer = {"role": "assistant", "type": "text", "content": words("answer", i)}
        shown, made = {"role": "user", **picture}, {"role": "assistant", **picture}
        read, edited = {"conversations": [shown, question, answer]}, {"conversations": [shown, question, made]}
        drawn = {"text_prompt": words("caption", i), "image_path": picture["image_path"]}
        return ({"conversations": [question, answer]}, read, *((edited, drawn) if draws else (read, read)))[i % 4]

    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(record(i)) + "\n" for i in range(1200)), encoding="utf-8")
    return path


def overrides(model: str, folder: Path) -> dict[str, Any]:
    """What the shipped recipe lacks here: weights, tokenizer and data."""
    common = {"train_dataloader.dataset.index_workers": 0, "train_dataloader.num_workers": 0,
              "work_dir": str(folder / "run")}  # fmt: skip
    if model == "nanovlm":
        return {**common, "tokenizer.path": str(folder / "chat"), "model.llm": {"vocab_size": 49_218},
                "train_dataloader.dataset.data_path": str(folder / "small" / "train.jsonl")}  # fmt: skip
    return {**common, "model.pretrained": str(folder / "bagel"), "tokenizer.path": str(folder / "bagel"),
            "train_dataloader.dataset.data_path": str(folder / "large" / "train.jsonl")}  # fmt: skip


def planned(model: str, folder: Path, *, world: int, alternatives: bool = True) -> dict[str, Any]:
    """One plan, as plain values."""
    from unigen_ds.core.quantities import size
    from unigen_ds.planning.fits import Reserve, report_values
    from unigen_ds.planning.planned import plan_memory
    from unigen_ds.runner.inspect import announced
    from unigen_ds.runner.settings import load_config

    per_node = min(PER_NODE, world)
    begun = time.perf_counter()
    with announced(world, per_node=per_node):
        config = load_config(RECIPES[model][0], overrides(model, folder), whole=True)
    report = plan_memory(config, world_size=world, per_node=per_node, alternatives=alternatives)
    seconds = time.perf_counter() - begun
    values = report_values(report, Reserve(size("2GiB"), 0.05, size("4GiB")))
    return {"model": model, "devices": world, "seconds": seconds, **values}


def row(engine: Mapping[str, Any], *, on_node: int) -> dict[str, Any]:
    """Of the result file: GiB with the reserve, of a device and of the host of a node."""
    name = engine["title"].removesuffix(" (config)")
    if engine["problem"] is not None:
        return {"engine": name, "problem": engine["problem"]}
    device = max(engine["device"].values())
    return {
        "engine": name,
        "problem": None,
        "device_gib": device / GIB,
        "phase": max(engine["device"], key=engine["device"].__getitem__),
        "node_gib": on_node * max(engine["host"].values()) / GIB,
        "enough_gb": next((gb for gb in MEMORY if device <= gb * GIB), None),
        "traced": engine["traced"],
    }


def table(plans: Iterable[Mapping[str, Any]]) -> list[str]:
    """Markdown of one model: a row for each engine, a column for each number of devices."""
    columns = {plan["devices"]: {one["engine"]: one for one in plan["rows"]} for plan in plans}
    names = dict.fromkeys(name for rows in columns.values() for name in rows)
    lines = ["| engine |" + "".join(f" {n} device{'s' * (n > 1)} |" for n in columns), "|---|" + "---|" * len(columns)]
    for name in names:
        cells = (_cell(rows.get(name)) for rows in columns.values())
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def _cell(one: Mapping[str, Any] | None) -> str:
    if one is None or one["problem"] is not None:
        return ""
    enough = f"**{one['enough_gb']} GB**" if one["enough_gb"] else "too large"
    return f"{one['device_gib']:.1f} / {one['node_gib']:.0f}: {enough}"


def page(record: Mapping[str, Any]) -> str:
    """The tables of docs/planning.md."""
    parts = []
    for model, (_, title) in RECIPES.items():
        plans = [plan for plan in record["plans"] if plan["model"] == model]
        parts.append("\n".join([f"{title}, {plans[0]['largest']}:", "", *table(plans)]))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help="those of: " + " ".join(RECIPES))
    parser.add_argument("--seconds", action="store_true", help="only the time of a plan for 1,024 processes")
    arguments = parser.parse_args()
    from unigen_ds.core import log

    log.setup(rank=0)
    with tempfile.TemporaryDirectory(prefix="plan-table-") as made:
        folder = Path(made)
        write_bagel(folder / "bagel")
        write_records(folder / "large", sides=(1024, 512, 256), draws=True)
        write_records(folder / "small", sides=(512, 256), draws=False)
        from unigen_ds.data.tokenizers import WordTokenizer

        WordTokenizer(words=WORDS).save_pretrained(str(folder / "chat"))
        begun = time.perf_counter()
        found = planned("bagel", folder, world=1024, alternatives=False)
        print(time.perf_counter() - begun)
        print(json.dumps(found, indent=1, default=str)[:6000])
    return 0


if __name__ == "__main__":
    sys.exit(main())
