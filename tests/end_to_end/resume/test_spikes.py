"""Loss spikes of poisoned records: the run goes back and leaves them out, as ``--skip-sequences`` does by hand."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.support import write_jsonl
from tests.end_to_end.data.test_mixtures import train_and_kill
from tests.end_to_end.engines.launch import tensors, unequal
from tests.support.needs import slow
from tests.support.processes import ranks
from tests.text_run import CONFIG, WORDS, run_config, words
from tools import inspect_data, replay, report
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.checkpoint.store import Lineage
from unigen_ds.core.errors import ConfigError, TrainingError
from unigen_ds.core.progress import Geometry
from unigen_ds.core.shards import first_names
from unigen_ds.data.batches.statistics import derive
from unigen_ds.hooks.base import Hook
from unigen_ds.runner import Runner
from unigen_ds.runner.open.replayed import replay as built_again
from unigen_ds.runner.settings.tree import Settings, load_config
from unigen_ds.runner.start.build import build_data
from unigen_ds.system.journals import read_lines

UPDATES, SIZE = 48, 2
"""A checkpoint after every tenth; sequences of an update."""
POISON = (64, 66)
"""Sequences of update 33: between the checkpoints of updates 30 and 40."""
SPIKE = {"type": "SpikeHook", "interval": 4, "window": 20}


def write_config(folder: Path, poison: tuple[int, int] = POISON) -> Path:
    """A packed mixture of two sources whose records count up; those of some sequences are of random words."""
    folder.mkdir(exist_ok=True)
    rng, sources = random.Random(0), {"long": 6, "short": 3}
    records = {name: [{"text": words(size, i)} for i in range(150)] for name, size in sources.items()}
    dataset = [dict(type="UnifiedGenerationDataset", name=name, weight=weight, data_path=str(folder / f"{name}.jsonl"))
               for name, weight in (("long", 3), ("short", 1))]  # fmt: skip
    body = CONFIG.format(words=list(WORDS), data="", work_dir=str(folder / "run"))
    body += f"""
train_dataloader.update(dataset={dataset!r}, batch_size=None, global_batch_size={SIZE})
optim_wrapper["optimizer"]["lr"] = 3e-2
train_cfg = dict(max_updates={UPDATES})
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=10, unit="update"))
custom_hooks = [{SPIKE!r}, dict(type="EMAHook", momentum=0.1)]
"""
    (folder / "config.py").write_text(body, encoding="utf-8")
    for spoiled in (False, True):
        if spoiled:
            for name, number, _ in (sample.split(":") for sample in samples_of(folder / "config.py", poison)):
                text = " ".join(rng.choice(WORDS) for _ in range(sources[name]))
                records[name][int(number)] = {"text": text}
        for name in sources:
            write_jsonl(folder / f"{name}.jsonl", records[name])
    return folder / "config.py"


def samples_of(config: Path, sequences: tuple[int, int] = POISON) -> list[str]:
    stream = build_data(Settings.from_config(load_config(config)), geometry=Geometry(2), ruler=None).stream
    return [sample for row in derive(stream, *sequences) for sample in row]


def values(folder: Path) -> list[tuple[float, ...]]:
    """The numbers of the updates that count, from update 31 on."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "loss" in line and line["update"] > 30]
    return [tuple(line[key] for key in ("update", "loss", "grad_norm", "lr", "sequences", "samples")) for line in lines]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [*slow("single", "deepspeed:zero2"), "fsdp"])
