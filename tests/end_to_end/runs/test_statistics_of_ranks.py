"""Two processes of ``tools/train.py``, each with its own BatchNorm statistics and its own library warnings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.end_to_end.resume.test_launchers import TRAIN, written_config
from tests.processes import ranks

MODULE = '''
import logging
import warnings

from torch import nn

from unigen_ds.core.batch import LossTerms
from unigen_ds.config.registry import MODELS
from unigen_ds.families.bagel.model import UnifiedModel


@MODELS.register_module()
class WithBatchNorm(UnifiedModel):
    """The image loss depends on running statistics, which differ between processes."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.norm = nn.BatchNorm1d(1)
        for module in ("torch.nn.functional", "bitsandbytes.functional", "mine.own"):
            warnings.warn_explicit(f"a warning of {module}", UserWarning, module, 1)
        logging.getLogger("bitsandbytes.cextension").warning("a log line of bitsandbytes")

    def forward(self, batch):
        sums = dict(super().forward(batch).sums)
        noise = batch.flow_noise.reshape(-1, 1).float()
        sums["image"] = sums["image"] + self.norm(noise + 3 * noise.abs().max()).square().sum()
        return LossTerms(sums)
'''


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What both processes print, at a start and at a resume."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "model_with_batch_norm.py").write_text(MODULE)
    (folder / "run").mkdir()
    config = Path(written_config(folder / "run", folder / "data"))
    text = config.read_text().replace("'UnifiedModel'", "'WithBatchNorm'")
    config.write_text(
        text + "\ncustom_imports = dict(imports=['unigen_ds.examples.digits', 'model_with_batch_norm'])\n"
    )
    found = []
    for updates in (2, 3):
        arguments = [str(config), "--resume", "--max-updates", str(updates), "--backend", "fsdp:NO_SHARD"]
        ended = ranks([sys.executable, TRAIN, *arguments], PYTHONPATH=str(folder), LOCAL_WORLD_SIZE="2")
        assert [one.status for one in ended] == [0, 0], ended[0].ending + ended[1].ending
        found.append(ended[0].text + ended[1].text)
    return found


def test_running_statistics_do_not_trigger_the_continuity_warning(printed: list[str]) -> None:
    assert "Continuity: the last update's losses are the recorded ones" in printed[1]
    assert "are not the recorded ones" not in printed[1]


@pytest.mark.parametrize("text", ["a warning of torch.nn", "a warning of bitsandbytes", "a log line of bitsandbytes"])
def test_a_librarys_warning_appears_once_and_not_on_every_rank(text: str, printed: list[str]) -> None:
    assert [out.count(text) for out in printed] == [1, 1]


def test_a_warning_of_the_users_own_code_appears_on_every_rank(printed: list[str]) -> None:
    assert [out.count("a warning of mine.own") for out in printed] == [2, 2]
