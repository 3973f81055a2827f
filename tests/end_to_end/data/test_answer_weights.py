"""OpenAI's ``weight`` of an assistant message: 0 is read by every kind of model, and has no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.text.chat_support import CONFIG, character_tokenizer
from tests.text_run import run_config, text_config
from unigen_ds.core.errors import DataError
from unigen_ds.data.records.records import parse_record
from unigen_ds.data.samples.sample import IGNORED
from unigen_ds.data.text.tokenizers import ChatTokenizer, ModelTokenizer
from unigen_ds.families.auto.processor import ModelProcessor
from unigen_ds.families.nanovlm.processor import VLMProcessor

CHAT = [
    {"role": "user", "content": "one"}, {"role": "assistant", "content": "two three", "weight": 0},
    {"role": "user", "content": "four"}, {"role": "assistant", "content": "five six", "weight": 1},
]  # fmt: skip
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_run_learns_the_other_answers(tmp_path: Path) -> None:
    runner, hook = run_config(text_config(tmp_path, [{"messages": CHAT}] * 2))
    _, learned = run_config(text_config(
        tmp_path / "all", [{"messages": [{**m, "weight": 1} for m in CHAT]}] * 2, work_dir=str(tmp_path / "all" / "run")
    ))  # fmt: skip
    assert [batch.text_ids.tolist() for batch in hook.batches] == [b.text_ids.tolist() for b in learned.batches]
    tokenizer = runner.processor.tokenizer
    more = learned.targets - hook.targets
    assert sorted(tokenizer.decode([i]).strip() for i in more if i != tokenizer.eos_id) == ["three", "two"]


def learned_text(processor: Any, messages: list[dict[str, Any]]) -> str:
    """What the labels of a record spell."""
    (sample,) = processor.plan_many([(parse_record({"messages": messages}, "here"), "here")])
    labels = [label for split in sample.splits for label in split.labels if label != IGNORED]
    return str(processor.tokenizer.chat.decode(labels))


@pytest.mark.parametrize(("kind", "template"), [
    ("vlm", CONFIG["lm_chat_template"]), ("model", CONFIG["lm_chat_template"]), ("model", MARKED),
])  # fmt: skip
def test_chat_templates(kind: str, template: str, tmp_path: Path) -> None:
    character_tokenizer(template).save_pretrained(tmp_path)
    processor: Any = (
        VLMProcessor(ChatTokenizer(path=str(tmp_path)), tile_size=16, vit_patch_size=4, pixel_shuffle_factor=2)
        if kind == "vlm"
        else ModelProcessor(ModelTokenizer(path=str(tmp_path)))
    )
    both = [{**message, "weight": None} for message in CHAT]
    ends = "two three<|im_end|>", "five six<|im_end|>"
    text = learned_text(processor, both).replace("\n", "")
    assert text.replace(" ", "") == "".join(ends).replace(" ", "")
    assert learned_text(processor, CHAT).replace("\n", "").replace(" ", "") == ends[1].replace(" ", "")
    first = [CHAT[0], {**CHAT[1], "weight": 1}, CHAT[2], {**CHAT[3], "weight": 0}]
    assert learned_text(processor, first).replace("\n", "").replace(" ", "") == ends[0].replace(" ", "")
    neighbours = [CHAT[0], CHAT[1], {"role": "assistant", "content": "seven"}]
    assert learned_text(processor, neighbours).replace("\n", "") == "seven<|im_end|>"


def test_a_template_without_a_mark_for_each_answer_is_refused(tmp_path: Path) -> None:
    character_tokenizer(MARKED.replace("== 'assistant'", "== 'assistant' and loop.last")).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="here: the chat template marks 1 parts of 2 assistant messages, and some have"):
        learned_text(ModelProcessor(ModelTokenizer(path=str(tmp_path))), CHAT)
