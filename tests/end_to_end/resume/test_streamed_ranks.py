"""A streamed mixture in real processes: killed, and resumed with 2, 1 and 4 ranks and other numbers of workers."""

from __future__ import annotations

import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.datasets.test_streamed import MIXED, digests, exact, write_shards
from tests.data.support import write_jsonl
from tests.end_to_end.data.test_mixtures import train_and_kill
from tests.end_to_end.resume.kill_tools import HOOK
from tests.support.processes import ROOT, ranks, together
from tests.support.shard_server import serving
from tests.text_run import CONFIG, WORDS, run_config, words
from tools import inspect_data
from unigen_ds.checkpoint.manifest import Manifest
from unigen_ds.runner.settings.tree import load_config
from unigen_ds.system.dist import free_port

UPDATES = 18


def write_config(folder: Path, path: str, *, own: Path) -> Path:
    """A streamed source beside one with random access; 4 sequences an update however many ranks there are."""
    folder.mkdir(exist_ok=True)
    own_name = HOOK.replace("@HOOKS.register_module()", '@HOOKS.register_module(name="KillAtUpdate", force=True)')
    (folder / "kill_at_update.py").write_text(own_name)
    kind = "UnifiedGenerationDataset"
    data: list[dict[str, Any]] = [
        dict(type=kind, data_path=path, name="web", weight=3, streaming=MIXED, cache_dir=str(folder / "cache")),
        dict(type=kind, data_path=str(own), name="own", weight=1),
    ]
    body = CONFIG.format(words=list(WORDS), data="", work_dir=str(folder / "run"))
    body += f"""
train_dataloader.update(dataset={data!r}, seq_length=20, packing=dict(type="BestFitPacking", window=24),
                        batch_size=None, global_batch_size=4)
train_cfg = dict(max_updates={UPDATES})
default_hooks = dict(logger=dict(interval=100), checkpoint=dict(interval=2, unit="update"))
custom_imports = dict(imports=["kill_at_update"])
custom_hooks = [dict(type="KillAtUpdate")]
"""
    (folder / "config.py").write_text(body, encoding="utf-8")
    return folder / "config.py"


def start_ranks(number: int, config: Path, *options: str, **environment: str) -> None:
    """One job of real processes; with ``KILL_AT`` all of them are killed."""
    command = [sys.executable, "tools/train.py", str(config), "--backend", "fsdp", *options]
    for process in ranks(command, world_size=number, PYTHONPATH=f"{ROOT}:{config.parent}", **environment):
        assert process.status == (-signal.SIGKILL if environment else 0), process.ending


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Shards, the file beside them, and the digests of a run in this process on both."""
    folder = tmp_path_factory.mktemp("data")
    shards = write_shards(folder / "shards")
    own = write_jsonl(folder / "own.jsonl", [{"text": words(3, i)} for i in range(10)])
    config = write_config(folder, str(shards), own=own)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        _, hook = run_config(load_config(config, {"custom_hooks": [{"type": "KeepBatches"}]}))
    assert exact(hook.ids) >= 1
    return shards, own, digests(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_one_and_four_use_the_same_samples(tmp_path: Path, data: tuple[Path, Path, list[str]]) -> None:
    shards, own, expected = data
    folder = tmp_path / "killed"
    with serving(shards) as server:
        config = write_config(folder, f"{server.url}/part-{{0..6}}.jsonl", own=own)
        start_ranks(2, config, KILL_AT="update:5")
        once = Counter(server.transfers)
        assert max(once.values()) == 1, f"two ranks share the copies: {once}"
        shutil.rmtree(folder / "cache" / "streamed" / "shards")
        workers = {"resume": True, "custom_hooks": [], "train_dataloader.num_workers": 3}
        train_and_kill(load_config(config, workers), 9)
        start_ranks(4, config, "--resume")
        assert inspect_data.main([str(config), "--html", str(tmp_path / "page.html")]) == 0
        assert inspect_data.main([str(config), "--ledger", str(folder / "run" / "ledger.jsonl")]) == 0
    assert digests(folder) == expected and len(expected) == UPDATES
    newest = max((folder / "run").glob("iter_*"), key=lambda path: path.stat().st_mtime)
    assert len(Manifest.read(newest).loader["cursor"]["blocks"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_a_data_set_of_the_hub(tmp_path: Path, data: tuple[Path, Path, list[str]], there: bool) -> None:
    """A revision of a private data set of a server that speaks the hub's API and asks to wait; or it is not there."""
    shards, own, expected = data
    config = write_config(tmp_path / "run", "hf://datasets/org/name@v1", own=own)
    command = [sys.executable, "tools/train.py", str(config), "--max-updates", "2"]
    options = ["--cfg-options", "train_dataloader.dataset.0.streaming.attempts=1"]
    with serving(write_shards(tmp_path / "newer", (3, 2))) as server:
        server.revisions, server.token, server.num_limited = {"v1": shards}, "hf_right", 1
        environment = {
            "HF_TOKEN": "hf_right",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        url = server.url if there else f"http://127.0.0.1:{free_port()}"
        (process,) = together(
            [command + options], [{**environment, "HF_ENDPOINT": url, "PYTHONPATH": f"{ROOT}:{config.parent}"}]
        )
    if not there:
        assert process.status == 1 and "Traceback" not in process.text, process.ending
        assert "listing the data set org/name failed in 1 attempts:" in process.text, process.ending
        return
    assert process.status == 0, process.ending
    assert "Data, web: streamed from 7 shards of" in process.text
    assert digests(tmp_path / "run") == expected[:2]
