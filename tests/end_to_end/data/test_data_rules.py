"""The rules of reading data: a checkpoint of other rules is refused; data that no rule touches keeps its identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text_run import text_config, trained
from tools import inspect_data
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import CheckpointError
from unigen_ds.data.samples.sample import RULE_VERSIONS
from unigen_ds.runner import Runner

RECORDS = [{"text": "one two three"}] * 9


def config(folder: Path, **overrides: Any) -> Any:
    return text_config(folder, RECORDS, default_hooks__checkpoint=dict(interval=1, by_epoch=False), **overrides)


def test_a_checkpoint_of_other_rules_is_refused_by_their_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config(tmp_path, train_cfg=dict(max_updates=1)))
    (path,) = (tmp_path / "run").glob("iter_*.pth")
    manifest = Manifest.read(path)
    facts = manifest.loader["facts"]
    assert facts["rules"] == RULE_VERSIONS == dict(overflow=1, images=1, special_tokens=1, mixture=1, image_folders=1)
    for rules, shown in (({**RULE_VERSIONS, "images": 0}, "'images': 0"), ({"overflow": 2}, "'overflow': 2"), (2, "2"),
                         (None, "None")):  # fmt: skip
        facts["rules"] = rules
        (path / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        for choice in ("refuse", "restart"):
            with pytest.raises(CheckpointError) as raised:
                Runner.from_cfg(config(tmp_path, resume=True, on_data_change=choice))
            text = str(raised.value)
            assert "the checkpoint's data follows the rules" in text and shown in text
            assert "'image_folders': 1} (docs/data.md)" in text and "the unigen_ds that wrote it" in text
    assert inspect_data.main([str(tmp_path / "run" / "config.py"), "--work-dir", str(tmp_path / "run")]) == 1
    assert "the checkpoint's data follows the rules None" in capsys.readouterr().err


def test_the_identity_of_data_that_no_rule_touches_stays_the_same(tmp_path: Path) -> None:
    """Pinned: checkpoints, indices and caches are recognised by these."""
    trained(config(tmp_path, train_cfg=dict(max_updates=1)))
    (path,) = (tmp_path / "run").glob("iter_*.pth")
    loader = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["loader"]
    assert (loader["fingerprint"], loader["facts"]["digests"], loader["facts"]["records"]) == (
        "3ef431a3cb1dfa3168bc9648327b227d", ["0f349d9b8dcc7cfbfdcb051c10a6fa51"], ["6cacca055fad63f5a3a27d5485930200"],
    )  # fmt: skip
