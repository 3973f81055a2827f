"""The rules of reading data: a checkpoint of other rules is refused; data that no rule touches keeps its identity."""

from __future__ import annotations

import json
from pathlib import Path

from tests.text_run import run_config, text_config


def test_the_identity_of_data_that_no_rule_touches_stays_the_same(tmp_path: Path) -> None:
    """Pinned: checkpoints, indices and caches are recognised by these."""
    run_config(text_config(tmp_path, [{"text": "one two three"}] * 9, train_cfg=dict(max_updates=1)))
    (path,) = (tmp_path / "run").glob("iter_*.pth")
    loader = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["loader"]
    assert (loader["fingerprint"], loader["facts"]["digests"], loader["facts"]["records"]) == (
        "3ef431a3cb1dfa3168bc9648327b227d", ["0f349d9b8dcc7cfbfdcb051c10a6fa51"], ["6cacca055fad63f5a3a27d5485930200"],
    )  # fmt: skip
