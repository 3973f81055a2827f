"""A conversation -> token ids and the places that the assistant said, by the tokenizer's own chat template.

The template is rendered to text (where transformers 4 and 5 agree; with ``tokenize=True`` they return different types,
and a length taken of the wrong one masks the wrong places), growing by one message a time: what a message adds
behind its generation prompt is the assistant's, its end token and what follows included. The whole text is tokenised
once, and a token is the assistant's where it begins inside such a part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.data.samples import IGNORED

Encode = Callable[[str], tuple[list[int], list[int]]]


def chat_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, reply: bool = False, encode: Encode | None = None
) -> tuple[list[int], list[bool]]:
    """Ids of a conversation and, for each, whether the assistant said it.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        messages: ``{"role": ..., "content": ...}``, as the template takes them.
        reply: end with what invites the assistant to speak.
        encode: another way from the rendered text to ids and the place in it where each begins.

    Raises ``DataError`` where the template changes what came before when a message is added: then no mask is right.
    """
    text = _render(tokenizer, messages, reply=reply)
    bounds: list[int] = []  # begin, end, begin, end, ... of the assistant's parts in the text
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            after = _render(tokenizer, messages[: number + 1])
            before = _render(tokenizer, messages[:number], reply=True) if number else _opening(tokenizer, after)
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    f"the chat template renders message {number} differently when others follow or precede it",
                    remedy="use a template that only appends; there is no assistant mask for this one",
                )
            bounds += (len(before), len(after))
    if encode is not None:
        ids, starts = encode(text)
    else:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, starts = list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
    return ids, [bool(bisect_right(bounds, start) % 2) for start in starts]


def next_token_labels(ids: Sequence[int], said: Sequence[bool]) -> list[int]:
    """What each place predicts: the next id where the assistant said it, else -100."""
    return [i if by_assistant else IGNORED for i, by_assistant in zip(ids[1:], said[1:], strict=True)] + [
        IGNORED
    ] * bool(ids)


def _opening(tokenizer: Any, text: str) -> str:
    """What a chat that the assistant begins has before its words. A template is given no empty conversation."""
    asked = [{"role": "user", "content": "?"}]
    prompt = _render(tokenizer, asked, reply=True).removeprefix(_render(tokenizer, asked))
    before, found, _ = text.partition(prompt)
    return before + found


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, reply: bool = False) -> str:
    if not messages and not reply:
        return ""
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply))
