"""Weighted mixtures through the real entry: groups, kills, other geometries and workers."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import write_jsonl
from tests.text_run import KeepBatches, run_config, text_config, words
from tools import inspect_data
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.core.errors import ConfigError
from unigen_ds.hooks.base import Hook
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines


def lines(folder: Path, name: str, key: str) -> list[Any]:
    return [line[key] for line in read_lines(folder / "run" / name) if key in line]


def facts(folder: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = Manifest.read(folder / "run" / name).loader
    return values


KINDS = {"text": (61, 9), "talk": (37, 5), "short": (23, 2)}


def mixture(folder: Path, **overrides: Any) -> Any:
    """Three sources in two groups, one of them mandatory, with a part of one of them, packed."""
    for name, (number, longest) in KINDS.items():
        write_jsonl(folder / f"{name}.jsonl", [{"text": words(1 + i * 5 % longest, i)} for i in range(number)])
    kind = "UnifiedGenerationDataset"
    data = [
        dict(type=kind, data_path=str(folder / "text.jsonl"), group="texts", weight=0.7),
        dict(type=kind, data_path=str(folder / "talk.jsonl"), group="texts", weight=0.3, num_used_data=29),
        dict(type=kind, data_path=str(folder / "short.jsonl"), group="short"),
    ]
    settings: dict[str, Any] = dict(
        train_dataloader__dataset=data,
        train_dataloader__groups=dict(texts=dict(weight=9), short=dict(weight=1, mandatory=True)),
        train_dataloader__seq_length=20,
        train_dataloader__packing=dict(type="BestFitPacking", window=24),
        train_dataloader__batch_size=2,
        optim_wrapper__accumulative_counts=2,
        train_cfg=dict(max_updates=40),
        default_hooks__checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False),
        default_hooks__logger=dict(type="LoggerHook", interval=1),
        work_dir=str(folder / "run"),
    )
    return text_config(folder, [{"text": "one"}], **(settings | overrides))


class Halt(Exception):
    pass


class Kill(Hook):
    """Ends the run as SIGKILL does, without a further save, after the updates that are to be done."""

    name, updates = "kill", 0

    def after_update(self, run: Any, result: Any) -> None:
        if run.progress.updates >= self.updates:
            raise Halt


def train_and_kill(config: Any, updates: int) -> None:
    runner, kill = Runner.from_cfg(config), Kill()
    kill.updates = updates
    runner.hooks = [*runner.hooks, kill]
    with pytest.raises(Halt):
        runner.train()


@pytest.mark.slow
def test_a_weighted_mixture_with_a_mandatory_group_is_exact_over_kills(tmp_path: Path) -> None:
    """Killed in the middle of windows, resumed with other splits of the batch and other workers: the same ledger."""
    straight, whole = run_config(mixture(tmp_path / "straight", work_dir=str(tmp_path / "straight" / "run")))
    expected = lines(tmp_path / "straight", "ledger.jsonl", "digest")
    folder = tmp_path / "killed"
    chain = [(7, 2, 2, 0), (8, 4, 1, 3), (23, 1, 4, 1), (31, 4, 1, 0)]
    for number, (stop, batch_size, counts, workers) in enumerate(chain):
        options = dict(train_dataloader__batch_size=batch_size, optim_wrapper__accumulative_counts=counts)
        train_and_kill(mixture(folder, **options, train_dataloader__num_workers=workers, resume=number > 0), stop)
    runner, _ = run_config(mixture(folder, resume=True))
    assert [line["digest"] for line in read_lines(folder / "run" / "ledger.jsonl") if "digest" in line] == expected
    assert runner.progress == straight.progress
    exact(whole.ids)
    for batch in whole.batches:
        names = [sample.split(":")[0] for sample in batch.sample_ids]
        assert names.count("short") >= batch.num_sequences == 2
    path = folder / "run" / "config.py"
    assert inspect_data.main([str(path), "--ledger", str(folder / "run" / "ledger.jsonl"), "--work-dir",
                              str(folder / "run")]) == 0  # fmt: skip


def exact(ids: list[str]) -> None:
    """Each (sample, pass) once. No pass has a sample before the one before it is complete but for one window."""
    assert len(set(ids)) == len(ids)
    draws: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for sample in ids:
        name, index, number = sample.split(":")
        draws[name].append((int(number), int(index)))
    sizes = {"text": 61, "talk": 29, "short": 23}
    for name, pairs in draws.items():
        passes = Counter(number for number, _ in pairs)
        assert max(index for _, index in pairs) < sizes[name], "num_used_data"
        complete = [number for number in sorted(passes) if passes[number] == sizes[name]]
        assert complete == list(range(len(complete))) and len(passes) - len(complete) <= 3
    assert len(draws["short"]) > 3 * sizes["short"]
    share = len(draws["text"]) / (len(draws["text"]) + len(draws["talk"]))
    assert share == pytest.approx(0.7, abs=0.05)


def test_the_log_and_the_checkpoint_report_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_config(mixture(tmp_path, train_cfg=dict(max_updates=2)))
    log = (tmp_path / "run" / "train.log").read_text(encoding="utf-8")
    assert "Data, the mandatory group short: " in log and "more than by its weight" in log
    assert re.search(r"Data, the group texts: \d+ samples an epoch, \d\d\.\d% of all\.", log)
    assert "Data, talk: num_used_data=29: the first 29 of 37 records are used." in log
    loader = facts(tmp_path, "iter_4.pth")
    assert loader["facts"]["groups"]["groups"]["short"] == {"weight": 1.0, "mandatory": True}
    assert loader["phases"][0]["mandatory"] == [[2]] and len(loader["cursor"]["extra"]) == 1
    assert inspect_data.main([str(tmp_path / "run" / "config.py"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    groups = report["groups"]
    assert groups["short"]["share"] > groups["short"]["share_by_weight"] == pytest.approx(0.1, abs=0.01)
    assert report["sources"]["talk"]["num_used_data"] == {"used": 29, "records": 37} and not report["skipped_sources"]
    assert inspect_data.main([str(tmp_path / "run" / "config.py")]) == 0
    output = capsys.readouterr().out
    assert "  num_used_data: the first 29 of 37 records\n" in output and "the mandatory group short: " in output
    assert "the group texts: " in output


APPENDED: dict[str, tuple[Any, Any, list[int] | None]] = {
    "no weights": ([{}, {}, {}], {}, [61, 37, 23]),
    "weights": ([dict(weight=3), dict(weight=2), dict(weight=1)], {}, [61, 40, 20]),
    "a mandatory group": (
        [dict(group="a"), dict(group="b"), dict(group="b")],
        dict(a=dict(weight=9), b=dict(weight=1, mandatory=True)),
        None,
    ),
}
"""Keys of the three sources, their groups, and samples of each in an epoch of all."""


@pytest.mark.parametrize("case", APPENDED)
def test_a_further_data_set_joins_by_append(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The epoch is finished without it; the log, the page of the data and later resumes have numbers of all three."""
    keys, groups, draws = APPENDED[case]

    def train(number: int, updates: int, **more: Any) -> KeepBatches:
        settings = mixture(tmp_path, train_dataloader__groups=groups, **more)
        settings.train_dataloader.dataset = [
            dict(type="UnifiedGenerationDataset", data_path=str(tmp_path / f"{name}.jsonl"), **key)
            for name, key in zip(KINDS, keys[:number], strict=False)
        ]
        runner = Runner.from_cfg(settings, max_updates=updates)
        runner.train()
        return next(hook for hook in runner.hooks if isinstance(hook, KeepBatches))

    before = train(2, 3)
    after = train(3, 12, resume=True, on_data_change="append"), train(3, 24, resume=True)
    names = [sample.split(":")[0] for recorder in after for sample in recorder.ids]
    assert "short" not in names[:20] and names.count("short") > 10
    ids = [sample for recorder in (before, *after) for sample in recorder.ids]
    assert len(ids) == len(set(ids))
    folder = tmp_path / "run"
    log = (folder / "train.log").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"Data, \w+: (\d+) samples drawn an epoch", log)]
    assert len(numbers) == 8 and numbers[2:5] == numbers[5:] and numbers[2:5] == (draws or numbers[2:5])
    page = [str(folder / "config.py"), "--work-dir", str(folder)]
    assert inspect_data.main([*page, "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert [sources[name]["draws_per_epoch"] for name in KINDS] == numbers[5:]
    assert inspect_data.main([*page, "--ledger", str(folder / "ledger.jsonl")]) == 0


def test_wrong_groups_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"groups.short.weight is 0"):
        Runner.from_cfg(mixture(tmp_path, train_dataloader__groups__short__weight=0))
    with pytest.raises(ConfigError, match=r"train_dataloader.groups.short.mandatry'. Remedy: did you mean 'mandatory'"):
        mistaken = mixture(tmp_path)
        mistaken.train_dataloader.groups.short.mandatry = True
        Runner.from_cfg(mistaken)
    with pytest.raises(ConfigError, match=r"num_used_data is 0"):
        config = mixture(tmp_path)
        config.train_dataloader.dataset[1].num_used_data = 0
        Runner.from_cfg(config)
    with pytest.raises(ConfigError, match=r"packing is None.*BestFitPacking"):
        Runner.from_cfg(mixture(tmp_path, train_dataloader__packing=None))
    with pytest.raises(ConfigError, match=r"max_sample_tokens is 21"):
        Runner.from_cfg(mixture(tmp_path, train_dataloader__max_sample_tokens=21))
