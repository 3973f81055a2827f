"""A conversation -> token ids and which of them are the assistant's, by the tokenizer's own chat template.

The template is rendered to text (where transformers 4 and 5 agree; with ``tokenize=True`` they return different types,
and the length of the wrong one masks the wrong tokens), growing by one message at a time: what a message adds
after its generation prompt is the assistant's, its end token and what follows included. A template may mark these parts
itself (``{% generation %}``). The whole text is tokenised once; a token is the assistant's where it begins in one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unigen_ds.core.errors import DataError
from unigen_ds.data.samples.sample import IGNORED

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Encoding = tuple[list[int], list[int]]
"""Ids of a text, and where in it each begins."""


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text, and which parts of it are the assistant's."""

    text: str
    bounds: tuple[int, ...]
    """Begin, end, begin, end, ... of the assistant's parts in the text."""

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply: bool = False,
        marked: bool = False,
        last: bool = False,
        without_loss: Collection[int] = (),
    ) -> RenderedChat:
        """Render a conversation with the chat template of a fast tokenizer of transformers.

        Args:
            messages: ``{"role": ..., "content": ...}``, as the template accepts them.
            reply: end with the template's generation prompt.
            marked: the assistant's parts are the template's ``{% generation %}`` blocks, where it has them.
            last: of these parts the last one alone; a template may then change earlier ones.
            without_loss: numbers of the assistant's messages that are no such parts.

        Raises ``DataError`` where the template changes earlier text when a message is added: then no mask is correct.
        """
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if marked and _GENERATION.search(tokenizer.chat_template):
            from transformers.utils.chat_template_utils import render_jinja_template

            (text,), (blocks,) = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=tokenizer.chat_template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=reply,
                **tokenizer.special_tokens_map,
            )
            marks = tuple(bound for block in blocks for bound in block)
            if without_loss and len(marks) != 2 * len(answers):
                raise DataError(
                    f"the chat template marks {len(marks) // 2} parts of {len(answers)} assistant messages, and some"
                    " have the weight 0",
                    remedy="a template with one {% generation %} block for each of them, in tokenizer.chat_template",
                )
            if without_loss:
                parts = [k for k, number in enumerate(answers) if number not in without_loss]
                marks = tuple(bound for k in parts for bound in marks[2 * k : 2 * k + 2])
            return cls(text, marks[-2:] if last else marks)
        text = _render(tokenizer, messages, reply=reply)
        bounds: list[int] = []
        answers = [number for number in answers if number not in without_loss]
        if last:  # before a reply it is the one that is to come
            answers = [] if reply else answers[-1:]
        for number in answers:
            whole = number == len(messages) - 1 and not reply
            after = text if whole else _render(tokenizer, messages[: number + 1])
            before = _render(tokenizer, messages[:number], reply=True) if number else _opening(tokenizer, after)
            if not (after.startswith(before) and text.startswith(after)):
                only_last = ", or tokenizer.learn='last'" * (marked and not last)
                raise DataError(
                    f"the chat template renders message {number} differently when others follow or precede it",
                    remedy=f"use a template that only appends{only_last}; there is no assistant mask for this one",
                )
            bounds += (len(before), len(after))
        return cls(text, tuple(bounds))

    def from_assistant(self, starts: Sequence[int]) -> NDArray[np.bool_]:
        """Whether each token, which begins at one of ``starts`` in the text, is the assistant's."""
        return np.searchsorted(self.bounds, starts, side="right") % 2 == 1


def encode_rendered(tokenizer: Any, texts: Sequence[str]) -> list[Encoding]:
    """Each of some rendered conversations, in one call."""
    if not texts:
        return []
    encoding = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    starts = [[start for start, _ in offsets] for offsets in encoding["offset_mapping"]]
    return list(zip(encoding["input_ids"], starts, strict=True))


def encode_chats(tokenizer: Any, chats: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[Encoding]:
    """``encode_rendered`` of chats with the signs of ``Special.encode_shielded``; those without any in one call."""
    together = iter(encode_rendered(tokenizer.chat, [text for text, signs in chats if not signs]))
    for text, signs in chats:
        yield tokenizer.special.encode_shielded(text, signs) if signs else next(together)


def next_token_labels(ids: Sequence[int], from_assistant: NDArray[np.bool_]) -> list[int]:
    """What each position predicts: the next id where it is the assistant's, else -100."""
    labels: list[int] = np.where(from_assistant[1:], ids[1:], IGNORED).tolist()
    return [*labels, *[IGNORED] * bool(ids)]


def _opening(tokenizer: Any, text: str) -> str:
    """The text before the assistant's words in a chat that it begins. Templates render no empty conversation."""
    question = [{"role": "user", "content": "?"}]
    prompt = _render(tokenizer, question, reply=True).removeprefix(_render(tokenizer, question))
    before, separator, _ = text.partition(prompt)
    return before + separator


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, reply: bool = False) -> str:
    if not messages and not reply:
        return ""
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply))
