"""Every format through a real run: the shipped samples give the very numbers of their JSONL, whatever reads them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.samples import make
from docs.samples.make import WORDS
from tests.data.support import write_jsonl, write_parquet
from tests.support.processes import ROOT, ranks
from tests.tiny import tiny_config
from tools.inspect_data import main as inspect_data
from tools.train import main as run_tool
from unigen_ds.config.overrides import plain_values
from unigen_ds.core.errors import DataError, ResumeBlocked
from unigen_ds.data.index import index as index_module
from unigen_ds.runner import Runner
from unigen_ds.system.journals import read_lines

SAMPLES = Path(__file__).resolve().parents[3] / "docs" / "samples"
LONG = {"train_dataloader__seq_length": 160}
"""Enough for every record: an edit of three images has 94 tokens."""
SAME: dict[str, dict[str, dict[str, Any]]] = {
    "captions.jsonl": {
        "captions.csv": {}, "captions.parquet": {}, "captions.feather": {}, "captions_bagel_t2i.parquet": {},
        "captions.tar": {}, "captions_folder": {}, "captions_metadata": {}, "captions_saved": {},
    },
    "talks.jsonl": {"talks_llava.json": {}, "talks_openai.jsonl": {}, "talks_nanovlm.parquet": {}, "talks.tar": {}},
    "texts.jsonl": {
        "texts.csv": {}, "texts.tsv": {}, "texts_folder": {}, "texts.jsonl.gz": {}, "texts.jsonl.zst": {},
    },
    "edits.jsonl": {"edits_bagel.parquet": {}},
}  # fmt: skip


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: the index is kept beside the data."""
    folder = tmp_path_factory.mktemp("data") / "samples"
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns(".unigen_index"))
    return folder


def source(path: Any, **more: Any) -> dict[str, Any]:
    return {"type": "UnifiedGenerationDataset", "data_path": str(path), "name": "data", **more}


def train(folder: Path, data: Any, *, updates: int = 3, **options: Any) -> tuple[list[Any], list[Any]]:
    """Losses, and the ranges and digests of samples, of a tiny run."""
    config = tiny_config(folder, folder, **{"train_dataloader__batch_size": 1, **options})
    config["train_dataloader"]["dataset"] = data
    Runner.from_cfg(config, max_updates=updates).train()
    return results(folder)


def results(folder: Path) -> tuple[list[Any], list[Any]]:
    losses = [{key: value for key, value in line.items() if key.startswith("loss")}
              for line in read_lines(folder / "metrics.jsonl")]  # fmt: skip
    return losses, [(line["sequences"], line["digest"]) for line in read_lines(folder / "ledger.jsonl")]


