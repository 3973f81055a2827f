"""Turns of a conversation -> a ``Sample``, by a model's own chat template and, for images, its own image processor.

A conversation is rendered and split into the assistant's parts (``data/text/chat.py``); each image's token is replaced
by the text that the model's processor has for an image of that size, and everything is tokenized once. The assistant's
parts carry loss. A document (text alone, all of it to be learned) is no conversation: it is tokenized as it is and ends
with the end token. Planning reads image headers alone.

transformers' processor classes join a tokenizer, an image processor and often a video processor. The last needs
torchvision (transformers 5.23), and so do image processors on their fast backend. Here the tokenizer and the image
processor (its PIL backend, so that an image has the same pixels on every machine) are loaded each for itself and joined
by the model's own processor class, whose video part stays empty.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image

from unigen_ds.config.registry import checked
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.images.image_files import ImageHeader
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.processor import is_document
from unigen_ds.data.samples.sample import IGNORED, Split
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.data.text.chat import RenderedChat
from unigen_ds.data.text.tokenizers import ModelTokenizer
from unigen_ds.families.auto.batch import Inputs, LoadedPicture, ModelBatch, ModelBuilder, PictureSplit
from unigen_ds.families.chat import Chat, ChatProcessor
from unigen_ds.system.log import notice

_UNREADABLE = (32, 32)
"""Size of an image whose header cannot be read; its sample is left out."""
_ImagePlace = tuple[str, ImageHeader, int, int]
"""An image of a conversation: its path and header, and where its own part of the text begins and ends."""


class ModelProcessor(ChatProcessor):
    """A model's own view of a conversation.

    Args:
        tokenizer: with a chat template.
        reads_images: whether the model has a vision tower.
        ce_reweight: weigh each text target by 1 / sqrt(targets of its text) instead of 1.
        seed: of the loader; nothing here is random.
    """

    tokenizer: ModelTokenizer

    @checked("processor")
    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        reads_images: bool = False,
        ce_reweight: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, ce_reweight=ce_reweight, seed=seed)
        if not isinstance(tokenizer, ModelTokenizer):
            raise ConfigError(
                f"tokenizer.type is {type(tokenizer).__name__!r}", allowed="ModelTokenizer, for a model of transformers"
            )
        self.pictures = Pictures(tokenizer) if reads_images else None

    @property
    def fingerprint(self) -> str:
        return fingerprint("model-plan-1", self.tokenizer.fingerprint, self.pictures is not None)

    def builder(self) -> ModelBuilder:
        return ModelBuilder(self)

    def two_documents(self) -> tuple[ModelBatch, ModelBatch]:
        """Two short documents, each with an image if the model reads any; and again with another text in the first."""
        special = {*self.tokenizer.chat.all_special_ids, *(self.pictures.token_ids if self.pictures else ())}
        plain = [i for i in range(len(self.tokenizer)) if i not in special][:4] * 4
        image = [self.pictures.plain] if self.pictures else []
        batches = []
        for words in (plain[:5], plain[1:6]):
            builder = self.builder()
            for text, at in ((words, 3), (plain[2:5], 1)):  # the images at different positions
                begin, end = map(TokenSplit.unlearned, (text[:at], text[at:]))
                builder.add_document([begin, *image, end])
            batches.append(builder.batch(2, (), ()))
        return batches[0], batches[1]

    def render(self, turns: Sequence[Turn], where: object, *, keep_images: bool, reply: bool) -> Chat:
        texts, signs = self.tokenizer.special.shield([turn.value for turn in turns if turn.kind == "text"])
        if is_document(turns) and not reply:
            chat, begin = self.tokenizer.chat, self.tokenizer.chat.bos_token or ""
            if not begin or chat("a")["input_ids"][:1] != [chat.bos_token_id]:  # this tokenizer adds no begin token
                begin = ""
            whole = begin + "\n".join(texts) + chat.eos_token
            return Chat(turns, where, RenderedChat(whole, (len(begin), len(whole))), signs, ())
        if not self.tokenizer.chat.chat_template:
            raise ConfigError(
                f"tokenizer {self.tokenizer.name!r} has no chat template", remedy="give tokenizer.chat_template"
            )
        paths = [turn.value for turn in turns if turn.kind == "image"]
        if paths and self.pictures is None:
            raise DataError(f"{where}: it has an image, and the model reads texts alone", remedy="ImageTextToText")
        messages, rest, template_input = self.messages(turns, where), iter(texts), list[dict[str, Any]]()
        for message in messages:  # as chat templates read them: parts in order, or of a model of texts one text
            content: Any = [
                {"type": "text", "text": next(rest)} if turn.kind == "text" else {"type": "image"} for turn in message
            ]
            if self.pictures is None:
                content = "\n".join(part["text"] for part in content)
            template_input.append({"role": message[0].role, "content": content})
        try:
            rendering = RenderedChat.of(
                self.tokenizer.chat,
                template_input,
                reply=reply,
                marked=True,
                last=self.tokenizer.learn == "last",
                without_loss=[number for number, message in enumerate(messages) if not message[0].learned],
            )
        except DataError as error:
            raise error.at(str(where)) from error
        except Exception as error:  # a template raises what it likes
            raise DataError(f"{where}: the model's chat template refuses the conversation: {error}") from error
        rendering, images = self._with_images(rendering, paths, where, keep_images)
        return Chat(turns, where, rendering, signs, images)

    def _with_images(
        self, rendering: RenderedChat, paths: Sequence[str], where: object, keep: bool
    ) -> tuple[RenderedChat, list[_ImagePlace]]:
        """Replace the token of each image by the image's own text; return the images, too."""
        if self.pictures is None:
            return rendering, []
        pieces = rendering.text.split(self.pictures.token)
        if len(pieces) != len(paths) + 1:
            raise DataError(
                f"{where}: the chat template has {len(pieces) - 1} of {self.pictures.token} for {len(paths)} images",
                remedy="a template of the model's own for images, in tokenizer.chat_template",
            )
        text, bounds, images = pieces[0], [*rendering.bounds], list[_ImagePlace]()
        for path, piece in zip(paths, pieces[1:], strict=True):
            header, start = self.header(path, keep=keep), len(text)
            own = self.pictures.text(header.size or _UNREADABLE)
            longer = len(own) - len(self.pictures.token)
            bounds = [bound + longer if bound > start else bound for bound in bounds]
            images.append((path, header, start, start + len(own)))
            text += own + piece
        return RenderedChat(text, tuple(bounds)), images

    def image_splits(
        self, chat: Chat, ids: Sequence[int], starts: Sequence[int], labels: Sequence[int]
    ) -> Iterator[tuple[int, int, Split]]:
        """A token is an image's where it begins inside of the image's text."""
        end = 0
        for path, header, start, stop in chat.images:
            first = next((i for i in range(end, len(ids)) if starts[i] >= start), len(ids))
            end = last = next((i for i in range(first, len(ids)) if starts[i] >= stop), len(ids))
            state = {"error": header.error, "content": header.content}
            tokens, size = (tuple(ids[first:last]), tuple(labels[first:last])), header.size or _UNREADABLE
            yield first, last, PictureSplit(path, *tokens, size, **state)


