"""Names of the hub where a directory is accepted: offline, from a cache laid out as the hub's library lays it out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from tests.end_to_end.engines.jobs.texts import LLM, write_decoder
from tests.end_to_end.resume.saving.test_checkpoint_dir import train
from tests.text_run import WORDS
from tools.export import main as export
from tools.generate import main as generate
from tools.zero_to_fp32 import main as merge
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.config.hub import folder_of
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.evaluation.metrics.base import LocalModel

SHA, OLDER = "a" * 40, "b" * 40


def cache_model(cache: Path, name: str, source: Path, *, sha: str = SHA, refs: tuple[str, ...] = ("main",)) -> Path:
    """A snapshot of ``source`` in the cache: files are links to blobs, a ref names the commit."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / sha
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted(source.iterdir())):
        blob = repository / "blobs" / f"{sha[:8]}{number}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(blob)
    for ref in refs:
        (repository / "refs" / ref).write_text(sha)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of ``maker/decoder``, with an older commit ``v1`` of other weights, and of ``maker/words``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    words = tmp_path / "words"
    WordTokenizer(words=WORDS).save_pretrained(str(words))
    cache_model(tmp_path / "cache", "maker/words", words)
    write_decoder(tmp_path / "decoder")
    WordTokenizer(words=WORDS).save_pretrained(str(tmp_path / "decoder"))
    config = json.loads((tmp_path / "decoder" / "config.json").read_text())
    (tmp_path / "decoder" / "config.json").write_text(json.dumps({**config, "bos_token_id": 2, "eos_token_id": 3}))
    cache_model(tmp_path / "cache", "maker/decoder", tmp_path / "decoder")
    return tmp_path / "cache"


TOKENIZER = {"type": "PretrainedTokenizer", "path": "maker/words", "image_start": None, "image_end": None}
MODEL = {"type": "DecoderLM", "pretrained": "maker/decoder"}


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    merge([str(checkpoint), str(checkpoint.parent / "merged")])
    state: dict[str, torch.Tensor] = torch.load(checkpoint.parent / "merged" / "pytorch_model.bin")
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_begins_with_names_and_is_that_of_the_folders(cache: Path, tmp_path: Path) -> None:
    by_name = {"model": MODEL, "tokenizer": TOKENIZER}
    by_path = {"model": {**MODEL, "pretrained": str(tmp_path / "decoder")},
               "tokenizer": {**TOKENIZER, "path": str(tmp_path / "words")}}  # fmt: skip
    for folder, options in (("a", by_name), ("b", by_path)):
        train(tmp_path / folder, **options)
    first, second = (weights(tmp_path / folder / "run" / "iter_2.pth") for folder in "ab")
    assert same(first, second)
    assert Manifest.read(tmp_path / "a" / "run" / "iter_2.pth").config["model"]["pretrained"] == "maker/decoder"
    log = (tmp_path / "a" / "run" / "train.log").read_text(encoding="utf-8")
    assert log.count("model.pretrained 'maker/decoder' is of the hub: ") == 1 and SHA in log
    train(tmp_path / "a", updates=3, resume=True, **by_name)


def test_weights_alone_and_the_tools(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"type": "DecoderLM", "llm": {key: value for key, value in LLM.items() if key != "initializer_range"}}
    runner = train(tmp_path, model=sizes, load_from="maker/decoder", updates=1)
    assert "Loaded weights only from" in (runner.work_dir / "train.log").read_text(encoding="utf-8")
    assert generate(["maker/decoder", "--prompt", "one two", "--max-length", "3", "--device", "cpu", "--out", "o"]) == 0
    assert merge(["maker/decoder", "merged"]) == 0 and Path("merged/pytorch_model.bin").is_file()
    assert export(["maker/decoder", "out", "--source", "maker/decoder"]) == 0 and Path("out/tokenizer.json").is_file()
    assert (
        LocalModel("maker/decoder", where="CLIPScore.path").folder == cache / "models--maker--decoder/snapshots" / SHA
    )
    capsys.readouterr()
    assert merge(["maker/other", "second"]) == 2
    output = capsys.readouterr().err
    assert "MODEL 'maker/other' is no folder here, and it cannot be loaded from the hub: " in output
    assert "Remedy: where there is a network: hf download maker/other --local-dir FOLDER" in output


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "maker" / "decoder").mkdir(parents=True)
    assert folder_of("maker/decoder", where="x") == Path("maker/decoder")
    for name in ("maker/absent", "run/iter_3.pth", "./maker/decoder", "decoder", "/a/b", "a/b/c", "other/iter_3.pth"):
        assert folder_of(name, where="x") == Path(name), "no name of the hub: the caller reports it"
