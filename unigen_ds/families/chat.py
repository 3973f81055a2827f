"""Conversations by a chat template -> ``Sample``: what the processors of such models share.

A conversation is rendered to text in which each image has its own part, and tokenized once; the tokens of an image's
part are its split, those between are texts. Planning reads image headers alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unigen_ds.data.records.turn import Turn
from unigen_ds.data.samples.processor import ConversationProcessor, is_document
from unigen_ds.data.samples.sample import Sample, Split
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.data.text.chat import RenderedChat, encode_chats, next_token_labels


@dataclass(frozen=True)
class Chat:
    """A record whose text is rendered, and not tokenized yet."""

    turns: Sequence[Turn]
    where: object
    rendered: RenderedChat
    signs: Mapping[str, str]
    """Of ``Special.shield``; empty where no text spells a special token."""
    images: Sequence[Any]
    """What ``image_splits`` needs of each."""
    spelled: bool


class ChatProcessor(ConversationProcessor):
    """A subclass has ``render`` and ``image_splits``."""

    on_white = False
    tokenizes_texts = False

    @abstractmethod
    def render(self, turns: Sequence[Turn], where: object, *, keep_images: bool, reply: bool) -> Chat:
        """The text of a conversation, and its images."""

    @abstractmethod
    def image_splits(
        self, chat: Chat, ids: Sequence[int], starts: Sequence[int], labels: Sequence[int]
    ) -> Iterator[tuple[int, int, Split]]:
        """(first token, token after the last, split) of each image, in order. ``starts``: where in the text each token
        begins; ``labels``: what each predicts.
        """

    def plan(
        self, turns: Sequence[Turn], where: object = "", *, keep_images: bool = False, reply: bool = False
    ) -> Sample:
        """The splits of a conversation. ``where`` begins errors; with ``reply`` the next message is the assistant's.

        An image whose header cannot be read does not raise: its split carries the reason and the smallest size.
        """
        return next(self.plan_many([(turns, where)], keep_images=keep_images, reply=reply))

    def plan_many(
        self,
        records: Iterable[tuple[Sequence[Turn], object]],
        *,
        keep_images: bool = False,
        reply: bool = False,
    ) -> Iterator[Sample]:
        """``plan`` of each (turns, where); their texts are tokenized together."""
        chats = [self.render(turns, where, keep_images=keep_images, reply=reply) for turns, where in records]
        encoded = encode_chats(self.tokenizer, [(chat.rendered.text, chat.signs) for chat in chats])
        for chat, (ids, starts) in zip(chats, encoded, strict=True):
            splits = tuple(self._splits(chat, ids, starts))
            yield Sample(splits, plain=is_document(chat.turns), spells_special=chat.spelled)

    def _splits(self, chat: Chat, ids: Sequence[int], starts: Sequence[int]) -> Iterator[Split]:
        labels, done = next_token_labels(ids, chat.rendered.from_assistant(starts)), 0
        for first, last, split in self.image_splits(chat, ids, starts, labels):
            if done < first:
                yield TokenSplit(tuple(ids[done:first]), tuple(labels[done:first]))
            yield split
            done = last
        if done < len(ids):
            yield TokenSplit(tuple(ids[done:]), tuple(labels[done:]))
