"""Records longer than ``seq_length``: nothing is lost without a number; a truncated answer does not learn to stop."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.support import image, picture, talk, text, write_jsonl
from tests.data.text.chat_support import character_tokenizer
from tests.end_to_end.models.test_vlm_run import config as vlm_config
from tests.text_run import run_config, text_config, words
from tests.tiny import tiny_config
from tools.inspect_data import main as inspect_data
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.core.progress import Geometry
from unigen_ds.runner import Runner
from unigen_ds.runner.settings.tree import Settings
from unigen_ds.runner.start.build import build_data

LENGTHS = [3, 14, 15, 16, 29, 30, 31, 46, 47, 60]
"""Words of the documents: around one, two, three and four sequences of 16 tokens."""


def documents() -> list[Any]:
    return [{"text": words(number, first)} for first, number in enumerate(LENGTHS)]


def log_of(runner: Runner) -> str:
    return (runner.work_dir / "train.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("packing", [None, {"type": "BestFitPacking", "window": 64}], ids=["unpacked", "packed"])
def test_a_long_text_is_split_and_nothing_of_it_is_lost(tmp_path: Path, packing: Any) -> None:
    config = text_config(tmp_path, documents(), train_dataloader__packing=packing)
    runner, hook = run_config(config)
    tokenizer = runner.processor.tokenizer
    expected = Counter(i for record in documents() for i in (*tokenizer.encode(record["text"]), tokenizer.eos_id))
    assert hook.targets == expected
    pieces = {k: -(-(number + 2) // 16) for k, number in enumerate(LENGTHS)}
    whole = [f"train:{k}:0" for k, number in pieces.items() if number == 1]
    split = [f"train:{k}:0:{piece}" for k, number in pieces.items() if number > 1 for piece in range(number)]
    assert sorted(hook.ids) == sorted([*whole, *split])
    assert max(batch.num_tokens for batch in hook.batches) == 16
    ends = Counter()  # the end token is in the last piece alone, and each text has one
    for batch in hook.batches:
        for number, sample in enumerate(batch.sample_ids):
            own = batch.text_ids[batch.document_ids[batch.text_index] == number]
            ends[sample] += int((own == tokenizer.eos_id).sum())
    last = {f"train:{k}:0" + (f":{number - 1}" if number > 1 else "") for k, number in pieces.items()}
    assert {sample for sample, number in ends.items() if number} == last and set(ends.values()) <= {0, 1}
    assert runner.ruler.sequences_per_epoch == len(hook.batches)
    if packing is None:
        assert len(hook.batches) == sum(pieces.values())
    line = "8 of 10 records are longer than seq_length 16: 8 split into 22 samples; 0.0% of the targets are lost"
    assert line in log_of(runner)
    arguments = [str(tmp_path / "config.py"), "--ledger", str(tmp_path / "run" / "ledger.jsonl")]
    assert inspect_data([*arguments, "--cfg-options", f"train_dataloader.packing={packing}"]) == 0


def conversation(number: int) -> Any:
    return talk(text("user", "one"), text("assistant", words(number)))


def test_a_long_conversation_is_skipped_named_and_counted(tmp_path: Path, capsys: Any) -> None:
    records = [conversation(4), conversation(40), {"text": words(20)}, conversation(9)]
    config = text_config(tmp_path, records)
    runner, hook = run_config(config)
    assert sorted(hook.ids) == ["train:0:0", "train:2:0:0", "train:2:0:1", "train:3:0"]
    line = (
        "2 of 4 records are longer than seq_length 16: 1 split into 2 samples, 1 skipped (train:1);"
        " 53.2% of the targets are lost (41 of 77 text targets, 0 of 0 image targets)"
    )
    assert f"WARNING Data, train: {line}" in log_of(runner)
    capsys.readouterr()
    assert inspect_data([str(tmp_path / "config.py")]) == 0
    assert line in capsys.readouterr().out
    assert inspect_data([str(tmp_path / "config.py"), "--json"]) == 0
    source = json.loads(capsys.readouterr().out)["sources"]["train"]
    assert source["text_targets"] == sum(hook.targets.values()) == 36
    assert source["overflow"]["skipped_records"] == ["train:1"] and source["overflow"]["text_targets_lost"] == 41


def test_a_truncated_answer_has_no_end_token(tmp_path: Path, capsys: Any) -> None:
    """At the cut nothing is learned, wherever it falls: in front of the end token, too."""
    records = [conversation(number) for number in (4, 10, 11, 12, 30)]  # 3 + 2 + number tokens
    config = text_config(tmp_path, records, train_dataloader__overflow="truncate")
    runner, hook = run_config(config)
    assert sorted(hook.ids) == [f"train:{k}:0" for k in range(5)]
    eos, targets = runner.processor.tokenizer.eos_id, {}
    for batch in hook.batches:
        documents = batch.document_ids[batch.text_target_index]
        for number, sample in enumerate(batch.sample_ids):
            targets[sample] = batch.text_target_ids[documents == number].tolist()
    assert [targets[f"train:{k}:0"].count(eos) for k in range(5)] == [1, 1, 1, 0, 0]
    assert [len(targets[f"train:{k}:0"]) for k in range(5)] == [5, 11, 12, 12, 12]
    assert "2 of 5 records are longer than seq_length 16: 2 truncated; 27.8% of the targets are lost" in log_of(runner)
    capsys.readouterr()
    inspect_data([str(tmp_path / "config.py"), "--json", "--cfg-options", "train_dataloader.overflow=truncate"])
    assert json.loads(capsys.readouterr().out)["sources"]["train"]["text_targets"] == 52


def test_conversations_are_split_where_the_config_asks_for_it(tmp_path: Path) -> None:
    records = [conversation(40), conversation(4)]
    runner, hook = run_config(text_config(tmp_path, records, train_dataloader__overflow="split"))
    assert sorted(hook.ids) == ["train:0:0:0", "train:0:0:1", "train:0:0:2", "train:1:0"]
    tokenizer = runner.processor.tokenizer
    answers = [(*tokenizer.encode(words(number)), tokenizer.eos_id) for number in (40, 4)]
    assert hook.targets == Counter(i for answer in answers for i in answer)


def test_an_error_where_the_config_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train: 8 of 10 records.*\(train:2, .*'error'.*at least 62"):
        Runner.from_cfg(text_config(tmp_path, documents(), train_dataloader__overflow="error"))
    with pytest.raises(ConfigError, match=r"overflow is 'cut'.*'split', 'truncate', 'skip', 'error'"):
        Runner.from_cfg(text_config(tmp_path, documents(), train_dataloader__overflow="cut"))
    with pytest.raises(DataError, match="all 1 records are longer than seq_length 16"):
        Runner.from_cfg(text_config(tmp_path, [conversation(40)]))


def test_a_cut_that_leaves_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    """The prompts alone fill the sequences: such a run would end as a success that learned nothing."""
    records = [talk(text("user", words(20)), text("assistant", words(3))) for _ in range(2)]
    error = r"train: all 8 targets are lost: what of its records fits seq_length 16 has none.*seq_length of 27 or more"
    with pytest.raises(DataError, match=error):
        Runner.from_cfg(text_config(tmp_path, records, train_dataloader__overflow="truncate"))


@pytest.mark.parametrize("length", [70, 64])
def test_documents_beyond_the_models_positions_are_refused_at_the_start(tmp_path: Path, length: int) -> None:
    """One long document among short ones: training would end when its turn comes."""
    records = [{"text": words(3)}] * 5 + [{"text": words(100)}, {"text": words(length - 2)}]
    config = text_config(tmp_path, records, train_dataloader__seq_length=length)
    if length == 64:
        assert run_config(config)[0].done
        return
    message = r"train: 2 of 8 samples have more tokens \(up to 70\) than the model has positions, .* 64.*at most 64"
    with pytest.raises(DataError, match=message):
        Runner.from_cfg(config)


def test_a_vision_language_model(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 30, 30)
    records = [
        {"text": "0123456789" * 4},
        talk(image("user", "a.png"), text("user", "?"), text("assistant", "no")),
        talk(text("user", "?"), text("assistant", "yes")),
    ]
    write_jsonl(tmp_path / "train.jsonl", records)
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    loader = {"train_dataloader__seq_length": 32, "train_dataloader__batch_size": 1, "train_cfg": {"max_epochs": 1}}
    runner, hook = run_config(vlm_config(tmp_path, tmp_path / "run", custom_hooks=[{"type": "KeepBatches"}], **loader))
    assert sorted(hook.ids) == ["train:0:0:0", "train:0:0:1", "train:2:0"]
    chat = runner.processor.tokenizer.chat
    texts = [chat.decode(batch.text_target_ids) for batch in hook.batches]
    assert "".join(sorted(texts)).count("<|im_end|>") == 2
    answers = [chat.encode(t, add_special_tokens=False) for t in ("0123456789" * 4 + "<|im_end|>\n", "yes<|im_end|>\n")]
    assert hook.targets == Counter(i for ids in answers for i in ids)
    assert "1 skipped (train:1)" in log_of(runner)


def test_a_prompt_and_its_image_are_never_parted_but_by_truncation(tmp_path: Path, digits: Path) -> None:
    config = tiny_config(tmp_path / "run", digits, train_dataloader__dataset__split="val",
                         train_dataloader__seq_length=22)  # fmt: skip
    for overflow, units in ((None, 297), ("split", 297), ("truncate", 594)):
        config["train_dataloader"]["overflow"] = overflow
        stream = build_data(Settings.from_config(config), geometry=Geometry(1), ruler=None).stream
        assert stream.order.epoch_size == units, overflow
