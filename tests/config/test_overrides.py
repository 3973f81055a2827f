"""Configs: every key is known, every override has an effect, and errors name the nearest valid key."""

import re
from pathlib import Path
from typing import Any

import pytest

from unigen_ds.config.file import shipped_configs
from unigen_ds.config.overrides import config_path
from unigen_ds.core.choices import SHIPPED_NAMES
from unigen_ds.core.errors import ConfigError
from unigen_ds.runner.settings.tree import Settings, load_config, load_settings

TEXT = """
import math
batch_size, max_epochs, _steps_of_mine = 2, 3, 7
train_dataloader = dict(batch_size=batch_size, packing=None, dataset=dict(type='Any', data_path='x'))
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=math.sqrt(4.0)), accumulative_counts=1)
param_scheduler = [dict(type='LinearLR', begin=0), dict(type='CosineAnnealingLR', end=max_epochs)]
val_dataloader = None

def helper(x):
    return x
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path


def test_loads_and_names_the_work_dir_after_the_file(config_file: Path) -> None:
    config = load_config(config_file)
    assert config.work_dir == str(Path("work_dirs") / "mine")
    assert config.optim_wrapper.optimizer.lr == 2.0
    assert "helper" not in config and "math" not in config


def test_base_files_and_yaml_load(tmp_path: Path, config_file: Path) -> None:
    config_file.write_text(TEXT.replace("import math", "").replace("math.sqrt(4.0)", "2.0"))
    (tmp_path / "child.py").write_text("_base_ = './mine.py'\nrandomness = dict(seed=5)\n")
    config = load_config(tmp_path / "child.py")
    assert config.randomness.seed == 5 and config.train_dataloader.batch_size == 2
    (tmp_path / "c.yaml").write_text("_mine: 4\ntrain_cfg:\n  max_epochs: 2\n")
    assert load_config(tmp_path / "c.yaml").train_cfg.max_epochs == 2


def test_classes_instead_of_names_and_their_imports_are_no_keys(tmp_path: Path) -> None:
    from unigen_ds.families.bagel.model import UnifiedModel

    path = tmp_path / "xtuner.py"
    path.write_text(
        "from torch.optim import AdamW\nfrom unigen_ds.families.bagel.model import UnifiedModel\n"
        "from pathlib import Path as Own\n"
        "optim_wrapper = dict(optimizer=dict(type=AdamW, lr=1e-4))\nmodel = dict(type=UnifiedModel)\n"
        "custom_hooks = [dict(type=Own)]\n"
    )
    config = load_config(path)
    assert (config.optim_wrapper.optimizer.type, config.model.type) == ("AdamW", UnifiedModel.__name__)
    assert config.custom_hooks[0].type is Path, "a class of the user's own stays one"
    assert set(config) == {"optim_wrapper", "model", "custom_hooks", "work_dir"}


def test_a_config_may_call_what_it_imports_and_name_classes(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text("import math\nfrom pathlib import Path\n_x = math.sqrt(4.0)\nmodel = dict(type=Path, lr=_x)\n")
    config = load_config(path)
    assert config.model.lr == 2.0 and config.model.type is Path
    assert set(config) == {"model", "work_dir", "_x"}


@pytest.mark.parametrize(
    ("override", "where", "expected"),
    [
        ("optim_wrapper.optimizer.lr=1e-4", ("optim_wrapper", "optimizer", "lr"), 1e-4),
        ("optim_wrapper.optimizer.betas=(0.9,0.95)", ("optim_wrapper", "optimizer", "betas"), (0.9, 0.95)),
        ("optim_wrapper.clip_grad.max_norm=0.5", ("optim_wrapper", "clip_grad", "max_norm"), 0.5),
        ("val_dataloader.batch_size=3", ("val_dataloader", "batch_size"), 3),
        ("loss_weights.image=0.5", ("loss_weights", "image"), 0.5),
        ("param_scheduler.1.end=9", ("param_scheduler", 1, "end"), 9),
        ("work_dir=runs/a=b", ("work_dir",), "runs/a=b"),
        ("resume=true", ("resume",), True),
    ],
)
def test_overrides_reach_their_place(config_file: Path, override: str, where: tuple[Any, ...], expected: Any) -> None:
    value: Any = load_config(config_file, [override])
    for key in where:
        value = value[key]
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train_dataloader.batchsize=3", "did you mean 'batch_size'"),
        ("optim_wraper.accumulative_counts=3", "did you mean 'optim_wrapper'"),
        ("param_scheduler.2.end=9", "not an index of a list of 2"),
        ("param_scheduler.x=9", "not an index of a list of 2"),
        ("train_dataloader.packing.window=9", r"packing is \{'window': 9\}.*dict\(type="),
        ("train_dataloader.batch_size.x=9", "train_dataloader.batch_size is 2 and has no keys"),
        ("optim_wrapper.optimizer.betaz.x.y=9", "did you mean 'betas'"),
        ("optim_wrapper.clip_grad={'maxnorm': 1}", "did you mean 'max_norm'"),
        ("batch_size=8", "write train_dataloader.batch_size"),
        ("_steps_of_mine=8", "unknown config key '_steps_of_mine'"),
        ("lr", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
    ],
)
def test_overrides_that_cannot_work_are_errors(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(config_file, [override])


@pytest.mark.parametrize(
    ("overrides", "section"),
    [
        (["train_cfg=dict(_delete_=True, max_updates=3)"], {"max_updates": 3}),
        (["train_cfg={'max_updates': 3, '_delete_': True}", "train_cfg.max_tokens=5"],
         {"max_updates": 3, "max_tokens": 5}),
    ],
)  # fmt: skip
def test_delete_replaces_a_section(overrides: list[str], section: dict[str, int]) -> None:
    """As in a config file: nothing of what the config has is left."""
    assert load_config("unified_digits", overrides).train_cfg == section


def test_unknown_keys_name_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError) as error:
        Settings.from_config({"_mine": 1, "train_dataloder": {}, "optim_wrapper": {"clip_grad": {"max_nrom": 1}}})
    text = str(error.value)
    assert "train_dataloder'. Remedy: did you mean 'train_dataloader'" in text and "_mine" not in text
    assert "optim_wrapper.clip_grad.max_nrom'. Remedy: did you mean 'max_norm'" in text


def test_a_missing_or_broken_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor a shipped config"):
        config_path(tmp_path / "no.py")
    (tmp_path / "broken.py").write_text("a = 1 / 0\n")
    with pytest.raises(ConfigError, match=r"broken.py.*ZeroDivisionError"):
        load_config(tmp_path / "broken.py")


def test_a_shipped_config_is_found_by_its_name(tmp_path: Path) -> None:
    assert config_path("decoder_lm_90m").parts[-5:-1] == ("unigen_ds", "families", "decoder_lm", "configs")
    assert config_path("unified_digits").parts[-5:-1] == ("unigen_ds", "examples", "digits", "configs")
    assert load_config("decoder_lm_300m").model.llm.num_hidden_layers == 20
    with pytest.raises(ConfigError, match="neither a file nor a shipped config") as error:
        config_path(tmp_path / "other" / "decoder_lm_90m.py")
    assert SHIPPED_NAMES.replace(" or ", ", ") in str(error.value)
    with pytest.raises(ConfigError, match="did you mean 'unified_digits'"):
        config_path("unifed_digits")
    assert sorted(shipped_configs()) == SHIPPED_NAMES.replace(" or ", ", ").split(", ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("randomness.deterministic=True", "write env.deterministic"),
        ("train_dataloader.shuffle=False", "delete it"),
        ("optim_wrapper.dtype=int8", "precision='bf16'"),
        ("env_cfg.cudnn_benchmark=True", "delete it; env.dist_timeout_s"),
        ("val_evaluator.type=Accuracy", "the metrics of EvaluateHook"),
        ("train_cfg.val_interval=often", "EvaluateHook"),
        ("log_level=5", "env.log_level"),
    ],
)
def test_keys_of_mmengines_that_a_file_may_not_have_are_refused(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_settings(config_file, [override])


def test_none_of_mmengine_is_the_same_in_a_file_and_as_an_override(config_file: Path) -> None:
    expected = load_config(config_file).to_dict()
    for name in ("val_cfg", "val_evaluator", "test_cfg", "test_dataloader", "test_evaluator"):
        assert load_config(config_file, [f"{name}=None"]).to_dict() == expected
    config_file.write_text(TEXT + "test_evaluator = dict(type='Own')\n")
    assert load_config(config_file, {"test_evaluator": None}).to_dict() == expected, "what the file has is replaced"


def test_where_a_config_has_both_ours_counts(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of mmengine's and ours, in the file or by overrides; the log has a line."""
    lines: list[str] = []
    monkeypatch.setattr("unigen_ds.runner.settings.tree.notice", lines.append)
    data = "val_dataloader = dict(split=0.1)\ntrain_cfg = dict(max_epochs=3, val_interval=2)\n"
    config_file.write_text(TEXT.replace("val_dataloader = None\n", data))
    key, best = "train_cfg.val_interval", "default_hooks.checkpoint.save_best"
    evaluates: dict[str, Any] = {"type": "EvaluateHook", "interval": 2, "by_epoch": True}
    with_best = {**evaluates, "save_best": "val/loss"}
    ema, own = {"type": "EMAHook", "momentum": 0.1}, {"type": "EvaluateHook", "interval": 7, "save_best": "val/acc"}
    cases: list[tuple[dict[str, Any], list[Any], str]] = [
        ({key: 5}, [{**evaluates, "interval": 5}], f"{key}=5 is read as {{'type': 'EvaluateHook', 'interval': 5"),
        ({"custom_hooks": [ema]}, [ema, evaluates], f"{key}=2 is read as {evaluates!r} in custom_hooks."),
        ({"custom_hooks": [own]}, [own], f"{key}=2 is left out: custom_hooks has {own!r}."),
        ({"custom_hooks": [own], best: "auto"}, [own],
         f"{best}='auto' is left out: custom_hooks has {own!r}."),
        ({best: "auto"}, [with_best], f"{best}='auto' is read as {with_best!r} in custom_hooks."),
        ({"val_dataloader": None}, [], f"{key}=2 is left out: there is no val_dataloader."),
        ({"optim_wrapper.dtype": "bfloat16", "optim_wrapper.precision": "fp32"}, [evaluates],
         "optim_wrapper.dtype='bfloat16' is left out: the config has optim_wrapper.precision='fp32'."),
    ]  # fmt: skip
    for overrides, hooks, line in cases:
        lines.clear()
        assert (load_config(config_file, overrides).get("custom_hooks") or []) == hooks, overrides
        assert [one.startswith(f"Config: {line}") for one in lines].count(True) == 1, (overrides, lines)
    with pytest.raises(ConfigError, match="log_level"):
        load_config(config_file, {"log_level": 5})


def test_a_base_may_be_given_validation_data(tmp_path: Path) -> None:
    """Of the shipped digits config, and with ``_delete_`` of one that has None there."""
    (tmp_path / "base.py").write_text("val_dataloader = None\ntrain_cfg = dict(max_epochs=1)\n")
    path = tmp_path / "child.py"
    for base, more in ((str(config_path("unified_digits")), ""), ("./base.py", "_delete_=True, ")):
        path.write_text(f"_base_ = {base!r}\nval_dataloader = dict({more}split=0.1)\n")
        assert load_config(path).val_dataloader == {"split": 0.1}