def test_a_run_that_goes_back_is_the_run_that_skips_by_hand(tmp_path: Path, engine: str, capsys: Any) -> None:
    path = write_config(tmp_path / "spiked")
    run, hand, world = tmp_path / "spiked" / "run", tmp_path / "hand", 1 if engine == "single" else 2
    command = [sys.executable, "tools/train.py", str(path), "--backend", engine]
    processes = ranks(command, world_size=world)
    assert [one.status for one in processes] == [0] * world, processes[0].ending
    log = (run / "train.log").read_text()
    samples = first_names(samples_of(path))
    assert log.count(f"Spike: a loss spike in update 33 (sequences 64:66, samples {samples}): the loss is ") == 1, log
    assert "iter_30.pth and leaves out sequences 64:66, 2 in all (rollback 1 of 3)" in log
    processes = ranks(
        [*command, "--work-dir", str(hand), "--resume", str(run / "iter_30.pth"), "--skip-sequences", "64:66"],
        world_size=world,
    )
    assert [one.status for one in processes] == [0] * world, processes[0].ending
    assert values(run) == values(hand) and len(values(hand)) == UPDATES - 31, "the skipped sequences count"
    last = [Path((folder / "last_checkpoint").read_text().strip()) for folder in (run, hand)]
    assert unequal(*map(tensors, last)) == []
    states = [json.loads((one / "hooks.json").read_text())["spike"] for one in last]
    assert states[0] == states[1] and len(states[0]["recent"]) == 20
    manifests = [Manifest.read(one) for one in last]
    assert [one.loader["skips"][0][:2] for one in manifests] == [[64, 66]] * 2
    assert manifests[0].progress == manifests[1].progress and manifests[0].progress.sequences == UPDATES * SIZE
    # another split and process count, to the end of a longer training: no option is needed any more
    more = {"resume": True, "train_cfg.max_updates": UPDATES + 10, "optim_wrapper.accumulative_counts": 2}
    Runner.from_cfg(load_config(path, more)).train()
    ledger = run / "ledger.jsonl"
    assert inspect_data.main([str(path), "--ledger", str(ledger)]) == 0
    out = capsys.readouterr().out
    assert "sequences 64:66 were left out: spike at update 33: the loss is" in out, out
    assert f"{UPDATES + 9} updates, sequences 0:{(UPDATES + 10) * SIZE}" in out and "every digest agrees" in out
    text = ledger.read_text().replace('"left_out": [[64, 66', '"left_out": [[64, 65')
    ledger.write_text(text)
    assert inspect_data.main([str(path), "--ledger", str(ledger)]) == 1, "another range would be noticed"


