"""``AutoCausal`` and ``AutoImages``: the families of ``CausalLM`` and ``ImageTextToText``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from unigen_ds.config.registry import FAMILIES
from unigen_ds.families.auto.inference import ModelInferencer
from unigen_ds.families.auto.loading import build, read_config, read_weights
from unigen_ds.families.auto.model import CausalLM, ImageTextToText, TransformersModel
from unigen_ds.families.auto.processor import ModelProcessor
from unigen_ds.families.base import TRANSFORMERS_WEIGHTS, ConversationFamily, PublishedFormat, read_statement
from unigen_ds.models.weights import Pretrained
from unigen_ds.system.files import copy_files, new_directory


class AutoDirectory(PublishedFormat):
    """``config.json`` of a kind of model that transformers has, safetensors, and its tokenizer and processor."""

    general = True

    def __init__(self, model: type[TransformersModel]) -> None:
        self.model, self.name = model, f"a directory of transformers' {model.auto}"

    def recognises(self, folder: Path) -> bool:
        """Compare the class that ``config.json`` names, or else its kind of model, with those of transformers."""
        from transformers.models.auto import modeling_auto as names
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        stored = read_statement(folder / "config.json")
        if stored.get("model_type") not in CONFIG_MAPPING_NAMES:  # code of its own, which is never run
            return False
        classes = stored.get("architectures") or ()
        kinds = {
            "AutoModelForImageTextToText": names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            "AutoModelForCausalLM": names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        }
        for auto, known in kinds.items():  # some kinds are of both
            if any(each in known.values() for each in classes) if classes else stored["model_type"] in known:
                return auto == self.model.auto
        return False

    def config(self, folder: Path) -> dict[str, Any]:
        return {
            "model": {"type": self.model.__name__, "pretrained": str(folder)},
            "tokenizer": {"type": "ModelTokenizer", "path": str(folder)},
        }

    def weights(self, folder: Path) -> Pretrained:
        settings = read_config(folder, {})
        return read_weights(folder, build(self.model.auto, settings, attention=None, whole=False), auto=self.model.auto)

    def write(
        self, model: Any, processor: Any, out: Path, *, source: Path | None, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        """Write the model by ``save_pretrained`` of transformers, with the tokenizer and processor of the training."""
        with new_directory(out) as folder:
            model.to("cpu", dtype).transformers_model.save_pretrained(folder, max_shard_size=max_shard_size)
            if source is None:  # after the model: the ids that end an answer are the tokenizer's
                processor.tokenizer.save_pretrained(str(folder))
            else:
                copy_files(
                    source,
                    folder,
                    wanted=lambda name: name != "config.json" and not name.endswith(TRANSFORMERS_WEIGHTS),
                )


class _OfTransformers(ConversationFamily):
    """The base of both families."""

    processor_type = ModelProcessor
    terms: ClassVar[Mapping[str, str]] = {"text": "weight of the mean cross-entropy per text target"}

    def inferencer(self, model: Any, processor: Any) -> ModelInferencer:
        return ModelInferencer(model, processor)


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
