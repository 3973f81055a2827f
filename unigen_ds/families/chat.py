"""Conversations by a chat template -> ``Sample``: what the processors of such models share.

A conversation is rendered to text in which each image has its own part, and tokenized once; the tokens of an image's
part are its split, those between are texts. Planning reads image headers alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unigen_ds.core.errors import DataError
from unigen_ds.data.images.image_files import ImageContent
from unigen_ds.data.records.records import Turn, same_message
from unigen_ds.data.samples.processor import ConversationProcessor, is_document
from unigen_ds.data.samples.sample import Sample, Split, Tally
from unigen_ds.data.samples.splits import TokenSplit, count_image
from unigen_ds.data.text.chat import RenderedChat, encode_chats, next_token_labels


@dataclass(frozen=True)
class Chat:
    """A record whose text is rendered, and not tokenized yet."""

    turns: Sequence[Turn]
    where: object
    rendering: RenderedChat
    signs: Mapping[str, str]
    """Signs that replace special tokens spelled in a text (``Special.shield``); empty where there are none."""
    images: Sequence[Any]
    """The images in order, as ``image_splits`` of the subclass needs them."""


@dataclass(frozen=True)
class ChatImage(Split):
    """An image, not yet decoded, with the tokens of its part of the conversation."""

    path: str
    ids: tuple[int, ...]
    error: str = field(default="", kw_only=True)
    content: ImageContent | None = field(default=None, compare=False, repr=False, kw_only=True)
    """The file, where planning has read all of it."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_encoded(self) -> int:
        return 1

    @property
    def source(self) -> str:
        return self.path

    def count(self, tally: Tally) -> None:
        count_image(tally, self)


class ChatProcessor(ConversationProcessor):
    """A subclass has ``render`` and ``image_splits``."""

    on_white = False

    @abstractmethod
    def render(self, turns: Sequence[Turn], where: object, *, keep_images: bool, reply: bool) -> Chat:
        """The text of a conversation, and its images."""

    @abstractmethod
    def image_splits(
        self, chat: Chat, ids: Sequence[int], starts: Sequence[int], labels: Sequence[int]
    ) -> Iterator[tuple[int, int, Split]]:
        """(first token, token after the last, split) of each image. ``starts``: where each token begins in the text."""

    def messages(self, turns: Sequence[Turn], where: object) -> list[list[Turn]]:
        """The turns of each message. Raises ``DataError`` for an image of the assistant."""
        messages: list[list[Turn]] = []
        for turn in turns:
            if turn.role == "assistant" and turn.kind == "image":
                raise DataError(
                    f"{where}: an image is to be generated, but this model only understands images",
                    remedy="for records of an image and its text, captions='understand' of the data set: the text is"
                    " then learned from the image; leave other ones out, or train a UnifiedModel",
                )
            if messages and same_message(messages[-1][-1], turn):
                messages[-1].append(turn)
            else:
                messages.append([turn])
        return messages

    def plan_many(
        self, records: Iterable[tuple[Sequence[Turn], object]], *, keep_images: bool = False, reply: bool = False
    ) -> Iterator[Sample]:
        """Plan records as ``ConversationProcessor`` does; with ``reply`` the next message is the assistant's."""
        chats = [self.render(turns, where, keep_images=keep_images, reply=reply) for turns, where in records]
        encodings = encode_chats(self.tokenizer, [(chat.rendering.text, chat.signs) for chat in chats])
        for chat, (ids, starts) in zip(chats, encodings, strict=True):
            labels, end, splits = next_token_labels(ids, chat.rendering.from_assistant(starts)), 0, list[Split]()
            for first, last, split in self.image_splits(chat, ids, starts, labels):
                if end < first:
                    splits.append(TokenSplit(tuple(ids[end:first]), tuple(labels[end:first])))
                splits.append(split)
                end = last
            if end < len(ids):
                splits.append(TokenSplit(tuple(ids[end:]), tuple(labels[end:])))
            yield Sample(tuple(splits), plain=is_document(chat.turns))
