"""Directories of strangers bring code (``auto_map`` in a config, and the file it names): it is never imported.

Through ``Runner.from_cfg``, ``tools/generate.py`` and ``tools/export.py``. A kind of model or tokenizer that
transformers knows loads as ever, by its own class; one that only the stranger's code knows is a named error.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.end_to_end.models.test_vlm_run import config as vlm_config
from tests.end_to_end.models.test_vlm_run import data as pictures  # noqa: F401 - a fixture
from tests.end_to_end.resume.other_trainers.test_reading import config, data, short_run  # noqa: F401 - fixtures
from tools.export import main as export
from tools.generate import main as generate
from unigen_ds.checkpoint.manifest import FILE_NAME, Manifest
from unigen_ds.core.errors import ConfigError
from unigen_ds.runner import Runner

AUTO_MAP = {
    "AutoConfig": "stranger.StrangersConfig",
    "AutoModelForCausalLM": "stranger.StrangersModel",
    "AutoTokenizer": ["stranger.StrangersTokenizer", "stranger.StrangersTokenizer"],
    "AutoProcessor": "stranger.StrangersTokenizer",
}
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()

class StrangersConfig(LlamaConfig):
    model_type = "stranger"

class StrangersModel(LlamaForCausalLM):
    config_class = StrangersConfig

class StrangersTokenizer(PreTrainedTokenizerFast):
    pass
"""


def poison(folder: Path, *, unknown: bool = False) -> Path:
    """Let the configs in ``folder`` name code beside them, ``unknown``: as their only class. Returns the marker."""
    marker = folder / "stranger.ran"
    (folder / "digests.json").unlink(missing_ok=True)  # a stranger's directory has none
    (folder / "stranger.py").write_text(CODE.format(marker=str(marker)))
    for name, change in (("config.json", {"model_type": "stranger"}),
                         ("tokenizer_config.json", {"tokenizer_class": "StrangersTokenizer"})):  # fmt: skip
        if (folder / name).exists():
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**values, "auto_map": AUTO_MAP, **(change if unknown else {})}))
    return marker


@pytest.fixture
def export_folder(short_run: Runner, tmp_path: Path) -> Path:  # noqa: F811
    """transformers' directory of a ``DecoderLM``, with its tokenizer."""
    assert export([str(short_run.work_dir), str(tmp_path / "exported"), "--raw"]) == 0
    return tmp_path / "exported"


def test_the_payload_is_real(export_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is trusted, transformers imports it: so nothing here passes for want of a working file."""
    from transformers import AutoTokenizer, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    marker = poison(export_folder)
    AutoTokenizer.from_pretrained(export_folder, trust_remote_code=True)
    assert marker.exists()


def test_a_run_that_begins_with_a_strangers_directory(
    export_folder: Path, data: dict, short_run: Runner, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    marker = poison(export_folder)
    cfg = config(data, tmp_path / "run", tokenizer__path=str(export_folder), optim_wrapper__optimizer__lr=0.0)
    cfg.model = {"type": "DecoderLM", "pretrained": str(export_folder)}
    runner = Runner.from_cfg(cfg)
    runner.train()
    state, expected = runner.backend.model.state_dict(), short_run.backend.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert not marker.exists()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("model", r"is 'stranger'.*code beside a model's files is never run"),
        ("tokenizer", r"tokenizer\.path .*contains custom code.* Remedy: name a"),
    ],
)
def test_a_run_with_a_kind_that_only_the_strangers_code_knows(
    part: str, message: str, export_folder: Path, data: dict, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    marker = poison(export_folder, unknown=True)
    cfg = config(data, tmp_path / "run")
    if part == "model":
        cfg.model = {"type": "DecoderLM", "pretrained": str(export_folder)}
    else:
        cfg.tokenizer.path = str(export_folder)
    with pytest.raises(ConfigError, match=message) as error:
        Runner.from_cfg(cfg).train()
    assert "trust_remote_code" not in (error.value.remedy or "") and not marker.exists()


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("tool", ["generate", "export"])
def test_a_tool_with_a_strangers_directory(
    tool: str, unknown: bool, export_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = poison(export_folder, unknown=unknown)
    status = use(tool, export_folder, tmp_path / "out")
    assert not marker.exists()
    output = capsys.readouterr().err
    assert status == (1 if unknown else 0), output
    assert not unknown or ("error: " in output and str(export_folder) in output and "Traceback" not in output)


@pytest.mark.parametrize("tool", ["generate", "export"])
def test_a_tool_with_a_strangers_checkpoint(
    tool: str, short_run: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    """The tokenizer in it was changed after the save, so it does not verify; then the manifest was changed, too."""
    shutil.copytree(short_run.work_dir, tmp_path / "run")
    ((checkpoint, marker),) = [(p, poison(p / "tokenizer")) for p in (tmp_path / "run").glob("*.pth")]
    assert use(tool, checkpoint, tmp_path / "out") == 1
    assert "tokenizer_config.json has " in capsys.readouterr().err and not marker.exists()
    manifest, file = Manifest.read(checkpoint), checkpoint / "tokenizer" / "tokenizer_config.json"
    files = [f for f in manifest.files if f.path != "tokenizer/tokenizer_config.json"]
    (checkpoint / FILE_NAME).write_text(replace(manifest, files=files).to_json())
    assert "auto_map" in file.read_text()
    status = use(tool, checkpoint, tmp_path / "out")
    assert not marker.exists() and status == 0, capsys.readouterr().err


def test_a_strangers_directory_of_nanovlm(pictures: Path, tmp_path: Path) -> None:  # noqa: F811
    Runner.from_cfg(vlm_config(pictures, tmp_path / "run"), max_updates=1).train()
    assert export([str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    marker = poison(tmp_path / "exported")
    cfg = vlm_config(pictures, tmp_path / "second")
    cfg.model = {"type": "VLM", "pretrained": str(tmp_path / "exported")}
    cfg.tokenizer.path = str(tmp_path / "exported")
    Runner.from_cfg(cfg, max_updates=1).train()
    assert [use(tool, tmp_path / "exported", tmp_path / tool) for tool in ("generate", "export")] == [0, 0]
    assert not marker.exists()


def use(tool: str, model: Path, out: Path) -> int:
    if tool == "generate":
        return generate([str(model), "--prompt", "one", "--max-length", "2", "--device", "cpu", "--out", str(out)])
    return export([str(model), str(out)])