@pytest.fixture(scope="module")
def reference(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in runs:
            runs[name] = train(tmp_path_factory.mktemp("run"), source(samples / name), **LONG)
        return runs[name]

    return of


@pytest.mark.parametrize(
    ("jsonl", "other", "more"), [(jsonl, other, more) for jsonl, rest in SAME.items() for other, more in rest.items()]
)
def test_the_same_records_train_bit_equally(
    jsonl: str, other: str, more: dict[str, Any], samples: Path, reference: Any, tmp_path: Path
) -> None:
    expected = reference(jsonl)
    assert len(expected[0]) == 3 and all(any(loss > 0 for loss in line.values()) for line in expected[0])
    assert train(tmp_path, source(samples / other, **more), **LONG) == expected


def test_every_sample_is_compared() -> None:
    table_names = {*SAME, *(other for rest in SAME.values() for other in rest)}
    names = {path.name for path in SAMPLES.iterdir()} - {"make.py", "images", ".unigen_index", "__pycache__"}
    assert names == table_names


# --- a run over several formats -----------------------------------------------------------------------------------


def several(folder: Path) -> list[dict[str, Any]]:
    """Texts and images from containers of three kinds: with a copy, unpacked, and read where they are."""
    rows = [{"text": f"this is {WORDS[i % 6]} " * 4} for i in range(6)]
    write_parquet(
        folder / "texts" / "part-1.parquet", [{**row, "note": f"{i}" * 300_000} for i, row in enumerate(rows)]
    )
    return [
        source(folder / "texts", name="texts"),
        source(folder / "captions.tar", name="captions"),
        source(folder / "talks_nanovlm.parquet", name="talks"),
        source(folder / "texts.jsonl.zst", name="packed"),
    ]


@pytest.fixture
def own(samples: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(samples, tmp_path / "own", ignore=shutil.ignore_patterns(".unigen_index")))


def test_loading_processes_read_the_same(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do processes that plan, which are started anew (spawn)."""
    monkeypatch.setattr(index_module, "_CHUNK", 3)
    data = several(own)
    one, *others = data
    losses = train(tmp_path / "0", [{**one, "index_workers": 1}, *others], updates=6)
    assert losses == train(tmp_path / "2", data, updates=6, train_dataloader__num_workers=2)
    assert len([*(own / "texts" / ".unigen_index" / "unpacked").glob("part-1.parquet-*.arrow")]) == 1
    shutil.rmtree(own / "texts" / ".unigen_index")
    assert losses == train(tmp_path / "again", data, updates=6)


@pytest.mark.slow
def test_two_processes(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They train on the same sequences as one, also where both find no copy and no index, or skip a source."""
    data = several(own)
    missing = {**source(own / "none.jsonl"), "on_error": "skip"}
    options = {"train_dataloader__batch_size": 2, "randomness__seed": 7}
    config = tiny_config(tmp_path / "two", tmp_path, **options)
    config["train_dataloader"]["dataset"] = [*data, missing]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(plain_values(config)))
    command = [sys.executable, str(ROOT / "tools" / "train.py"), str(file), "--backend", "fsdp"]
    for more in (["--max-updates", "2"], ["--max-updates", "4", "--resume"]):
        for process in ranks([*command, *more], LOCAL_WORLD_SIZE="2"):
            assert process.status == 0, process.ending
    _, two = results(tmp_path / "two")
    _, one = train(tmp_path / "one", data, updates=4, randomness__seed=7, train_dataloader__batch_size=4)
    assert one == two and len(one) == 4
    assert inspect_data([str(file), "--ledger", str(tmp_path / "two" / "ledger.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agrees"]
    assert inspect_data([str(file), "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert {name: (facts["records"], facts["records_with_images"]) for name, facts in sources.items()} == {
        "texts": (6, 0), "captions": (6, 6), "talks": (6, 6), "packed": (6, 0),
    }  # fmt: skip


def test_a_share_for_validation_is_that_of_the_same_records(tmp_path: Path) -> None:
    """Which records it has follows from their values, so the format does not matter."""
    records = [{"text": f"{WORDS[i % 6]} {WORDS[i % 5]} {WORDS[i % 4]}"} for i in range(40)]
    write_jsonl(tmp_path / "t.jsonl", records)
    write_parquet(tmp_path / "t.parquet", records)
    split = {"val_dataloader": {"split": 0.3, "seed": 1}, "train_dataloader__packing": None}
    jsonl, parquet = (train(tmp_path / end, source(tmp_path / f"t.{end}"), **split) for end in ("jsonl", "parquet"))
    assert jsonl == parquet
    logs = [(tmp_path / end / "train.log").read_text() for end in ("jsonl", "parquet")]
    shares = [
        [line.partition("Validation, ")[2] for line in log.splitlines() if "Validation, " in line] for log in logs
    ]
    assert shares[0] == shares[1] and "of 40 records" in shares[0][0] and not shares[0][0].startswith("data: 0 ")


@pytest.mark.parametrize("kind", ["new part", "new rows", "new shard"])
def test_appended_records(kind: str, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused as they are; with ``append`` the epoch is finished with the old ones, and all are used from the next."""
    tars, parts = own / "tars", own / "texts"
    tars.mkdir()
    shutil.copy(own / "captions.tar", tars / "shard-9.tar")
    texts = [{"text": f"draw a {WORDS[i]}"} for i in range(6)]
    write_parquet(parts / "part-9.parquet", texts)
    config = tiny_config(tmp_path / "run", tmp_path, train_dataloader__batch_size=1, train_dataloader__packing=None)
    config["train_dataloader"]["dataset"] = source(tars if kind == "new shard" else parts)
    Runner.from_cfg(config, max_updates=4).train()
    if kind == "new shard":
        make.tar(tars / "shard-10.tar", [("7.txt", b"one"), ("8.txt", b"two")])
    elif kind == "new part":
        write_parquet(parts / "part-10.parquet", [{"text": "one"}, {"text": "two"}])
    else:
        write_parquet(parts / "part-9.parquet", [*texts, {"text": "one"}, {"text": "two"}])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(plain_values(config)))
    again = [str(file), "--max-updates", "14", "--resume"]
    assert run_tool(again) == 3
    assert "data had 6 records and has 8" in capsys.readouterr().err
    assert run_tool([*again, "--on-data-change", "append"]) == 0
    capsys.readouterr()
    assert inspect_data([str(file), "--work-dir", str(tmp_path / "run"), "--sequences", "0:14", "--json"]) == 0
    ids = [sample for row in json.loads(capsys.readouterr().out)["samples"] for sample in row]
    assert sorted(ids[:6]) == [f"data:{i}:0" for i in range(6)]
    assert sorted(ids[6:]) == [f"data:{i}:1" for i in range(8)]


# --- sources that fail --------------------------------------------------------------------------------------------


def test_a_source_that_fails_is_skipped_where_the_config_allows_it(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "broken.jsonl").write_text('{"text": 3}\n')
    good = source(own / "texts.jsonl", name="good")
    missing = source(own / "none.parquet", name="gone", on_error="skip")
    bad = source(own / "broken.jsonl", name="broken", on_error="skip")
    assert train(tmp_path / "run", [missing, good, bad]) == train(tmp_path / "alone", [good])
    log = (tmp_path / "run" / "train.log").read_text()
    assert "gone is skipped (on_error='skip'): train_dataloader.dataset[0]: data file" in log and "none.parquet" in log
    assert "data set broken is skipped (on_error='skip'): train_dataloader.dataset[2]: " in log
    assert "broken.jsonl:1: text is 3" in log
    assert "2 of 3 data sets are skipped, 1 are used" in log
    run_config = str(tmp_path / "run" / "config.py")
    capsys.readouterr()
    assert inspect_data([run_config, "--json"]) == 0
    skips = json.loads(capsys.readouterr().out)["skipped_sources"]
    assert [one["name"] for one in skips] == ["gone", "broken"] and "broken.jsonl:1: text is 3" in skips[1]["why"]
    assert inspect_data([run_config]) == 0
    assert "gone is skipped (on_error='skip'): train_dataloader.dataset[0]: data file" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"none\.parquet"):
        train(tmp_path / "raise", [{**missing, "on_error": "raise"}, good])
    with pytest.raises(DataError, match="No valid datasets were loaded: all 2 were skipped"):
        train(tmp_path / "none", [missing, bad])
    (own / "broken.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(ResumeBlocked, match="the sources were good and are good, broken"):
        train(tmp_path / "run", [missing, good, bad], updates=5, resume=True)
