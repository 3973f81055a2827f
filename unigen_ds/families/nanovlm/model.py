"""A vision-language model as nanoVLM builds it: SigLIP2, pixel shuffle, one projection, a Llama-type language model.

Images come as square tiles of ``vit.image_size``; each becomes ``(image_size / patch_size / pixel_shuffle_factor)**2``
tokens that replace the image tokens in a causal text. Text alone is trained, by cross-entropy.

By default the trio of nanoVLM: SigLIP2-base-patch16-512, factor 4 and SmolLM2-360M, so 512 x 512 pixels are 64 tokens
and 768 numbers become 960. Parameter names are those of transformers; ``published.py`` has nanoVLM's.

Shape suffixes: T tokens, D width, V patches, I image tokens. Source: huggingface/nanoVLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from pydantic import Field
from torch import Tensor, nn

from unigen_ds.config.registry import MODELS, checked
from unigen_ds.config.values import Number
from unigen_ds.core.batch import LossTerms, PackedBatch
from unigen_ds.core.errors import ConfigError
from unigen_ds.families.nanovlm.published import EXTRA_TOKENS, read_published
from unigen_ds.models.attention import Attend
from unigen_ds.models.flops import attention_flops, linear_flops, trains
from unigen_ds.models.llama import LlamaLM
from unigen_ds.models.losses import loss_terms, text_losses
from unigen_ds.models.quantized import quantize_frozen
from unigen_ds.models.settings import LanguageSizes, Quantize, VisionSizes
from unigen_ds.models.vision import VisionTransformer
from unigen_ds.models.weights import Pretrained, PretrainedModel


class LlamaSizes(LanguageSizes):
    """Under Llama's names; what is left out is SmolLM2-360M's."""

    hidden_size: int = Field(default=960, ge=1)
    intermediate_size: int = Field(default=2560, ge=1)
    num_hidden_layers: int = Field(default=32, ge=0)
    num_attention_heads: int = Field(default=15, ge=1)
    num_key_value_heads: int = Field(default=5, ge=1)
    vocab_size: int | None = Field(default=None, ge=1)
    """Rows of the embedding; None: the tokenizer's where `model.llm` is given, which is also the least, else 49218."""
    rms_norm_eps: Number = Field(default=1e-5, gt=0)
    """Epsilon of the norms."""
    rope_theta: Number = Field(default=100_000.0, gt=0)
    """Base of the rotary positions."""
    max_position_embeddings: int = Field(default=8192, ge=1)
    """Number of positions; those of a longer document are squeezed into it."""
    tie_word_embeddings: bool = True
    """One table for the embedding and the output head."""


class SiglipSizes(VisionSizes):
    """Under SigLIP's names; what is left out is SigLIP2-base-patch16-512's."""

    hidden_size: int = Field(default=768, ge=1)
    intermediate_size: int = Field(default=3072, ge=1)
    num_hidden_layers: int = Field(default=12, ge=0)
    num_attention_heads: int = Field(default=12, ge=1)
    image_size: int = Field(default=512, ge=1)
    """Side of a tile in pixels: an image is split into tiles; a multiple of `patch_size * pixel_shuffle_factor`."""
    patch_size: int = Field(default=16, ge=1)


class PixelShuffleConnector(nn.Module):
    """Squares of ``factor * factor`` neighbouring patches, joined to one vector each, and projected without bias."""

    def __init__(self, width_in: int, width_out: int, *, side: int, factor: int) -> None:
        super().__init__()
        self.side, self.factor = side, factor
        self.proj = nn.Linear(width_in * factor**2, width_out, bias=False)

    def forward(self, x_VD: Tensor) -> Tensor:
        tiles, coarse, f = len(x_VD) // self.side**2, self.side // self.factor, self.factor
        blocks = x_VD.reshape(tiles, coarse, f, coarse, f, x_VD.shape[-1]).transpose(2, 3)
        return self.proj(blocks.reshape(tiles * coarse**2, f * f * x_VD.shape[-1]))


