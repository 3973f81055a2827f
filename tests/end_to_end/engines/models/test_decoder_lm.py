"""``DecoderLM`` under the engines: built without memory, filled from a published directory, trained, exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.engines.jobs import cases
from tests.end_to_end.engines.launch import metric_deviation, want, weight_deviation
from tools.export import main as export
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.samples.splits import TextSplit
from unigen_ds.runner.open.trained import open_model
from unigen_ds.system.journals import read_lines

runs = want("decoder")
pytestmark = pytest.mark.timeout(3600)
SINGLE = "decoder/single@1"
SHARDED = [job.name for job in cases.decoder(full=False) if job.name != SINGLE]
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("name", [SINGLE, *SHARDED])
def test_every_engine_starts_from_the_files(name):
    """Bit by bit, also the rows of the vocabulary that no file has."""
    run, single = runs().outcome(name).initial, runs().outcome(SINGLE).initial
    for path in (runs().out / "data" / "decoder").glob("*.safetensors"):
        for key, tensor in load_file(path).items():
            assert torch.equal(run[key][: len(tensor)], tensor), key
    assert torch.equal(run[EMBEDDING], single[EMBEDDING]) and len(run[EMBEDDING]) == 61


@pytest.mark.parametrize("name", SHARDED)
def test_training_is_that_of_one_process(name):
    run, single = runs().outcome(name), runs().outcome(SINGLE)
    assert len(run.lines) == cases.DECODER_UPDATES and all(line["applied"] for line in run.lines)
    assert metric_deviation(run, single) <= 1e-5
    deviation = weight_deviation(run.final, single.final)
    assert deviation.relative_l2 <= 1e-5, deviation.where
    before = {("master", key): tensor.flatten() for key, tensor in single.initial.items() if key != "lm_head.weight"}
    assert not any(torch.equal(single.final[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("name", [SINGLE, *SHARDED])
def test_statistics_have_the_communication_of_the_engine(name):
    """Of DeepSpeed and FSDP2 alike; one process has none."""
    lines = read_lines(runs().outcome(name).folder / "metrics.jsonl")
    statistics = [line for line in lines if line.get("event") == "training_stats"]
    assert [line["update"] for line in statistics] == [2, 4]
    for line in statistics:
        communicates = line["training_stats/min_share_communication"] > 0
        assert communicates == (name != SINGLE) and line["training_stats/max_share_communication"] < 1
        assert line["training_stats/min_tokens_per_second"] > 0 and line["training_stats/min_fw_bw_time"] > 0
        ranks = [key for key in line if key.startswith("training_stats/tokens_per_second/rank")]
        assert len(ranks) == (1 if name == SINGLE else 2)


@pytest.mark.parametrize("name", [SINGLE, "decoder/zero3@2", "decoder/FULL_SHARD@2"])
@pytest.mark.parametrize("raw", [False, True])
def test_transformers_loads_what_is_exported(name: str, raw: bool, tmp_path: Path):
    """From the checkpoint as its engine wrote it: equal logits."""
    folder = runs().outcome(name).folder
    arguments = [str(folder), str(tmp_path / "out"), "--max-shard-size", "40KB", *(["--raw"] if raw else [])]
    assert export(arguments) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    model, processor = open_model(folder, raw=raw)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "one two three five eight"
    batch = pack_documents([[TextSplit(tuple(processor.tokenizer.encode(text)), loss=True)]], processor)
    assert tokenizer.encode(text) == batch.text_ids[1:-1].tolist()
    with torch.no_grad():
        expected = theirs(input_ids=batch.text_ids[None]).logits[0]
        torch.testing.assert_close(model.eval().logits(batch), expected, rtol=1e-6, atol=1e-6)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert theirs.config.eos_token_id == processor.tokenizer.eos_id == theirs.generation_config.eos_token_id
    weight = runs().outcome(name).final["master" if raw else "ema", EMBEDDING]
    assert torch.equal(theirs.get_input_embeddings().weight.flatten(), weight.flatten())
    assert theirs.lm_head.weight is theirs.get_input_embeddings().weight
