"""A unified text + image model: BAGEL's mixture of transformers, number for number, in any size.

Text and ViT tokens run through the "und" experts, latent tokens through the "gen" experts (``*_moe_gen``); all meet in
joint attention. Text is trained by cross-entropy on the next token, images by flow matching on latent patches.

Inside the model tokens are in expert order (all und tokens, then all gen tokens), so that routing is a slice and
not a gather in every layer. Parameter names are those of the published directory.

Shape suffixes: T tokens, D width, H heads, E head width, L latent patches, C text targets, M image targets.
Source: ByteDance-Seed/Bagel (Deng et al., 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from unigen_ds.config.registry import AUTOENCODERS, MODELS, build, checked
from unigen_ds.config.section import Of
from unigen_ds.core.batch import LossTerms, PackedBatch
from unigen_ds.core.errors import ConfigError
from unigen_ds.families.bagel.published import (
    VIT_SELECT_LAYER,
    UnifiedSizes,
    model_sizes,
    read_exported,
    read_pretrained,
    with_copied_experts,
)
from unigen_ds.models import flow
from unigen_ds.models.attention import Attend, plan_attention
from unigen_ds.models.flops import attention_flops, linear_flops, trains
from unigen_ds.models.layers import (
    GeluMLP,
    PositionTable,
    RMSNorm,
    SwiGLU,
    TimestepEmbedder,
    rotary_tables,
    rotate,
    run_layers,
    sincos_2d,
)
from unigen_ds.models.losses import image_losses, loss_terms, text_losses
from unigen_ds.models.quantized import quantize_frozen
from unigen_ds.models.settings import Quantize, VisionSizes
from unigen_ds.models.vae import encode_by_size, hold_as_buffers
from unigen_ds.models.vision import VisionTransformer
from unigen_ds.models.weights import PretrainedModel


class RoutedModule(nn.Module):
    """A module with two sets of layers: ``<name>`` for text and ViT tokens, ``<name>_moe_gen`` for latent tokens."""

    def _route(self, x: Tensor, num_und: int, name: str) -> Tensor:
        """The first ``num_und`` rows through one layer, the rest through the other. Both run even without a row: every
        parameter has a gradient, if zero, in every micro-batch, or collectives of ZeRO and FSDP mismatch.
        """
        und, gen = getattr(self, name), getattr(self, name + "_moe_gen")
        return torch.cat([und(x[:num_und]), gen(x[num_und:])])


class MoTAttention(RoutedModule):
    """Joint attention of both experts: Qwen2 with q/k norm, and a second set of projections for latent tokens."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.head_width = width // config["num_attention_heads"]
        for suffix in ("", "_moe_gen"):
            self.add_module("q_proj" + suffix, nn.Linear(width, width))
            self.add_module("k_proj" + suffix, nn.Linear(width, config["num_key_value_heads"] * self.head_width))
            self.add_module("v_proj" + suffix, nn.Linear(width, config["num_key_value_heads"] * self.head_width))
            self.add_module("o_proj" + suffix, nn.Linear(width, width, bias=False))
            self.add_module("q_norm" + suffix, RMSNorm(self.head_width, eps=eps))
            self.add_module("k_norm" + suffix, RMSNorm(self.head_width, eps=eps))

    def forward(self, x_TD: Tensor, num_und: int, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (
            self._route(x_TD, num_und, name).unflatten(-1, (-1, self.head_width))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q = rotate(self._route(q, num_und, "q_norm"), *rotary)
        k = rotate(self._route(k, num_und, "k_norm"), *rotary)
        return self._route(attend(q, k, v).flatten(1), num_und, "o_proj")


class MoTLayer(RoutedModule):
    """One decoder layer; dropout (0 in BAGEL) acts on both residual branches."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = MoTAttention(config)
        for suffix in ("", "_moe_gen"):
            self.add_module("mlp" + suffix, SwiGLU(width, config["intermediate_size"]))
            self.add_module("input_layernorm" + suffix, RMSNorm(width, eps=eps))
            self.add_module("post_attention_layernorm" + suffix, RMSNorm(width, eps=eps))
        self.dropout = nn.Dropout(config["dropout"])

    def forward(self, x_TD: Tensor, num_und: int, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        input_TD = self._route(x_TD, num_und, "input_layernorm")
        x_TD = x_TD + self.dropout(self.self_attn(input_TD, num_und, rotary, attend))
        input_TD = self._route(x_TD, num_und, "post_attention_layernorm")
        return x_TD + self.dropout(self._route(input_TD, num_und, "mlp"))


class MoTBackbone(RoutedModule):
    """``embed_tokens``, ``layers``, ``norm``, ``norm_moe_gen``; tokens in expert order."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(MoTLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(width, eps=eps)
        self.norm_moe_gen = RMSNorm(width, eps=eps)
        self.head_width = width // config["num_attention_heads"]
        self.theta = config["rope_theta"]
        self.activation_checkpointing = False

    def forward(self, x_TD: Tensor, num_und: int, position_ids: Tensor, attend: Attend) -> Tensor:
        rotary = rotary_tables(position_ids, head_width=self.head_width, theta=self.theta)
        x_TD = run_layers(self.layers, x_TD, num_und, rotary, attend, recompute=self.activation_checkpointing)
        return self._route(x_TD, num_und, "norm")


@MODELS.register_module()
class UnifiedModel(PretrainedModel):
    """``forward(PackedBatch) -> LossTerms`` with terms ``text`` and ``image``.

    Args:
        llm: sizes under Qwen2's names and ``dropout``, [its keys](configs/model.md#unifiedmodel); those that
            ``pretrained`` does not have.
        vit: sizes under SigLIP's names, [its keys](configs/model.md#unifiedmodel); those that ``pretrained`` lacks.
        vae: component: the autoencoder, frozen, whole on every process, in fp32; needed where ``pretrained`` has none.
        latent_patch_size: side of a latent patch, in latent pixels; as ``pretrained`` has it, else 2.
        max_latent_size: rows and columns of the latent position table, in patches: the largest image; as ``pretrained``
            has it, else 64.
        vit_max_patches_per_side: rows and columns of the table of ViT positions, in patches: the largest image; as
            ``pretrained`` has it, else ``image_size // patch_size`` of ``vit``, which is also the most.
        timestep_shift: moves training times towards the noise above 1; 1 leaves them alone. ``tools/generate.py`` and
            the inferencer draw with it by default; with a published directory, taken as it is, they use BAGEL's public
            3.0.
        freeze: any of ``vit``, ``llm``, ``connector``, ``vae`` (always): no gradient, bit-identical after training.
        quantize: packed weights for the linear layers of frozen parts: ``dict(llm='nf4', vit='int8')``, [quantised
            weights](configs/model.md#quantised-frozen-weights).
        activation_checkpointing: compute decoder and tower layers again in the backward pass: less memory, more time.
        compile: ``torch.compile`` each decoder layer.
        pretrained: initial weights and all sizes: a published BAGEL directory, or ``dict(llm='DIR', vit='DIR',
            vae='DIR')`` of some of the three.
        vit_select_layer: layer of ``pretrained``'s vision tower that is read, counted from its end: -1 the last, -2 the
            one before; None: as the directory was exported, else BAGEL's -2. Layers after it are not built.
        copy_init_moe: gen experts that ``pretrained`` lacks start as copies of the und experts.
    """

    forward_methods = ("velocity", "next_token_logits")
    """Entry points beside ``forward``; a sharding engine must hook these too."""

    @checked("model")
    def __init__(
        self,
        *,
        llm: Annotated[Mapping[str, Any] | None, UnifiedSizes] = None,
        vit: Annotated[Mapping[str, Any] | None, VisionSizes] = None,
        vae: Annotated[Mapping[str, Any] | None, Of(AUTOENCODERS, rest_from="pretrained")] = None,
        latent_patch_size: Annotated[int, Ge(1)] | None = None,
        max_latent_size: Annotated[int, Ge(1)] | None = None,
        vit_max_patches_per_side: Annotated[int, Ge(1)] | None = None,
        timestep_shift: float = 1.0,
        freeze: Sequence[Literal["vae", "vit", "llm", "connector"]] = ("vae",),
        quantize: Annotated[Mapping[str, str] | None, Quantize] = None,
        activation_checkpointing: bool = False,
        compile: bool = False,
        pretrained: str | Mapping[str, str] | None = None,
        vit_select_layer: Annotated[int, Le(-1)] | None = None,
        copy_init_moe: bool = False,
    ) -> None:
        super().__init__()
        if copy_init_moe and not pretrained:
            raise ConfigError("model.copy_init_moe has no effect without model.pretrained")
        source = read_pretrained(pretrained, vit_select_layer=vit_select_layer) if pretrained else None
        of_config = {
            "llm": llm, "vit": vit, "vae": vae, "latent_patch_size": latent_patch_size,
            "max_latent_size": max_latent_size, "vit_max_patches_per_side": vit_max_patches_per_side,
        }  # fmt: skip
        self.vit_select_layer = source.sizes["vit_select_layer"] if source else vit_select_layer or VIT_SELECT_LAYER
        self.sizes = sizes = model_sizes(source, of_config)
        config, vit = sizes["llm"], sizes["vit"]
        if config["vocab_size"] is None:
            raise ConfigError("model.llm.vocab_size is not given", remedy="the tokenizer's number of tokens, or more")
        width = config["hidden_size"]
        self.latent_patch_size, self.timestep_shift = sizes["latent_patch_size"], timestep_shift
        self.max_latent_size, self.vocab_size = sizes["max_latent_size"], config["vocab_size"]
        self.published = isinstance(pretrained, str) and not read_exported(Path(pretrained))
        """Whether the weights are a published directory's, as they are; not after a step of training."""
        stored_vae = source is not None and any(name.startswith("vae.") for name in source.tensors)
        with nullcontext() if stored_vae else torch.device("cpu"):
            self.vae: Any = hold_as_buffers(build(AUTOENCODERS, sizes["vae"], where="model.vae"))
        self.latent_width = self.vae.latent_channels * self.latent_patch_size**2
        backbone, head = MoTBackbone(config), nn.Linear(width, self.vocab_size, bias=False)
        self.language_model: Any = nn.ModuleDict({"model": backbone, "lm_head": head})  # the published names
        tower = VisionTransformer(vit)
        self.vit_model: Any = nn.ModuleDict({"vision_model": tower})
        self.connector = GeluMLP(vit["hidden_size"], width, width)
        self.vit_pos_embed = PositionTable(sizes["vit_max_patches_per_side"], width)
        self.vae2llm = nn.Linear(self.latent_width, width)
        self.llm2vae = nn.Linear(width, self.latent_width)
        self.time_embedder = TimestepEmbedder(width)
        self.latent_pos_embed = PositionTable(self.max_latent_size, width)
        if source is not None and copy_init_moe:
            source = with_copied_experts(source, self.state_dict(keep_vars=True))
        self.start_from(source)
        self.freeze((*freeze, "vae"))
        quantize_frozen(self.parts(), quantize or {})
        backbone.activation_checkpointing = tower.activation_checkpointing = activation_checkpointing
        if compile:
            for layer in backbone.layers:
                layer.compile()

    @staticmethod
    def processor_sizes(config: Mapping[str, Any]) -> dict[str, int]:
        pretrained = config.get("pretrained")
        sizes = model_sizes(read_pretrained(pretrained) if pretrained else None, config)
        with torch.device("meta"):
            vae = build(AUTOENCODERS, sizes["vae"], where="model.vae")
        return {
            "vit_patch_size": sizes["vit"]["patch_size"],
            "vit_max_patches_per_side": sizes["vit_max_patches_per_side"],
            "latent_channels": vae.latent_channels,
            "latent_patch_size": sizes["latent_patch_size"],
            "vae_spatial_downsample": vae.downsample,
            "max_latent_size": sizes["max_latent_size"],
        }

    def arguments(self) -> dict[str, Any]:
        """The sizes as arguments of the constructor, which then needs no ``pretrained``."""
        select = {} if self.vit_select_layer == VIT_SELECT_LAYER else {"vit_select_layer": self.vit_select_layer}
        return {**self.sizes, **select}

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """The tables of positions are fixed, and ``llm2vae`` is zero, so the first velocity is zero."""
        if name.startswith("vae."):
            tensor.copy_(self.get_buffer(name))
        elif name.endswith("pos_embed"):
            tensor.copy_(sincos_2d(math.isqrt(len(tensor)), tensor.shape[1]))
        else:
            super().initialise(name, tensor, generator)
        if name == "llm2vae.weight":
            tensor.zero_()  # drawn nevertheless, so that the other parameters keep their values for a seed

    def parts(self) -> dict[str, nn.Module]:
        return {"vae": self.vae, "vit": self.vit_model, "llm": self.language_model, "connector": self.connector}

    def forward(self, batch: PackedBatch) -> LossTerms:
        self.published = self.published and not self.training
        with torch.no_grad():
            clean_LC = encode_by_size(self.vae, batch, self.latent_patch_size)
        return self.loss_terms(batch, clean_LC)

    def loss_terms(self, batch: PackedBatch, clean_LC: Tensor) -> LossTerms:
        """Return what ``forward`` does, computed from clean latent patches ``[L, C]``."""
        t_L = flow.shift_timesteps(torch.sigmoid(batch.timesteps), self.timestep_shift)  # -inf: 0, a clean image
        noisy_LC = flow.interpolate(clean_LC, batch.flow_noise, t_L)
        hidden_TD, row_of = self.hidden_states(batch, noisy_LC, t_L)
        logits = self.language_model.lm_head(hidden_TD[row_of[batch.text_target_index]])
        text = text_losses(logits, batch.text_target_ids, batch.text_target_weight)
        target_row_M = row_of[batch.image_target_index]
        # latents are last in expert order, one row each; a mask of the noisy ones would make the host wait for its size
        row_M = target_row_M - (batch.num_tokens - batch.latent_index.numel())
        velocity = self.velocity_of(hidden_TD[target_row_M], noisy_LC[row_M], t_L[row_M])
        image = image_losses(velocity, (batch.flow_noise - clean_LC)[row_M])
        return loss_terms({"text": text, "image": image}, training=self.training)

    def hidden_states(
        self, batch: PackedBatch, latents_LC: Tensor, t_L: Tensor, *, attend: Attend | None = None
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states in expert order, and the row of each of the ``T`` tokens in them."""
        x_TD, order, num_und = self._embed(batch, latents_LC, t_L)
        row_of = torch.argsort(order)
        attend = attend or plan_attention(batch, row_of)
        return self.language_model.model(x_TD, num_und, batch.position_ids[order], attend), row_of

    def _embed(self, batch: PackedBatch, latents_LC: Tensor, t_L: Tensor) -> tuple[Tensor, Tensor, int]:
        """Input embeddings in expert order, the token number of each row, and the number of und tokens."""
        text = self.language_model.model.embed_tokens(batch.text_ids)
        vit = self.vit_model.vision_model(batch.vit_patches.to(text.dtype), batch.vit_position_ids, batch.vit_lengths)
        vit = self.connector(vit) + self.vit_pos_embed(batch.vit_position_ids).to(vit.dtype)
        gen = self.vae2llm(latents_LC.to(text.dtype)) + self.time_embedder(t_L, dtype=text.dtype)
        gen = gen + self.latent_pos_embed(batch.latent_position_ids).to(gen.dtype)
        order = torch.cat([batch.text_index, batch.vit_index, batch.latent_index])
        return torch.cat([text, vit, gen]), order, batch.text_index.numel() + batch.vit_index.numel()

    def velocity(self, batch: PackedBatch, latents_LC: Tensor, t: float, *, attend: Attend | None = None) -> Tensor:
        """Velocity ``[M, z * p * p]`` of the noisy patches, for the samplers; clean patches keep t = 0."""
        t_L = torch.where(torch.isfinite(batch.timesteps), t, 0.0)
        hidden_TD, row_of = self.hidden_states(batch, latents_LC, t_L, attend=attend)
        target_row_M = row_of[batch.image_target_index]
        row_M = target_row_M - (batch.num_tokens - batch.latent_index.numel())
        return self.velocity_of(hidden_TD[target_row_M], latents_LC[row_M], t_L[row_M])

    def velocity_of(self, hidden_MD: Tensor, noisy_MC: Tensor, t_M: Tensor) -> Tensor:
        """Velocity ``[M, C]`` of noisy patches from their final hidden states. A subclass that predicts something else
        (the clean picture, the noise) overrides this; loss and samplers stay those of the velocity.
        """
        return self.llm2vae(hidden_MD)

    def next_token_logits(self, batch: PackedBatch, *, attend: Attend | None = None) -> Tensor:
        """Logits ``[documents, vocabulary]`` of the token that follows each document, whose images are clean."""
        latents_LC = encode_by_size(self.vae, batch, self.latent_patch_size)
        t_L = torch.zeros(batch.timesteps.shape, device=latents_LC.device)
        hidden_TD, row_of = self.hidden_states(batch, latents_LC, t_L, attend=attend)
        last = torch.tensor(batch.document_lengths, device=hidden_TD.device).cumsum(0) - 1
        return self.language_model.lm_head(hidden_TD[row_of[last]])

    def shard_units(self) -> list[nn.Module]:
        return [*self.vit_model.vision_model.encoder.layers, *self.language_model.model.layers]

    def flops(self, batch: PackedBatch) -> float:
        vit, llm, trains_vit = self.vit_model, self.language_model, trains(self.vit_model)
        patch = linear_flops(vit, input_grad=False) + linear_flops(self.connector, input_grad=trains_vit)
        latent = linear_flops(self.vae2llm, input_grad=False) + linear_flops(self.time_embedder, input_grad=False)
        image_attention = attention_flops(batch.vit_lengths, self.sizes["vit"]["hidden_size"], grad=trains_vit)
        text_attention = attention_flops(batch.document_lengths, self.sizes["llm"]["hidden_size"], grad=True)
        return (
            patch * batch.vit_index.numel()
            + latent * batch.latent_index.numel()
            + linear_flops(llm.model.layers, input_grad=True) / 2 * batch.num_tokens  # one of the two experts
            + linear_flops(llm.lm_head, input_grad=True) * batch.text_target_index.numel()
            + linear_flops(self.llm2vae, input_grad=True) * batch.image_target_index.numel()
            + image_attention * self.sizes["vit"]["num_hidden_layers"]
            + text_attention * len(llm.model.layers)
        )
