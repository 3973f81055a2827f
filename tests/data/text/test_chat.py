"""The assistant's tokens of a conversation: those of public nanoVLM, and correct for any template that appends."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.data.text.chat_support import CONFIG, META, NANOVLM, character_tokenizer, golden_text
from unigen_ds.core.errors import DataError
from unigen_ds.data.text.chat import RenderedChat, encode_rendered, next_token_labels

SPLIT = json.loads((NANOVLM / "image_split.json").read_text(encoding="utf-8"))


def chat_ids(tokenizer: Any, messages: list[dict[str, str]], *, reply: bool = False) -> tuple[list[int], list[bool]]:
    """Ids of one conversation and, for each, whether it is the assistant's."""
    chat = RenderedChat.of(tokenizer, messages, reply=reply)
    ((ids, starts),) = encode_rendered(tokenizer, [chat.text])
    return ids, chat.from_assistant(starts)


def messages_of(text: str) -> list[dict[str, str]]:
    messages = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
    return [{"role": role, "content": content} for role, content in messages]


def learned_text(tokenizer: Any, ids: list[int], from_assistant: list[bool]) -> str:
    return tokenizer.decode([i for i, own in zip(ids, from_assistant, strict=True) if own])


@pytest.mark.parametrize("sample", META["samples"], ids=lambda sample: sample["label_text"][:9])
def test_ids_and_labels_of_the_public_code(sample: dict[str, Any]) -> None:
    messages = messages_of("".join(golden_text(sample["text"])))
    ids, from_assistant = chat_ids(character_tokenizer(), messages)
    assert ids == sample["input_ids"]
    assert next_token_labels(ids, from_assistant) == sample["labels"]


def test_golden_template() -> None:
    chat = SPLIT["chat"]
    tokenizer = character_tokenizer()
    text = tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
    assert text == chat["template_text"]
    assert tokenizer.decode(chat_ids(tokenizer, chat["messages"], reply=True)[0]) == text
    answers = "".join(m["content"] + "<|im_end|>\n" for m in chat["messages"] if m["role"] == "assistant")
    assert learned_text(tokenizer, *chat_ids(tokenizer, chat["messages"])) == answers


def test_a_default_system_prompt_moves_the_mask_along() -> None:
    template = "{% if messages and messages[0].role != 'system' %}SYS{% endif %}" + CONFIG["lm_chat_template"]
    tokenizer = character_tokenizer(template)
    ids, from_assistant = chat_ids(
        tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    )
    assert tokenizer.decode(ids[:3]) == "SYS"
    assert learned_text(tokenizer, ids, from_assistant) == "bc<|im_end|>\n"


def test_a_template_that_rewrites_what_came_before_is_refused() -> None:
    template = "{% for m in messages %}{{ m.content if loop.last else '-' }}{% endfor %}"
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    with pytest.raises(DataError, match="message 1"):
        chat_ids(character_tokenizer(template), messages)
