"""A model's own image processor, without torchvision: the tokens and the inputs of an image.

transformers' processor classes join a tokenizer, an image processor and often a video processor. The last needs
torchvision (transformers 5.23), and so do image processors on their fast backend. Here the tokenizer and the image
processor (its PIL backend, so that an image has the same pixels on every machine) are loaded each for itself and joined
by the model's own processor class, whose video part stays empty.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image

from unigen_ds.core.errors import ConfigError
from unigen_ds.data.samples.sample import IGNORED
from unigen_ds.data.text.tokenizers import ModelTokenizer
from unigen_ds.families.auto.batch import Inputs, LoadedPicture
from unigen_ds.system.log import notice

_PLAIN = (32, 32)
_GREY = (100, 100, 100)
"""Not what normalising makes zero: some models leave out images of zeros."""


class Pictures:
    """Makes texts and inputs of images, as the processor of a model's directory does.

    Args:
        tokenizer: of the same directory, with the files of the processor.

    Raises ``ConfigError`` where there is none, or none that names the tokens of an image.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer = tokenizer
        self.processor = _processor(tokenizer)
        if getattr(self.processor, "image_token", None) is None:
            raise _unsupported(self.processor, "has no token for an image")
        self.token_ids = [each for each in self.processor.image_token_ids if each is not None]
        """Ids of the tokens that an image's features replace."""
        try:
            two, _ = self._process([Image.new("RGB", _PLAIN, _GREY)] * 2)
        except NotImplementedError as error:
            raise _unsupported(self.processor, "names no text for an image") from error
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
        """The model's inputs for one image."""
        return self._process([image.convert("RGB")])[0]

    @cached_property
    def plain(self) -> LoadedPicture:
        """A document of one grey image, without targets."""
        ids = self.tokenizer.encode_unprotected(self.text(_PLAIN))
        return LoadedPicture(tuple(ids), (IGNORED,) * len(ids), self.inputs(Image.new("RGB", _PLAIN, _GREY)))

    def _process(self, images: Sequence[Image.Image]) -> tuple[dict[str, Any], list[str]]:
        """As the processor's own call does it, which would also tokenize."""
        processor = self.processor
        nested, *_ = processor.prepare_inputs_layout(images=list(images))
        options = processor._merge_kwargs(tokenizer_init_kwargs=self.tokenizer.chat.init_kwargs, return_tensors="pt")
        inputs, texts = processor._process_images(nested, **options["images_kwargs"])
        unused = processor.unused_input_names
        return {name: torch.as_tensor(value) for name, value in inputs.items() if name not in unused}, texts


def _unsupported(processor: Any, problem: str) -> ConfigError:
    remedy = "another model, or a family of your own (docs/extending.md)"
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
        stored, _ = kind.get_processor_dict(folder)
        with _lenient(kind):
            return kind.from_args_and_dict([parts.get(part) for part in kind.get_attributes()], stored)


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
