"""Statistics over ranks, the means of an epoch, the alarm on gradient norms, the estimate of the total time."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as td

from tests.hooks.tiny_run import TinyRun
from tests.support.processes import together
from tests.text_run import WORDS, word_config, write_jsonl
from unigen_ds.config.registry import MODELS
from unigen_ds.core.batch import Batch, LossTerms, PackedBatch
from unigen_ds.families.decoder_lm.family import DecoderLM
from unigen_ds.hooks.log.logger import FEWEST, LoggerHook
from unigen_ds.hooks.log.timer import IterTimerHook
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines


class CountedBatch(Batch):
    num_tokens = property(lambda self: 50 * self.num_samples)  # type: ignore[assignment]
    num_images = property(lambda self: 3 * self.num_samples)  # type: ignore[assignment]


@MODELS.register_module(force=True)
class Spiking(DecoderLM):
    """Its loss, and so its gradient, is 1000 times as large in update 24 of a run with one micro-batch an update."""

    calls = 0

    def forward(self, batch: PackedBatch) -> LossTerms:
        terms = super().forward(batch)
        self.calls += 1
        return LossTerms({name: value * (1000.0 if self.calls == 24 else 1.0) for name, value in terms.sums.items()})


def test_a_real_run_has_all_of_them(tmp_path: Path) -> None:
    """30 updates through the runner: the means of two epochs, statistics, one warning and the estimate."""
    records = [{"text": " ".join(WORDS[(k + n) % 10] for n in range(5))} for k in range(60)]  # equally many targets
    write_jsonl(tmp_path / "train.jsonl", records)
    config = word_config(
        tmp_path,
        model__type="Spiking",
        train_cfg={"max_updates": 30},
        train_dataloader__packing=None,
        default_hooks__logger__statistics_interval=10,
    )
    Runner.from_cfg(config).train()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "event" not in line]
    ends = {line["update"]: line for line in lines if "epoch_loss" in line}
    assert [*ends] == [15, 30] and ends[15]["epoch_loss"] == pytest.approx(sum(losses[:15]) / 15, rel=1e-6)
    assert ends[30]["epoch_loss"] == pytest.approx(sum(losses[15:]) / 15, rel=1e-6), "the second one alone"
    assert ends[15]["epoch_loss/text"] == ends[15]["epoch_loss"] and ends[15]["epoch_tokens_per_second"] > 0
    assert [line["update"] for line in lines if line.get("event") == "training_stats"] == [10, 20, 30]
    log = (tmp_path / "run" / "train.log").read_text()
    texts = [line.partition("training_stats at update ")[2] for line in log.splitlines() if "training_stats at" in line]
    assert [line.split()[0] for line in texts] == ["10:", "20:", "30:"] and all(
        "has all 34 values" in line for line in texts
    )
    assert all("tokens_per_second " in line and "share_data " in line and "max_" not in line for line in texts)
    assert log.count("Estimated total time") == 1 and "(30 updates of " in log
    (warning,) = [line for line in log.splitlines() if "the gradient norm is" in line]
    assert " WARNING update 24: " in warning and "exploding" in warning


class ModelRun(TinyRun):
    """Has an engine of which the timer asks only whether it counts operations."""

    backend = type("Engine", (), {"model": None})()


def two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    td.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    run = ModelRun(Path(folder), [IterTimerHook(), LoggerHook(interval=100, statistics_interval=2)])
    originals = td.Work.wait, td.ProcessGroup.allreduce
    run.start()
    for _ in range(2):
        run.call("before_train_iter", 0, CountedBatch(num_samples=1 + rank))
        with run.clock("data"):
            time.sleep(0.05 * (1 + rank))
        with run.clock("forward_backward"):
            time.sleep(0.1 * rank)  # rank 0 waits for it in the collective
            td.all_reduce(torch.ones(1))
        run.update()
    run.finish()
    assert (td.Work.wait, td.ProcessGroup.allreduce) == originals
    td.destroy_process_group()


def test_statistics_over_ranks(tmp_path: Path) -> None:
    code = f"import sys; from {__name__} import two_ranks as run; run(int(sys.argv[1]), sys.argv[2])"
    commands = [[sys.executable, "-c", code, str(rank), str(tmp_path)] for rank in range(2)]
    for process in together(commands, [{}, {}]):
        assert process.status == 0, process.ending
    (line,) = [line for line in read_lines(tmp_path / "metrics.jsonl") if line.get("event") == "training_stats"]
    values = {name.removeprefix("training_stats/"): value for name, value in line.items()}
    assert values["avg_images_per_sample"] == values["max_images_per_sample"] == 3.0
    assert 0.05 <= values["min_data_load_time"] < 0.1 <= values["max_data_load_time"]
    assert values["min_data_load_time"] < values["avg_data_load_time"] < values["max_data_load_time"]
    assert values["max_fw_bw_time"] >= 0.1 > values["min_fw_bw_time"]  # waiting is taken out of rank 0's
    assert values["max_communication_time"] > 0.1 and 0 < values["min_communication_time"] < 0.1
    for kind in ("avg", "max", "min"):
        assert 0 < values[f"{kind}_share_communication"] < 1 and values[f"{kind}_post_process_time"] > 0
    by_rank = [values["tokens_per_second/rank0"], values["tokens_per_second/rank1"]]
    assert sum(by_rank) / 2 == pytest.approx(values["avg_tokens_per_second"])
    assert values["min_tokens_per_second"] <= by_rank[0] < by_rank[1] <= values["max_tokens_per_second"]
    own = [f"avg_share_{name}" for name in ("data", "forward_backward", "communication", "step", "other")]
    assert sum(values[name] for name in own) == pytest.approx(1.0)


def test_an_epoch_ends_with_its_means(tmp_path: Path) -> None:
    """40 sequences of an epoch are 10 updates; saved and resumed after six of them."""
    first = TinyRun(tmp_path, [LoggerHook(interval=1000)])
    first.start()
    for number in range(6):
        first.update(text=3.0 * number, applied=number != 5)
    first.done = False  # type: ignore[attr-defined]
    first.call("before_save_checkpoint", {})
    state = first.hooks[0].state_dict()
    hook = LoggerHook(interval=1000)
    hook.load_state_dict(state)
    second = TinyRun(tmp_path, [hook], progress=first.progress)
    second.start(resumed_from="work/iter_12.pth")
    for number in range(6, 11):
        second.update(text=3.0 * number)
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "epoch_loss" in line]
    assert [line["update"] for line in lines] == [10]
    numbers = [0, 1, 2, 3, 4, 6, 7, 8, 9]  # 3 targets of text and 4 of image in each update
    assert lines[0]["epoch_loss/text"] == pytest.approx(sum(numbers) / len(numbers))
    assert lines[0]["epoch_loss/image"] == pytest.approx(0.5)
    assert lines[0]["epoch_loss"] == pytest.approx(sum(numbers) / len(numbers) + 0.25)
    assert lines[0]["epoch_tokens_per_second"] > 0


def test_a_gradient_norm_outside_its_usual_range_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = LoggerHook(interval=1)
    run = TinyRun(tmp_path, [hook])
    run.start()

    def warnings(*norms: float) -> list[str]:
        caplog.clear()
        for norm in norms:
            run.update(grad_norm=norm)
        return [record.message for record in caplog.records if "the gradient norm is" in record.message]

    assert not warnings(*[1.0] * FEWEST, 9.9, 0.11, float("nan"), 1.0)
    (message,) = warnings(1.0, 10.5, 11.0, 12.0)
    assert f"update {FEWEST + 6}: the gradient norm is 10.5" in message and "exploding" in message
    state, again = hook.state_dict(), LoggerHook(interval=1)
    again.load_state_dict(state)
    run.hooks = [again]
    run.start(resumed_from="work/iter_60.pth")
    (message,) = warnings(0.05)
    assert f"update {FEWEST + 9}" in message and "vanishing" in message