def test_a_skip_is_kept_by_every_later_start_and_a_wrong_one_is_refused(tmp_path: Path, caplog: Any) -> None:
    path = write_config(tmp_path / "a")
    run = tmp_path / "a" / "run"
    options: dict[str, Any] = {"custom_hooks": [], "default_hooks.checkpoint.interval": 10}
    Runner.from_cfg(load_config(path, options), max_updates=30).train()
    again: dict[str, Any] = {**options, "resume": True}
    for wrong, problem in {
        "50:62": "sequences 50:62 cannot be left out: this run continues at sequence 60, and those before",
        "200:210": "sequences 200:210 cannot be left out: the run ends at sequence 96",
        "66:64": "skip_sequences has '66:64'. Allowed: A:B with A < B",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            Runner.from_cfg(load_config(path, {**again, "skip_sequences": [wrong]}))
    train_and_kill(load_config(path, {**again, "skip_sequences": ["64:66"]}), 35)
    assert Lineage.read(run).skips == ((64, 66, "by hand"),), "no checkpoint has it yet"
    assert Runner.from_cfg(load_config(path, again)).skips == Lineage.read(run).skips
    overlapping = {**again, "skip_sequences": ["64:66", "65:68", "90:95"]}
    runner = Runner.from_cfg(load_config(path, overlapping))
    assert "Sequences 65:68 overlap 64:66, which are left out already" in (run / "train.log").read_text()
    runner.train()
    assert [str(skip) for skip in runner.skips] == ["64:68", "90:95"]
    lines = [line for line in read_lines(run / "ledger.jsonl") if "digest" in line]
    left_out = {line["update"]: (line["sequences"], [one[:2] for one in line["left_out"]])
                for line in lines if "left_out" in line}  # fmt: skip
    assert left_out == {33: ([64, 70], [[64, 68]])}
    assert lines[-1]["sequences"] == [88, 90], "the next update would end at sequence 97, after the end at 96"
    assert Runner.from_cfg(load_config(path, overlapping)).skips == runner.skips, "the same command once more"
    assert report.main([str(run)]) == 0
    assert re.findall(r">(\d+:\d+)<", (run / "report.html").read_text()) == ["64:68", "90:95"]


class StopHook(Hook):
    """SIGTERM in update 34: the look at its end finds the spike of update 33."""

    def before_update(self, run: Any) -> None:
        if run.progress.updates == 33:
            os.kill(os.getpid(), signal.SIGTERM)


def test_limits_of_going_back(tmp_path: Path) -> None:
    path = write_config(tmp_path / "a")
    run = tmp_path / "a" / "run"
    with pytest.raises(TrainingError, match=r"loss spike in update 33 .*The run went back 0 times") as error:
        Runner.from_cfg(load_config(path, {"custom_hooks": [{**SPIKE, "max_rollbacks": 0}]})).train()
    look = str(error.value).partition("`python tools/replay.py ")[2].partition("`")[0].split()
    assert look == [str(run), "--update", "33"] and "--resume --skip-sequences 64:66" in str(error.value)
    assert replay.main(look) == 0
    runner = Runner.from_cfg(load_config(path, {"resume": True}))
    runner.hooks = [StopHook(), *runner.hooks]
    assert runner.train().updates == 30 and runner.stop_reason == "signal", "back at the checkpoint, and stopped"
    assert [str(skip) for skip in Lineage.read(run).skips] == ["64:66"]
    Runner.from_cfg(load_config(path, {"resume": True})).train()
    assert (run / "train.log").read_text().count("WARNING Spike:") == 1
    work_dir = {"work_dir": str(tmp_path / "b"), "default_hooks.checkpoint.interval": 40}
    with pytest.raises(TrainingError, match=r"there is no checkpoint before it.*begin again in another --work-dir"):
        Runner.from_cfg(load_config(path, work_dir)).train()


def test_an_update_is_built_again_and_shown(tmp_path: Path, capsys: Any) -> None:
    path = write_config(tmp_path / "a")
    hooks = [{"type": "KeepBatches"}, {**SPIKE, "interval": 1}]
    options = {"custom_hooks": hooks, "train_dataloader.global_batch_size": None, "train_dataloader.batch_size": 1}
    runner, hook = run_config(load_config(path, {**options, "optim_wrapper.accumulative_counts": SIZE}))
    run, trained_from = runner.work_dir, hook.batches  # of the hook's last life: from update 31 on
    for update in (31, 33, UPDATES - 1):
        mine = [one.batch for one in built_again(run, update=update).batches]
        for one, other in zip(mine, trained_from[SIZE * (update - 31) :][:SIZE], strict=True):
            (a, names), (b, others) = one.parts(), other.parts()
            assert names == others and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    page = tmp_path / "page.html"
    assert replay.main([str(run), "--update", "31", "--html", str(page), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert Path(report["checkpoint"]).name.startswith("iter_") and report["sequences"] == [60, 62]
    line = next(one for one in read_lines(run / "metrics.jsonl") if one["update"] == 31 and "loss" in one)
    sizes = {"long": 7, "short": 4}  # targets: the words and the end
    counts = [sizes[one["sample"].split(":")[0]] for one in report["samples"]]
    total = sum(one["loss"] * count for one, count in zip(report["samples"], counts, strict=True))
    assert total / sum(counts) == pytest.approx(line["loss"], rel=1e-5)
    assert page.read_text().count("gradient norm") == len(report["samples"])
    capsys.readouterr()
    means = []
    for what in (["--sequences", "64:66"], ["--update", "33"]):
        assert replay.main([str(run), *what, "--json"]) == 0
        means.append(statistics.mean(one["loss"] for one in json.loads(capsys.readouterr().out)["samples"]))
    assert means[0] > 2 * means[1], means
    assert replay.main([str(run), "--sequences", "1:2"]) == 0, "before the first checkpoint: the samples alone"
    (out, err), samples = capsys.readouterr(), samples_of(path, (1, 2))
    assert re.findall("^  .+", out, re.M) == [f"  sequence 1  {one}" for one in samples] and "no losses" in err
    assert replay.main([str(run), "--update", "77"]) == 1
    assert "Allowed: updates 1 to 47" in capsys.readouterr().err
    text = (run / "ledger.jsonl").read_text()
    digest = next(one["digest"] for one in read_lines(run / "ledger.jsonl") if one.get("update") == 34)
    (run / "ledger.jsonl").write_text(text.replace(digest, "0" * 16))
    assert replay.main([str(run), "--update", "34"]) == 1
    assert "update 34 was trained on other samples" in capsys.readouterr().err
