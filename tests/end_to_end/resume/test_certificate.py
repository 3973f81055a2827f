"""``tools/certify.py`` with a user's config, and kills that ``benchmarks/kills.py`` has 1,000 of."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import kills
from tests.support.needs import slow
from tests.support.processes import ENVIRONMENT, popen
from tests.text_run import count_up, write_jsonl, write_text_config
from tools import certify
from unigen_ds.checks import certificate

pytestmark = pytest.mark.timeout(900)
HOOK = '''
import random
from unigen_ds.config.registry import HOOKS
from unigen_ds.hooks.base import Hook


@HOOKS.register_module()
class OwnHook(Hook):
    """Adds to a weight what a resume has forgotten, or what no two runs have alike."""

    def __init__(self, how):
        self.how, self.updates = how, 0

    def before_update(self, run):
        self.updates += 1
        number = {"forget": self.updates, "noise": random.SystemRandom().random(), "": 0}[self.how]
        run.backend.master_shards()[0].data.add_(1e-3 * number)
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return kills.write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(("number", "times"), [(84, 12), *slow((2, 3), (64, 3))])
def test_a_killed_run_ends_bit_equal_to_the_one_that_was_not(tmp_path, data, number, times):
    """ZeRO-2 and FSDP2 on two processes, one process; saves and evaluations are asynchronous."""
    trial = kills.run_case(kills.case(0, number), data, tmp_path, kills=times, fresh=False)
    assert trial.problems == [] and trial.kills == times, trial.problems


def certify_run(folder, monkeypatch, how, *options):
    """The exit status, what was measured, and what is left of the folder of the runs."""
    monkeypatch.setattr(certificate, "Popen", popen)
    write_jsonl(folder / "train.jsonl", count_up(200))
    (folder / "own_hook.py").write_text(HOOK)
    config = write_text_config(folder)
    evaluation = f"touch {folder}/evaluated-{{step}} {{checkpoint}} {{out}}"
    hooks = [{"type": "OwnHook", "how": how}, {"type": "AsyncEvaluateHook", "command": evaluation}]
    more = {"custom_imports": {"imports": ["own_hook"]}, "custom_hooks": hooks,
            "visualizer": {"vis_backends": [{"type": "WandbVisBackend"}]}}  # fmt: skip
    with config.open("a") as stream:
        stream.writelines(f"{key} = {value!r}\n" for key, value in more.items())
    command = [str(config), "--updates", "6", "--save-every", "2", "--json", str(folder / "result.json"), *options]
    status = certify.main(command)
    before = {"train.jsonl", ".unigen_index", "own_hook.py", "config.py", "result.json", "__pycache__"}
    return status, json.loads((folder / "result.json").read_text()), {p.name for p in folder.iterdir()} - before


def test_a_users_own_config_is_certified_and_nothing_of_it_is_touched(tmp_path, monkeypatch, capsys):
    status, result, files = certify_run(tmp_path, monkeypatch, "", "--kills", "5")
    output = capsys.readouterr().out
    assert (status, files) == (0, set()), output
    assert result["bit_equal"] and result["kills"] == sum(result["moments"].values()) == 5 >= result["resumed"] > 0
    assert result["resume_seconds"]["max"] > 0 and 0 < result["share_of_saves"] < 1
    assert "bit-equal" in output and "left out: WandbVisBackend, AsyncEvaluateHook." in output


@pytest.mark.slow
def test_kills_before_the_first_save_certify_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(certificate, "MOMENTS", ("start",))
    assert popen([sys.executable, "-c", ""], env=ENVIRONMENT).wait() == 0, "their server runs"
    status, result, _ = certify_run(tmp_path, monkeypatch, "", "--kills", "2", "--updates", "40", "--save-every", "41")
    assert (status, result["resumed"], result["kills"]) == (1, 0, 2)
    assert "NOT tested: no kill came after a save. Remedy: more --updates" in capsys.readouterr().out


@pytest.mark.parametrize(("how", "most"), [("forget", "4"), ("noise", "1")])
def test_what_is_not_bit_equal_is_named_and_kept(tmp_path, monkeypatch, capsys, how, most):
    """A hook whose state no checkpoint has; and one that makes every run another one, which is no fault of a resume."""
    status, result, files = certify_run(tmp_path, monkeypatch, how, "--kills", most)
    output = capsys.readouterr().out
    assert status == 1 and len(files) == 1, output
    assert result["deterministic"] is (how == "forget")
    assert "metrics.jsonl loss is" in output and ("Remedy: env.deterministic=True" in output) is (how == "noise")
    assert any(line.startswith("checkpoint ") and "master|" in line for line in result["differences"])
