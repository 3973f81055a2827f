"""The families of ``CausalLM`` and ``ImageTextToText``: they answer by chat template and transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unigen_ds.config.registry import FAMILIES
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.data.samples.splits import TokenSplit
from unigen_ds.families.auto.loading import auto_config, build_auto, read_weights
from unigen_ds.families.auto.model import CausalLM, ImageTextToText, TransformersModel
from unigen_ds.families.auto.processor import ModelProcessor
from unigen_ds.families.base import TRANSFORMERS_WEIGHTS, ConversationFamily, PublishedFormat, read_statement
from unigen_ds.inference.answers import Choose, TextInterface, chooser, continue_prompts, device_of, tokens_left
from unigen_ds.inference.prompts import Sampling
from unigen_ds.models.weights import Pretrained
from unigen_ds.system.files import copy_files, new_directory


class ModelInferencer(TextInterface):
    """A ``CausalLM`` or an ``ImageTextToText``. Without a chat template its answer is the continuation."""

    def __init__(self, model: Any, processor: ModelProcessor) -> None:
        super().__init__(model, processor)
        self.reads_images = processor.pictures is not None
        self.converses = bool(processor.tokenizer.chat.chat_template)
        self._image_ids = [] if processor.pictures is None else processor.pictures.token_ids

    def prompt(self, text: str, images: Sequence[Path], history: Sequence[Turn]) -> Sequence[LoadedSplit]:
        if self.converses:
            return super().prompt(text, images, history)
        if not (ids := self.processor.tokenizer.chat(text)["input_ids"]):
            raise ConfigError(f"the prompt {text!r} has no token to continue", remedy="a prompt with a text")
        return [TokenSplit.unlearned(ids)]

    def write(
        self, prompts: Sequence[Sequence[LoadedSplit]], seeds: Sequence[int], max_new_tokens: int, sampling: Sampling
    ) -> list[str]:
        tokenizer, texts = self.processor.tokenizer, list[str]()
        write = self._in_step if getattr(self.model, "in_step", False) else self._generate
        for prompt, seed in zip(prompts, seeds, strict=True):
            ids = write(prompt, max_new_tokens, chooser(sampling, [seed]))
            texts.append(tokenizer.decode([i for i in ids if i not in tokenizer.end_ids]))
        return texts

    @torch.no_grad()
    def _generate(self, prompt: Sequence[LoadedSplit], max_new_tokens: int, choose: Choose) -> list[int]:
        """The ids that follow a prompt, up to and with the first that ends an answer."""
        tokenizer, builder = self.processor.tokenizer, self.processor.builder()
        builder.adds_plain = False
        builder.add_document(prompt)
        batch = builder.batch(1, (), ())

        def keep_choice(_: Tensor, scores: Tensor) -> Tensor:
            token = torch.tensor(choose(self._of_text(scores), [0]), device=scores.device)
            return torch.full_like(scores, -torch.inf).index_fill(-1, token, 0.0)

        ids = self.model.transformers_model.generate(
            **self.model.inputs(batch.to(device_of(self.model))),
            max_new_tokens=min(max_new_tokens, tokens_left(len(batch.text_ids), self.model.max_document_tokens)),
            logits_processor=[keep_choice],
            eos_token_id=sorted(tokenizer.end_ids),
            pad_token_id=tokenizer.eos_id,
        )
        return ids[0, len(batch.text_ids) :].tolist()

    def _in_step(self, prompt: Sequence[LoadedSplit], max_new_tokens: int, choose: Choose) -> list[int]:
        """The same where ranks make each pass together: one over the whole document, of the same modules on each."""
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "cached": False}
        options["choose"] = lambda logits, documents: choose(self._of_text(logits), documents)
        return continue_prompts(self.model, self.processor, [prompt], **options)[0]

    def _of_text(self, logits: Tensor) -> Tensor:
        """The logits without the tokens of images: no answer has the features of one."""
        return logits.index_fill(-1, torch.tensor(self._image_ids, dtype=torch.int64, device=logits.device), -torch.inf)


class AutoDirectory(PublishedFormat):
    """``config.json`` of a kind of model that transformers has, safetensors, and its tokenizer and processor."""

    general = True

    def __init__(self, model: type[TransformersModel]) -> None:
        self.model, self.name = model, f"a directory of transformers' {model.auto}"

    def recognises(self, folder: Path) -> bool:
        """Compare the class that ``config.json`` names, or else its kind of model, with those of transformers."""
        config = read_statement(folder / "config.json")
        if "model_type" not in config:
            return False
        from transformers.models.auto import modeling_auto as names  # a second: only where it is needed
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if config["model_type"] not in CONFIG_MAPPING_NAMES:  # code of its own, which is never run
            return False
        classes = config.get("architectures") or ()
        kinds = {
            "AutoModelForImageTextToText": names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            "AutoModelForCausalLM": names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        }
        for auto, by_kind in kinds.items():  # some kinds are of both
            if any(each in by_kind.values() for each in classes) if classes else config["model_type"] in by_kind:
                return auto == self.model.auto
        return False

    def config(self, folder: Path) -> dict[str, Any]:
        return {
            "model": {"type": self.model.__name__, "pretrained": str(folder)},
            "tokenizer": {"type": "ModelTokenizer", "path": str(folder)},
        }

    def weights(self, folder: Path) -> Pretrained:
        model = build_auto(self.model.auto, auto_config(folder, {}), attention=None, whole=False)
        return read_weights(folder, model, auto=self.model.auto)

    def write(
        self, model: Any, processor: Any, out: Path, *, source: Path | None, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        with new_directory(out) as folder:
            model.to("cpu", dtype).transformers_model.save_pretrained(folder, max_shard_size=max_shard_size)
            if source is None:  # after the model: the ids that end an answer are the tokenizer's
                processor.tokenizer.save_pretrained(str(folder))
            else:
                copy_files(
                    source,
                    folder,
                    accepts=lambda name: name != "config.json" and not name.endswith(TRANSFORMERS_WEIGHTS),
                )


class _OfTransformers(ConversationFamily):
    processor_type = ModelProcessor
    inferencer = ModelInferencer


@FAMILIES.register_module()
class AutoCausal(_OfTransformers):
    """Texts, read and written, by any language model of transformers."""

    model = CausalLM
    published = (AutoDirectory(CausalLM),)


@FAMILIES.register_module()
class AutoImages(_OfTransformers):
    """Texts and images, read, and texts, written, by any such model of transformers."""

    model = ImageTextToText
    published = (AutoDirectory(ImageTextToText),)