_PLAIN = (32, 32)
_GREY = (100, 100, 100)
"""Not what normalising makes zero: some models leave out images of zeros."""


class Pictures:
    """Makes texts and inputs of images as the processor in the files beside ``tokenizer`` does. Raises ``ConfigError``
    where there is none, or none that names the tokens of an image.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer = tokenizer
        self.processor = _processor(tokenizer)
        if getattr(self.processor, "image_token", None) is None:
            raise _support_error(self.processor, "has no token for an image")
        self.token_ids = [each for each in self.processor.image_token_ids if each is not None]
        """Ids of the tokens that an image's features replace."""
        try:
            two, _ = self._process([Image.new("RGB", _PLAIN, _GREY)] * 2)
        except NotImplementedError as error:
            raise _support_error(self.processor, "names no text for an image") from error
        pixels = two.get("pixel_values", torch.empty(0))
        self.by_sample = pixels.ndim > 4 and len(pixels) == 1
        """Whether images are nested in samples: ``[1, images, ...]``."""

    @property
    def token(self) -> str:
        """The text of an image in the rendered conversation."""
        return str(self.processor.image_token)

    @cache  # noqa: B019 - there is one of a run
    def text(self, size: tuple[int, int]) -> str:
        """Return the text that replaces ``token`` for an image of (width, height) pixels."""
        return self._process([Image.new("RGB", size, _GREY)])[1][0]

    def inputs(self, image: Image.Image) -> Inputs:
        return self._process([image.convert("RGB")])[0]

    @cached_property
    def plain(self) -> LoadedPicture:
        """A document of one grey image, without targets."""
        ids = self.tokenizer.encode_unprotected(self.text(_PLAIN))
        return LoadedPicture(tuple(ids), (IGNORED,) * len(ids), self.inputs(Image.new("RGB", _PLAIN, _GREY)))

    def _process(self, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        """Process images as a call of the processor does, without its tokenization."""
        processor = self.processor
        image_lists, *_ = processor.prepare_inputs_layout(images=list(images))
        options = processor._merge_kwargs(tokenizer_init_kwargs=self.tokenizer.chat.init_kwargs, return_tensors="pt")
        inputs, texts = processor._process_images(image_lists, **options["images_kwargs"])
        unused_names = processor.unused_input_names
        return {name: torch.as_tensor(value) for name, value in inputs.items() if name not in unused_names}, texts


def _support_error(processor: Any, problem: str) -> ConfigError:
    remedy = "another model, or a family of your own (docs/extending/model.md)"
    return ConfigError(f"{type(processor).__name__} of transformers {problem}", remedy=remedy)


def _processor(tokenizer: ModelTokenizer) -> Any:
    """The processor of transformers for the files beside the tokenizer, without what is not an image's or a text's."""
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import processor_class_from_name

    where = f"tokenizer.path {tokenizer.name!r}"
    with tempfile.TemporaryDirectory() as folder:
        for file, content in tokenizer.files.items():
            (Path(folder) / file).write_bytes(content)
        try:
            images = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"{where} has no image processor: {str(error).strip().splitlines()[0]}",
                allowed="a directory with preprocessor_config.json or processor_config.json",
            ) from error
        configs = [
            json.loads(tokenizer.files.get(f"{each}_config.json", b"{}")) for each in ("processor", "preprocessor")
        ]
        name = next((config["processor_class"] for config in configs if config.get("processor_class")), None)
        kind: Any = processor_class_from_name(name) if name else None
        if kind is None:
            raise ConfigError(f"{where} names no processor of transformers (processor_class is {name!r})")
        parts = {"tokenizer": tokenizer.chat, "image_processor": images}
        others = [part for part in kind.get_attributes() if part not in parts]
        if others:
            notice(f"{name} is used without its {', '.join(others)}: texts and images need no more.")
        options, _ = kind.get_processor_dict(folder)
        with _lenient(kind):
            return kind.from_args_and_dict([parts.get(part) for part in kind.get_attributes()], options)


@contextmanager
def _lenient(kind: Any) -> Any:
    """Inside, the class accepts None for a part, and SmolVLM's needs no num2words, which is for the text of a video."""
    check = kind.check_argument_for_proper_class

    def lenient(self: Any, name: str, part: Any) -> Any:
        return None if part is None else check(self, name, part)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(kind, "check_argument_for_proper_class", lenient))
        if getattr(sys.modules[kind.__module__], "num2words", kind) is None:
            stack.enter_context(mock.patch.object(sys.modules[kind.__module__], "num2words", str))
        yield
