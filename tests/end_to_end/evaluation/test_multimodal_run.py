"""``MultimodalConsistency`` during training and by the tool: the model answers a record with a text and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from tests.data.support import picture, talk, text, write_jsonl
from tests.evaluation import tiny_models
from tests.text_run import text_config, words
from tests.tiny import tiny_config
from tools.evaluate import main
from unigen_ds.config.registry import METRICS
from unigen_ds.core.errors import ConfigError
from unigen_ds.evaluation.metrics import Metric
from unigen_ds.runner import Runner
from unigen_ds.runner.open.trained import open_inferencer
from unigen_ds.system.journals import read_lines

FLOW = {"num_timesteps": 2}
GENERATION = {"max_new_tokens": 3, "flow": FLOW}
DRAWN = {"role": "assistant", "type": "image", "image_path": "seen.png"}


@METRICS.register_module(force=True)
class KeptPairs(Metric):
    name, predicts, compares = "kept_pairs", "text and image", "nothing"
    pairs: ClassVar[dict[str, tuple[str, Image.Image]]] = {}

    def rows(self, predictions: Any, references: Any, keys: Any) -> Any:
        self.pairs.update(zip(keys, predictions, strict=True))
        return [[len(one)] for one, _ in predictions]

    def values(self, table: np.ndarray) -> dict[str, float]:
        return {self.name: float(table.mean())}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.clip(tmp_path_factory.mktemp("clip")))


def train(folder: Path, metrics: list[Any], *, pairs: int = 4) -> Runner:
    """Records of both orders, and ``pairs`` at most of them; all others have a text alone."""
    picture(folder / "seen.png", 8, 8, seed=1)
    sentence = text("assistant", "this is zero")
    answers = [[sentence, DRAWN], [DRAWN, sentence]] * (pairs // 2)
    records = [
        talk(text("user", f"draw {word}"), *answer)
        for word, answer in zip(("zero", "one") * (pairs // 2), answers, strict=True)
    ]
    write_jsonl(folder / "val.jsonl", [*records, talk(text("user", "this is one"), text("assistant", "one"))])
    data = {"type": "UnifiedGenerationDataset", "data_path": str(folder / "val.jsonl")}
    hook = {"type": "EvaluateHook", "interval": 1, "unit": "update", "metrics": metrics, "generation": GENERATION}
    config = tiny_config(
        folder / "run", folder, train_dataloader__dataset=data, train_dataloader__batch_size=4,
        val_dataloader={"dataset": data, "batch_size": 2}, custom_hooks=[hook],
    )  # fmt: skip
    return Runner.from_cfg(config, max_updates=1)


def test_during_training_and_by_the_tool(tmp_path: Path, clip: str, capsys: pytest.CaptureFixture[str]) -> None:
    KeptPairs.pairs.clear()
    consistency = {"type": "MultimodalConsistency", "path": clip}
    train(tmp_path, [consistency, {"type": "KeptPairs"}]).train()
    [line] = [one for one in read_lines(tmp_path / "run" / "metrics.jsonl") if one.get("event") == "evaluation"]
    assert 0 <= line["val/multimodal_consistency"] <= 2.5 and 0 <= line["val/multimodal_consistency_r_precision"] <= 1
    assert sorted(KeptPairs.pairs) == [f"val:{number}" for number in range(4)]
    losses, own_result, *_ = json.loads((tmp_path / "run" / "evaluations" / "1.json").read_text())["results"]
    assert losses["provenance"]["num_samples"] == "5" and own_result["provenance"]["num_samples"] == "4"

    inferencer = open_inferencer(tmp_path / "run")
    options = {"understand": True, "max_length": 4}
    assert KeptPairs.pairs["val:0"][0] == inferencer.unified_generate("draw zero", **options).text, "written first"
    words, picture = KeptPairs.pairs["val:1"]
    assert words == inferencer.unified_generate("", parts=["draw one", picture.convert("L")], **options).text, (
        "drawn first"
    )
    assert len({image.tobytes() for _, image in KeptPairs.pairs.values()}) == 4

    generation = ["--generation", "max_new_tokens=3", "flow.num_timesteps=2"]
    assert main([str(tmp_path / "run"), "--metrics", json.dumps(consistency), *generation]) == 0
    values = dict(one.split("  ") for one in capsys.readouterr().out.splitlines() if "  " in one)
    assert float(values["multimodal_consistency"]) == pytest.approx(line["val/multimodal_consistency"], rel=1e-5)


def test_without_such_records_or_such_a_model_the_message_names_what_to_do(tmp_path: Path, clip: str) -> None:
    consistency = {"type": "MultimodalConsistency", "path": clip}
    with pytest.raises(ConfigError, match=r"has an answer of kind text and image.*docs/evaluation/metrics.md"):
        train(tmp_path, [consistency], pairs=0).train()
    hook = {"type": "EvaluateHook", "interval": 1, "unit": "update", "metrics": [consistency]}
    records = [talk(text("user", words(2)), text("assistant", words(2, k))) for k in range(12)]
    config = text_config(tmp_path, records, val_dataloader={"split": 0.3}, custom_hooks=[hook])
    with pytest.raises(ConfigError, match=r"Consistency needs texts with pictures.*docs/evaluation/metrics.md"):
        Runner.from_cfg(config).train()
