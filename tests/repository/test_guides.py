"""docs/troubleshooting.md: what it proposes is valid, and its plans are those that the tools propose."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.support.processes import ROOT
from unigen_ds.backends.deepspeed.deepspeed import DeepSpeedBackend
from unigen_ds.config.overrides import parse_override, with_backend
from unigen_ds.core.progress import Geometry
from unigen_ds.data.settings import TrainDataloader
from unigen_ds.examples.digits import DigitsDataset
from unigen_ds.resume.geometry import memory_plans
from unigen_ds.runner.settings.tree import Settings, load_config

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
COMMANDS = [line for line in PAGE.splitlines() if "tools/train.py " in line and "--cfg-options" in line]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_recipe_is_a_valid_change_of_its_config(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", re.findall(r"--nproc_per_node (\d+)", line)[0])
    words = shlex.split(line.partition("tools/train.py ")[2])
    changes = dict(map(parse_override, words[words.index("--cfg-options") + 1 :]))
    overrides = with_backend(changes, words[words.index("--backend") + 1]) if "--backend" in words else changes
    settings = Settings.from_config(load_config(words[0], overrides))
    for path, value in changes.items():
        node = settings.config
        for key in path.split("."):
            node = node[int(key)] if key.isdecimal() else node[key]
        assert node == value


def test_the_table_of_the_plans_has_what_the_tools_propose(monkeypatch: pytest.MonkeyPatch) -> None:
    block = PAGE.partition("<!-- plans: 128 x 1 x 2 -->")[2].partition("<!-- end -->")[0]
    table = re.findall(r"^\| (\w) \| (\d+) x (\d+) x (\d+) \|", block, re.MULTILINE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = TrainDataloader.parse({"batch_size": 128, "dataset": {"type": DigitsDataset, "root": "."}})
    plans = memory_plans(Geometry(128, 1, 2), backend=DeepSpeedBackend(config="zero2"), loader=loader, recomputes=False)
    rows = [(p.name, p.geometry.batch_size, p.geometry.accumulative_counts, p.geometry.dp_size) for p in plans]
    assert [(name, *map(int, sizes)) for name, *sizes in table] == rows
    assert {plan.geometry.global_batch_size for plan in plans} == {256}