@MODELS.register_module()
class VLM(PretrainedModel):
    """``forward(PackedBatch) -> LossTerms`` with the term ``text``.

    Args:
        llm: sizes under Llama's names, [its keys](configs/model.md#vlm); the others are SmolLM2-360M's.
        vit: sizes under SigLIP's names, [its keys](configs/model.md#vlm); the others are SigLIP2-base-patch16-512's.
        pixel_shuffle_factor: a square of so many patches a side becomes one token; 4 where ``pretrained`` has none: 512
            x 512 pixels are 64 tokens.
        freeze: any of ``vit``, ``llm``, ``connector``: no gradient, bit-identical after training.
        quantize: packed weights for the linear layers of frozen parts: ``dict(llm='nf4', vit='int8')``, [quantised
            weights](configs/model.md#quantised-frozen-weights).
        activation_checkpointing: compute decoder and tower layers again in the backward pass: less memory, more time.
        compile: ``torch.compile`` each decoder layer.
        pretrained: published weights, [one of](configs/model.md#vlm) nanoVLM's directory or
            ``dict(vit='DIR', llm='DIR')`` of a SigLIP2 and a SmolLM2 directory; they have every size that is not given.
    """

    forward_methods = ("logits", "next_token_logits")
    """Entry points beside ``forward``; a sharding engine must hook these too."""

    @checked("model")
    def __init__(
        self,
        *,
        llm: Annotated[Mapping[str, Any] | None, LlamaSizes] = None,
        vit: Annotated[Mapping[str, Any] | None, SiglipSizes] = None,
        pixel_shuffle_factor: Annotated[int, Ge(1)] | None = None,
        freeze: Sequence[Literal["vit", "llm", "connector"]] = (),
        quantize: Annotated[Mapping[str, str] | None, Quantize] = None,
        activation_checkpointing: bool = False,
        compile: bool = False,
        pretrained: str | Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        source = read_published(pretrained) if pretrained else None
        of_config = {"llm": llm, "vit": vit, "pixel_shuffle_factor": pixel_shuffle_factor}
        llm, vit, factor = _sizes(source, of_config)
        self.llm_config, self.vit_config = llm, vit
        side = vit["image_size"] // vit["patch_size"]
        self.vocab_size = llm["vocab_size"]
        self.vision_model = VisionTransformer(vit)
        self.connector = PixelShuffleConnector(vit["hidden_size"], llm["hidden_size"], side=side, factor=factor)
        self.language_model = LlamaLM(llm)
        self.start_from(source)
        self.freeze(freeze)
        quantize_frozen(self.parts(), quantize or {})
        self.language_model.model.activation_checkpointing = activation_checkpointing
        self.vision_model.activation_checkpointing = activation_checkpointing
        if compile:
            for layer in self.language_model.model.layers:
                layer.compile()

    @staticmethod
    def processor_sizes(config: Mapping[str, Any]) -> dict[str, int]:
        pretrained = config.get("pretrained")
        _, vit, factor = _sizes(read_published(pretrained) if pretrained else None, config)
        return {"tile_size": vit["image_size"], "vit_patch_size": vit["patch_size"], "pixel_shuffle_factor": factor}

    def arguments(self) -> dict[str, Any]:
        """The sizes as arguments of the constructor, which then needs no ``pretrained``."""
        sizes = {"llm": dict(self.llm_config), "vit": dict(self.vit_config)}
        return {**sizes, "pixel_shuffle_factor": self.connector.factor}

    def parts(self) -> dict[str, nn.Module]:
        return {"vit": self.vision_model, "llm": self.language_model, "connector": self.connector}

    @property
    def squeezes_beyond(self) -> int:
        """Tokens of a document beyond which all of its positions are scaled, by its length."""
        return int(self.llm_config["max_position_embeddings"])

    def forward(self, batch: PackedBatch) -> LossTerms:
        logits = self.language_model.lm_head(self._hidden_states(batch)[batch.text_target_index])
        text = text_losses(logits, batch.text_target_ids, batch.text_target_weight)
        return loss_terms({"text": text}, training=self.training)

    def logits(self, batch: PackedBatch) -> Tensor:
        """``[T, vocabulary]``: for every token what follows it."""
        return self.language_model.lm_head(self._hidden_states(batch))

    def next_token_logits(self, batch: PackedBatch, *, attend: Attend | None = None) -> Tensor:
        """Logits ``[documents, vocabulary]`` of the token that follows each document, on top of cached ones or not."""
        last = torch.tensor(batch.document_lengths, device=batch.document_ids.device).cumsum(0) - 1
        return self.language_model.lm_head(self._hidden_states(batch, attend)[last])

    def _hidden_states(self, batch: PackedBatch, attend: Attend | None = None) -> Tensor:
        """``[T, D]``. The tower runs even without a patch: ZeRO and FSDP need a gradient, if zero, of every weight."""
        text = self.language_model.model.embed_tokens(batch.text_ids)
        patches = self.vision_model(batch.vit_patches.to(text.dtype), batch.vit_position_ids, batch.vit_lengths)
        row_of = torch.argsort(torch.cat([batch.text_index, batch.vit_index]))
        embeddings = torch.cat([text, self.connector(patches)])[row_of]
        return self.language_model.model(embeddings, batch, attend)

    def shard_units(self) -> list[nn.Module]:
        return [*self.vision_model.encoder.layers, *self.language_model.model.layers]

    def flops(self, batch: PackedBatch) -> float:
        vit, llm, trains_vit = self.vision_model, self.language_model, trains(self.vision_model)
        image_attention = attention_flops(batch.vit_lengths, self.vit_config["hidden_size"], grad=trains_vit)
        text_attention = attention_flops(batch.document_lengths, self.llm_config["hidden_size"], grad=True)
        return (
            linear_flops(vit, input_grad=False) * len(batch.vit_patches)
            + linear_flops(self.connector, input_grad=trains_vit) * batch.vit_index.numel()
            + linear_flops(llm.model.layers, input_grad=True) * batch.num_tokens
            + linear_flops(llm.lm_head, input_grad=True) * batch.text_target_index.numel()
            + image_attention * len(vit.encoder.layers)
            + text_attention * len(llm.model.layers)
        )


def _sizes(source: Pretrained | None, of_config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Sizes of language model and vision tower, and the factor: as given, else of the files. Raises ``ConfigError``."""
    of_files = source.sizes if source else {}
    llm = LlamaSizes.with_defaults({**of_files.get("llm", {}), **(of_config.get("llm") or {})}, where="model.llm")
    if llm["vocab_size"] is None:
        llm["vocab_size"] = 49152 + EXTRA_TOKENS  # SmolLM2's
    vit = SiglipSizes.with_defaults({**of_files.get("vit", {}), **(of_config.get("vit") or {})}, where="model.vit")
    factor = of_config.get("pixel_shuffle_factor")
    factor = of_files.get("pixel_shuffle_factor", 4) if factor is None else factor
    if vit["image_size"] % (vit["patch_size"] * factor):
        raise ConfigError(
            f"model: image_size {vit['image_size']}, patch_size {vit['patch_size']}, pixel_shuffle_factor {factor}",
            allowed="image_size a multiple of patch_size * pixel_shuffle_factor",
        )
    return llm, vit, factor
