"""What a user reads who wrote something wrong: the lines that ``tools/train.py`` prints to stderr, and status 2."""

from __future__ import annotations

import gzip
import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.nn import Linear

from tests.tiny import tiny_config
from tools.train import main
from unigen_ds.config.file import read_file
from unigen_ds.config.registry import FAMILIES
from unigen_ds.families.bagel.family import Bagel


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("messages")
    config = tiny_config(folder / "run", digits, train_dataloader__num_workers=0)
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return values


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a wrong config might write go into the test's folder."""
    monkeypatch.chdir(tmp_path)


def as_python(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {value!r}\n" for key, value in values.items())


def write(tmp_path: Path, form: str, values: dict[str, Any]) -> Path:
    """The values as a file of that form. ``based.py`` has them in a base and adds to them."""
    text = {"yaml": partial(yaml.safe_dump, sort_keys=False), "json": json.dumps}.get(form, as_python)(values)
    name = "config.py" if form == "based.py" else f"config.{form}"
    if form == "based.py":
        (tmp_path / "base.py").write_text("randomness = dict(seed=3)\n")
        text = "_base_ = './base.py'\n" + text
    (tmp_path / name).write_text(text)
    return tmp_path / name


def words(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 2) -> str:
    """What ``tools/train.py`` prints to stderr; it must end with ``status``."""
    assert main([*map(str, arguments)]) == status
    return capsys.readouterr().err


def train_once(path: Path, work_dir: Path) -> None:
    assert main([str(path), "--max-updates", "1", "--work-dir", str(work_dir)]) == 0


# --- names at the top of a file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["py", "based.py", "yaml"])
def test_a_setting_at_the_top_that_nothing_reads_is_an_error(
    form: str, plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = words(capsys, write(tmp_path, form, {**plain, "lr": 0.5, "batch_size": 2}))
    assert "write optim_wrapper.optimizer.lr" in output and "write train_dataloader.batch_size" in output


def test_a_setting_that_a_base_has_read_already_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.py").write_text("lr = 1e-3\noptim_wrapper = dict(optimizer=dict(type='AdamW', lr=lr))\n")
    (tmp_path / "child.py").write_text("_base_ = './base.py'\nlr = 0.5\n")
    assert "write optim_wrapper.optimizer.lr" in words(capsys, tmp_path / "child.py")


@pytest.mark.parametrize("form", ["py", "based.py"])
def test_helper_variables_of_a_python_file_load(form: str, plain: dict[str, Any], tmp_path: Path) -> None:
    """S3.32: the names of the guide's snippets, and settings that the file reads."""
    path = write(tmp_path, form, {**plain, "num_gpus": 2, "current_epoch": 3.5})
    path.write_text(
        path.read_text()
        + "batch_size = 2\noriginal_iterations_per_epoch = 100 // (batch_size * num_gpus)\n"
        + "train_dataloader['batch_size'] = batch_size\n"
    )
    train_once(path, tmp_path / "run")
    if form == "py":  # its copy in the work dir has no helper left, and can be trained from
        train_once(tmp_path / "run" / "config.py", tmp_path / "again")


def test_a_base_may_have_names_that_its_child_reads(plain: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("learning_rate: 0.25\n")
    (tmp_path / "base.py").write_text("_base_ = './values.yaml'\nlr, max_epochs, seq_length = 1e-3, 2, 80\n")
    path = write(tmp_path, "py", plain)
    path.write_text(
        "_base_ = './base.py'\n" + path.read_text() + "optim_wrapper['optimizer']['lr'] = {{_base_.lr}}\n"
        "train_cfg = dict(max_epochs=_base_.max_epochs)\ntrain_dataloader['seq_length'] = _base_.seq_length\n"
        "optim_wrapper['optimizer']['weight_decay'] = _base_.learning_rate\n"
    )
    train_once(path, tmp_path / "run")


# --- nothing of a file or of a value is executed ----------------------------------------------------------------------


def test_numbers_with_an_exponent_are_numbers_in_yaml(tmp_path: Path) -> None:
    """YAML 1.1 reads ``1e-5`` as a text; texts that only look alike stay texts."""
    path = tmp_path / "config.yaml"
    path.write_text("a: [1e-5, 1E+3, -2e6, 1.5e-4, 3]\nb: [1e, e5, '1e-5', 0x1e5, 1e5x]\n", encoding="utf-8")
    config = read_file(path)
    assert config.a == [1e-5, 1e3, -2e6, 1.5e-4, 3] and [type(v) for v in config.a] == [float] * 4 + [int]
    assert config.b == ["1e", "e5", "1e-5", 0x1E5, "1e5x"]


@pytest.mark.parametrize("where", ["config.yaml", "base.yaml of a Python file"])
def test_yaml_runs_nothing(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / where.partition(" ")[0]
    path.write_text("train_cfg: !!python/object/apply:os.mkdir ['ran']\n")
    if "base" in where:
        path = tmp_path / "config.py"
        path.write_text("_base_ = './base.yaml'\n")
    assert "no tag may name Python code" in words(capsys, path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", ["__import__('os').mkdir('ran')", "(" * 9999])
def test_a_value_of_the_command_line_is_not_executed(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = words(capsys, "unified_digits", "--cfg-options", f"train_cfg.max_epochs={value}")
    assert "train_cfg.max_epochs is" in output and not (tmp_path / "ran").exists()


CALLED: list[Any] = []


class NotATokenizer:
    """What ``AutoTokenizer`` is: a class whose method makes something else."""

    def __init__(self, **arguments: Any) -> None:
        CALLED.append(arguments)

    @classmethod
    def from_pretrained(cls, path: str) -> Any:
        CALLED.append(path)
        raise AssertionError("called while the config was checked")


@pytest.mark.parametrize("kind", ["NotATokenizer", "NotATokenizer.from_pretrained"])
def test_a_component_is_compared_with_its_registry_before_it_is_called(
    kind: str, plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "py", {key: value for key, value in plain.items() if key != "tokenizer"})
    path.write_text(
        f"from {__name__} import NotATokenizer\n" + path.read_text() + f"tokenizer = dict(type={kind}, path='x')\n"
    )
    CALLED.clear()
    output = words(capsys, path)
    assert "tokenizer.type is" in output and "NotATokenizer" in output
    assert "write dict(type='PretrainedTokenizer', path='DIR')" in output and not CALLED


# --- what other trainers call things ----------------------------------------------------------------------------------

HINTS = [
    ({"custom_keys": {"vit": {"lr_mult": 0.1}}}, "write optim_wrapper.paramwise_cfg.custom_keys"),
    ({"train_cfg.max_steps": 9}, "train_cfg.max_updates counts optimizer steps"),
    ({"backend": {"type": "zero2"}}, "Allowed: --backend single, deepspeed[:zero1|zero2|zero3|...|FILE.json]"),
    ({"backend": {"type": "fsdp", "sharding_strategy": "full_shard"}}, "did you mean 'FULL_SHARD'?"),
]


@pytest.mark.parametrize(("changes", "hint"), HINTS, ids=lambda value: str(value)[:40])
def test_a_name_of_another_trainer_gets_its_own_hint(
    changes: dict[str, Any], hint: str, plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(json.dumps(plain))
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        (config[section] if section else config)[key] = value
    output = words(capsys, write(tmp_path, "json", config))
    assert hint in output and output.count("\n") == 1


def test_a_model_without_shard_units_is_named_before_anything_is_built(
    plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "py", {key: value for key, value in plain.items() if key != "model"})
    path.write_text(
        "from torch.nn import Linear\n"
        + path.read_text()
        + "model = dict(type=Linear, in_features=1, out_features=1)\n"
    )
    monkeypatch.setitem(FAMILIES.module_dict, "LinearFamily", type("LinearFamily", (Bagel,), {"model": Linear}))
    output = words(capsys, path, "--backend", "fsdp")
    assert "model.type is Linear, which has no shard_units()" in output and "--backend deepspeed:zero2" in output


# --- data, tokenizer, images, EMA -------------------------------------------------------------------------------------


def on_file(plain: dict[str, Any], data: Path, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(plain))
    config["train_dataloader"]["dataset"] = {"type": "UnifiedGenerationDataset", "data_path": str(data)}
    return config | changes


RECORD = json.dumps({"text": "draw a zero"})
RECORDS = [{"text": f"draw a {digit}"} for digit in ("zero", "one", "two")]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
FILES: dict[str, tuple[bytes, str]] = {
    "gzip": (gzip.compress(LINES.encode()), "is compressed by gzip"),
    "utf-16": (LINES.encode("utf-16"), "is UTF-16 text, not UTF-8"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_data_file_of_another_format_is_named_with_the_command_that_converts_it(
    kind: str, plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the name ends in. The command is run, and makes the records of it."""
    content, what = FILES[kind]
    (tmp_path / "data.jsonl").write_bytes(content)
    path = write(tmp_path, "json", on_file(plain, tmp_path / "data.jsonl", work_dir=str(tmp_path / "run")))
    output = words(capsys, path, status=1)
    assert what in output and output.count("\n") == 2, "a line that names the run, and the error"
    convert = output.strip().rpartition("Remedy: convert it: ")[2].removesuffix(".")
    subprocess.run(convert, shell=True, check=True, cwd=tmp_path)
    (file,) = tmp_path.rglob("converted.jsonl")
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == RECORDS


def test_a_byte_order_mark_in_a_data_file_is_passed_over(plain: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes("".join(RECORD + "\n" for _ in range(24)).encode("utf-8-sig"))
    config = on_file(plain, tmp_path / "data.jsonl")
    train_once(write(tmp_path, "json", config), tmp_path / "run")


@pytest.mark.parametrize(
    ("path", "problem"),
    [("./tokenizer", "there is no such folder"), ("{folder}", "holds no tokenizer (it holds: config.json")],
)
def test_a_tokenizer_folder_that_is_missing_or_empty_is_named(
    path: str, problem: str, plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = {"type": "PretrainedTokenizer", "path": path.format(folder=tmp_path)}
    config = write(tmp_path, "json", {**plain, "tokenizer": tokenizer, "work_dir": str(tmp_path / "run")})
    output = words(capsys, config)
    assert "tokenizer.path" in output and problem in output and "a folder with tokenizer.json" in output


@pytest.mark.parametrize(("momentum", "warned"), [(0.9999, True), (0.01, False)])
def test_an_average_whose_momentum_looks_like_a_decay(
    momentum: float, warned: bool, plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks = [{"type": "EMAHook", "momentum": momentum}]
    train_once(write(tmp_path, "json", {**plain, "custom_hooks": hooks}), tmp_path / "run")
    log = (tmp_path / "run" / "train.log").read_text()
    assert ("EMAHook.momentum is 0.9999" in log) is warned
    assert ("for a decay of 0.9999 write momentum=0.0001" in log) is warned
