"""A conversation -> token ids and the places that the assistant said, by the tokenizer's own chat template.

The template is rendered to text (where transformers 4 and 5 agree; with ``tokenize=True`` they return different types,
and a length taken of the wrong one masks the wrong places), growing by one message a time: what a message adds
behind its generation prompt is the assistant's, its end token and what follows included. The whole text is tokenised
once, and a token is the assistant's where it begins inside such a part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from unigen_ds.core.errors import DataError

IGNORED = -100


def chat_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, reply: bool = False
) -> tuple[list[int], list[bool]]:
    """Ids of a conversation and, for each, whether the assistant said it.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        messages: ``{"role": ..., "content": ...}``, as the template takes them.
        reply: end with what invites the assistant to speak.

    Raises ``DataError`` where the template changes what came before when a message is added: then no mask is right.
    """
    text = _render(tokenizer, messages, reply=reply)
    bounds: list[int] = []  # begin, end, begin, end, ... of the assistant's parts in the text
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _render(tokenizer, messages[:number], reply=True)
            after = _render(tokenizer, messages[: number + 1])
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    f"the chat template renders message {number} differently when others follow or precede it",
                    remedy="use a template that only appends; there is no assistant mask for this one",
                )
            bounds += (len(before), len(after))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    said = [bool(bisect_right(bounds, start) % 2) for start, _ in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), said


def next_token_labels(ids: Sequence[int], said: Sequence[bool]) -> list[int]:
    """What each place predicts: the next id where the assistant said it, else -100."""
    return [i if by_assistant else IGNORED for i, by_assistant in zip(ids[1:], said[1:], strict=True)] + [
        IGNORED
    ] * bool(ids)


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, reply: bool = False) -> str:
    if not messages and not reply:
        return ""
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply))
