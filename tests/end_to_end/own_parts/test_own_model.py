"""The walk-through of ``docs/extending.md``: its files trained, resumed, asked and published.

A second model is derived from it, which hides tokens of a picture and fills them in step by step, as Show-o does.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.support import write_jsonl
from tests.processes import ROOT
from tools.evaluate import main as evaluate
from tools.export import main as export
from tools.generate import main as generate
from tools.train import main as train_tool
from tools.zero_to_fp32 import main as zero_to_fp32
from unigen_ds.checkpoint.convert import read_source
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.store import open_reader
from unigen_ds.config.registry import REGISTRIES
from unigen_ds.hooks.evaluate.evaluate import FOLDER
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_model
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.journals import read_lines

SKELETON = ROOT / "docs" / "painter"
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}
UPDATES, CUT_AT = 60, 20
MODULES = ("painter", "filler")
FILLER = '''
"""Draws by filling in hidden tokens; texts and pictures have a loss of their own."""
import json
from dataclasses import dataclass

import torch
from painter import CODES, TOKENS, Painter, PainterDirectory, PainterFamily, PainterInferencer, PainterProcessor
from painter import Picture, decode, encode

from unigen_ds.core.batch import NOISE, LossTerms, PackedBatch
from unigen_ds.config.registry import FAMILIES, HOOKS, METRICS, MODELS
from unigen_ds.system.seeding import generator
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.samples.splits import PackedBuilder
from unigen_ds.data.samples.sample import IGNORED
from unigen_ds.evaluation.metrics import Metric
from unigen_ds.hooks.base import Hook
from unigen_ds.inference.generated import Generated
from unigen_ds.models.losses import text_losses


@dataclass(frozen=True)
class Hidden:
    ids: list
    targets: list

    def place(self, builder, position):
        builder.add_tokens(self.ids, self.targets, position, mode=NOISE)
        return position + TOKENS


class HiddenPicture(Picture):
    num_tokens = property(lambda self: TOKENS + (not self.drawn))

    def load(self, processor, key):
        if not self.drawn:
            return super().load(processor, key)
        codes = [processor.first + code for code in encode(processor.read_image(self.path))]
        share, *draws = torch.rand(1 + TOKENS, generator=generator(*key, "hide")).tolist()
        hide = [draw <= share or not number for number, draw in enumerate(draws)]
        ids = [processor.hidden if one else code for one, code in zip(hide, codes)]
        return Hidden(ids, [code if one else IGNORED for one, code in zip(hide, codes)])


@dataclass(frozen=True, kw_only=True)
class FillerBatch(PackedBatch):
    first: int

    def codes(self):
        return self.text_target_ids >= self.first

    def target_counts(self):
        return {"text": float((~self.codes()).sum()), "code": float(self.codes().sum())}


class FillerBuilder(PackedBuilder):
    def batch(self, *fields):
        return FillerBatch(**vars(super().batch(*fields)), first=self.processor.first)


class FillerProcessor(PainterProcessor):
    hidden = property(lambda self: self.first + CODES - 1)  # no picture of the test has the last code

    def builder(self):
        return FillerBuilder(self)

    def splits_of(self, turns, ids, where, *, keep_images):
        for split in super().splits_of(turns, ids, where, keep_images=keep_images):
            yield HiddenPicture(split.path, split.drawn) if isinstance(split, Picture) else split


@MODELS.register_module()
class Filler(Painter):
    forward_methods = ("next_token_logits", "logits")

    def forward(self, batch):
        logits, codes = self.logits(batch, batch.text_target_index), batch.codes()
        losses = text_losses(logits, batch.text_target_ids, batch.text_target_weight)
        return LossTerms({"text": (losses * ~codes).sum(), "code": (losses * codes).sum()})


@dataclass(frozen=True)
class Filling:
    steps: int = 4


class FillerInferencer(PainterInferencer):
    @torch.no_grad()
    def answer(self, request, length, sampling, flow):
        if request.wanted == "text":
            return super().answer(request, length, sampling, flow)
        first, hidden, random = self.processor.first, self.processor.hidden, generator(request.seed, "draw")
        ids = torch.full((TOKENS,), hidden)
        for left in range(flow.steps, 0, -1):
            batch = pack_documents([[*request.prompt, Hidden(ids.tolist(), [IGNORED] * TOKENS)]], self.processor)
            chances = self.model.logits(batch, slice(-TOKENS, None))[:, first:hidden].float().softmax(-1)
            found, of_hidden = torch.multinomial(chances, 1, generator=random), ids == hidden
            sure = chances.gather(1, found)[:, 0].masked_fill(~of_hidden, -1.0)
            fixed = sure.topk(-(-int(of_hidden.sum()) // left)).indices
            ids[fixed] = found[fixed, 0] + first
        return Generated(f"{flow.steps} steps", [decode((ids - first).numpy())])


class FillerDirectory(PainterDirectory):
    def recognises(self, folder):
        return super().recognises(folder) and "Filler" in (folder / "painter.json").read_text()


@FAMILIES.register_module()
class FillerFamily(PainterFamily):
    model, processor_type, inferencer = Filler, FillerProcessor, FillerInferencer
    terms, drawing, published = ("text", "code"), Filling, (FillerDirectory(),)


@METRICS.register_module()
class Difference(Metric):
    name, predicts, compares = "difference", "image", "image"

    def rows(self, predictions, references, keys):
        import numpy as np

        pairs = zip(predictions, references)
        return [[float(np.abs(np.asarray(a, float) - np.asarray(b, float)).mean() / 255)] for a, b in pairs]

    def values(self, table):
        return {self.name: float(table.mean())}


@HOOKS.register_module()
class ModelHook(Hook):
    def after_train(self, run):
        (run.work_dir / "model.json").write_text(json.dumps([type(run.model).__name__, len(run.model.shard_units())]))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``painter.py`` and ``config.py`` of the page, ``filler.py``, and data; all on Python's path."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(SKELETON / "painter.py", folder)
    config = (SKELETON / "config.py").read_text(encoding="utf-8")
    (folder / "config.py").write_text(config.replace('"colours.jsonl"', repr(str(folder / "colours.jsonl"))))
    (folder / "filler.py").write_text(FILLER, encoding="utf-8")
    records: list[dict[str, Any]] = []
    for name, colour in COLOURS.items():
        Image.new("RGB", (40, 32), colour).save(folder / f"{name}.png")
        asked = [{"from": "human", "value": "<image>\nwhat is this"}, {"from": "gpt", "value": name}]
        records += [{"text_prompt": f"draw {name}", "image_path": f"{name}.png"}]
        records += [{"image": f"{name}.png", "conversations": asked}]
    write_jsonl(folder / "colours.jsonl", records)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def forgotten() -> Any:
    """As in a process that has imported none of the modules; what a test imports is replaced by what was there."""
    modules = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    removed: list[tuple[Any, str, Any]] = []
    for registry in REGISTRIES:
        own = [name for name, made in registry.module_dict.items() if made.__module__ in MODULES]
        removed += [(registry.module_dict, name, registry.module_dict.pop(name)) for name in own]
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(modules)
    for names, name, made in removed:
        names[name] = made


def config(folder: Path, name: str, **changes: Any) -> Any:
    given = {"work_dir": str(folder / name), **{key.replace("__", "."): value for key, value in changes.items()}}
    return load_config(folder / "config.py", given)


def train(folder: Path, name: str, updates: int, **changes: Any) -> list[dict[str, Any]]:
    """The lines of the log with a loss."""
    Runner.from_cfg(config(folder, name, **changes), max_updates=updates).train()
    return [line for line in read_lines(folder / name / "metrics.jsonl") if "loss" in line]


PAINTER: dict[str, Any] = {
    "default_hooks__checkpoint": {"by_epoch": False, "interval": 20},
    "default_hooks__logger": {"interval": 1},
}
FILLING: dict[str, Any] = {
    **PAINTER,
    "custom_imports": {"imports": ["filler"]},
    "model__type": "Filler",
    "loss_weights": {"code": 2.0},
    "custom_hooks": [
        {"type": "PreviewHook", "interval": 30, "prompts": ["draw red"], "num_held_out": 1, "flow": {"steps": 3}},
        {"type": "EvaluateHook", "unit": "update", "interval": 30, "metrics": ["Difference"],
         "generation": {"flow": {"steps": 2}}},
        {"type": "ModelHook"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        "painter": train(folder, "painter", UPDATES, **PAINTER),
        "filler": train(folder, "filler", UPDATES, **FILLING),
    }


@pytest.mark.parametrize(("name", "changes"), [("painter", PAINTER), ("filler", FILLING)])
def test_it_trains_and_goes_on_to_the_bit(name: str, changes: Any, folder: Path, runs: Any) -> None:
    whole = runs[name]
    assert whole[-1]["loss"] < 0.2 * whole[0]["loss"]
    still = {**changes, "custom_hooks": [], "train_dataloader__num_workers": 1}
    train(folder, f"{name}-parts", CUT_AT, **still)
    parts = train(folder, f"{name}-parts", CUT_AT + 10, resume=True, **still)
    keys = [key for key in whole[0] if key.startswith("loss") or key in ("grad_norm", "tokens", "update")]
    assert [[line.get(key) for key in keys] for line in parts] == [
        [line.get(key) for key in keys] for line in whole[: CUT_AT + 10]
    ]


@pytest.mark.parametrize("name", ["painter", "filler"])
def test_its_previews_draw_and_answer(name: str, folder: Path, runs: Any) -> None:
    newest = max((folder / name / "previews").glob("*.json"), key=lambda path: int(path.stem))
    rows = json.loads(newest.read_text())
    assert [row["error"] for row in rows] == [""] * len(rows)
    read, drawn = (next(row for row in rows if row["record"] == f"colours:{k}") for k in (1, 0))
    assert (read["prompt"], read["text"]) == ("what is this", "red") and drawn["reference"].endswith("red.png")
    assert name == "painter" or {row["text"] for row in rows if row is not read} == {"3 steps"}


def test_metrics_of_pictures_and_hooks_see_the_model(folder: Path, runs: Any) -> None:
    assert json.loads((folder / "filler" / "model.json").read_text()) == ["Filler", 2]
    found = [line for line in read_lines(folder / "filler" / "metrics.jsonl") if "val/difference" in line]
    assert len(found) == 2 and found[-1]["val/difference"] < found[0]["val/difference"] + 0.1
    stored = json.loads((folder / "filler" / FOLDER / f"{UPDATES}.json").read_text())
    assert "'steps': 2" in json.dumps(stored)


def pictures(out: Path) -> list[Any]:
    return [np.asarray(Image.open(path)).tolist() for path in sorted(out.glob("*.png"))]


def test_every_tool_reads_its_directory_where_only_config_imports_it(
    folder: Path, runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], forgotten: None
) -> None:
    run, out, own = str(folder / "filler"), str(tmp_path / "out"), tmp_path / "config.py"
    changed = "\ncustom_imports = dict(imports=['filler'])\nmodel['type'] = 'Filler'\ncustom_hooks = []\n"
    own.write_text((folder / "config.py").read_text() + changed)
    ask = ["--prompt", "draw green", "--flow", "steps=5", "--device", "cpu", "--out"]
    assert generate([run, *ask, str(tmp_path / "a")]) == 2 and "custom_imports" in capsys.readouterr().err
    assert generate([run, *ask, str(tmp_path / "a"), "--config", str(own)]) == 0
    assert "5 steps" in capsys.readouterr().out and len(pictures(tmp_path / "a")) == 1
    assert export([run, out, "--config", str(own)]) == 0


@pytest.mark.parametrize("tool", ["generate", "evaluate", "zero_to_fp32", "export"])
def test_a_published_directory_needs_config(
    tool: str, folder: Path, runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], forgotten: None
) -> None:
    """In a process that has not imported the family; then with the config, whose modules are imported first."""
    source, out = str(folder / "published"), tmp_path / "out"
    if not (folder / "published").exists():
        assert export([str(folder / "painter"), source, "--allow-custom-imports"]) == 0
        for name in MODULES:
            sys.modules.pop(name, None)
        for registry in REGISTRIES:
            for name in [n for n, made in registry.module_dict.items() if made.__module__ in MODULES]:
                registry.module_dict.pop(name)
    command = {
        "generate": (generate, [source, "--prompt", "draw red", "--device", "cpu", "--out", str(out)]),
        "evaluate": (evaluate, [source, "--data", str(folder / "colours.jsonl"), "--out", str(tmp_path / "v.json")]),
        "zero_to_fp32": (zero_to_fp32, [source, str(out)]),
        "export": (export, [source, str(out)]),
    }
    main, arguments = command[tool]
    assert main(arguments) != 0 and "--config" in capsys.readouterr().err
    assert main([*arguments, "--config", str(folder / "config.py")]) == 0
    newest = read_source(folder / "painter")
    trained = {
        name: newest.reader.read("master", name, 0, newest.reader.numel("master", name))
        for name in newest.reader.names("master")
    }
    if tool == "zero_to_fp32":
        merged = torch.load(out / "pytorch_model.bin")
        assert all(torch.equal(merged[name].flatten(), tensor) for name, tensor in trained.items())
    if tool == "export":
        model, _ = open_model(out)
        assert all(torch.equal(dict(model.state_dict())[name].flatten(), t) for name, t in trained.items())
    if tool == "evaluate":
        found = json.dumps(json.loads((tmp_path / "v.json").read_text()))
        last = [line for line in read_lines(folder / "painter" / "metrics.jsonl") if "val/loss" in line][-1]
        assert repr(last["val/loss"])[:8] in found
    if tool == "generate":
        assert len(pictures(out)) == 1


CHECKS = {"custom_imports": {"imports": ["painter", "tests.own_checks"]}, "custom_hooks": []}


def test_own_checks_of_the_checklist_and_of_the_dry_run(
    folder: Path, runs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {**PAINTER, **CHECKS}
    train(folder, "checked", CUT_AT, **own)
    runner = Runner.from_cfg(config(folder, "checked", resume=True, **own))
    assert runner.progress.updates == CUT_AT
    log = (folder / "checked" / "train.log").read_text()
    assert "own.words" not in log  # what is ok is not shown
    options = [
        "--cfg-options",
        f"work_dir={folder / 'dry'}",
        "custom_imports={'imports':['painter','tests.own_checks']}",
    ]
    assert train_tool([str(folder / "config.py"), "--dry-run", *options]) in (0, 1)
    shown = capsys.readouterr().out
    order = re.findall(r"^(?:ok|warning|problem|not checked) +(\w+)  ", shown, re.MULTILINE)
    assert order[0] == "devices" and order[-1] == "words" and "14 ids" in shown


def test_a_training_of_another_trainer_goes_on_with_its_moments(folder: Path, runs: Any, tmp_path: Path) -> None:
    own = {**PAINTER, **CHECKS}
    whole = train(folder, "straight", CUT_AT + 4, **own)
    checkpoint = folder / "straight" / f"iter_{CUT_AT}.pth"
    reader = open_reader(checkpoint, Manifest.read(checkpoint))
    shapes = {name: shape for (kind, name), shape in reader.shapes.items() if kind == "master"}
    kinds = ("master", "exp_avg", "exp_avg_sq", "step")
    state = {
        kind: {
            n: reader.read(kind, n, 0, reader.numel(kind, n)).clone().view(shapes[n] if kind != "step" else (1,))
            for n in shapes
        }
        for kind in kinds
    }
    (tmp_path / "foreign").mkdir()
    torch.save({**state, "updates": CUT_AT}, tmp_path / "foreign" / "notebook.pt")
    lines = train(folder, "adopted", CUT_AT + 4, resume=str(tmp_path / "foreign"), **own)
    keys = ("update", "loss", "grad_norm", "lr")
    for line, other in zip(lines, whole[CUT_AT:], strict=True):
        assert [line[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-6)
    log = (folder / "adopted" / "train.log").read_text()
    assert "a notebook" in log and "own.words" in log
