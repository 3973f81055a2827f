"""A causal language model of transformers' own classes (Llama, Qwen2), trained on packed documents.

``model`` and ``lm_head`` are transformers' modules with transformers' names, so a merged checkpoint is a state dict of
``AutoModelForCausalLM``. Only the attention is ours, which transformers finds in its registry: a plan from the
batch's documents instead of a mask, so that samples do not see each other and the cost follows the documents.

Shape suffixes: T tokens, D width, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unigen_ds.config.registry import MODELS, checked
from unigen_ds.core.batch import LossTerms, PackedBatch
from unigen_ds.core.errors import DataError
from unigen_ds.families.decoder_lm.published import DecoderSizes, plain_config, read_pretrained, transformers_config
from unigen_ds.models.attention import Attend, plan_attention
from unigen_ds.models.flops import attention_flops, linear_flops, trains
from unigen_ds.models.losses import loss_terms, text_losses
from unigen_ds.models.weights import PretrainedModel, contradictions

_ATTENTION = "unigen_documents"
"""Our attention's name in transformers' registry. As it has no entry among the masks, none is ever built."""


@MODELS.register_module()
class DecoderLM(PretrainedModel):
    """``forward(PackedBatch) -> LossTerms`` with the term ``text``.

    Args:
        llm: ``model_type`` and keys of that kind's config in transformers, under its names and with its defaults, [the
            keys that make a size](configs.md#decoderlm); those that ``pretrained`` does not have.
        pretrained: a directory as transformers writes it (``config.json``, ``*.safetensors``, in one file or many):
            initial weights, and every key that is not given.
        dropout: on both residual branches of each layer; that of the scores is ``llm.attention_dropout``.
        freeze: any of ``embed``, ``layers``, ``head`` (with tied embeddings ``embed`` and ``head`` are one): no
            gradient, bit-identical after training.
        activation_checkpointing: compute each decoder layer again in the backward pass: less memory, more time.
        compile: ``torch.compile`` each decoder layer.
    """

    forward_methods = ("logits", "next_token_logits")
    """Entry points beside ``forward``; a sharding engine must hook these too."""

    @checked("model")
    def __init__(
        self,
        *,
        llm: Annotated[Mapping[str, Any] | None, DecoderSizes] = None,
        pretrained: str | None = None,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
        freeze: Sequence[Literal["embed", "layers", "head"]] = (),
        activation_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        source = read_pretrained(Path(pretrained)) if pretrained else None
        causal = _causal_lm(transformers_config(llm or {}, source.sizes if source else {}))
        self.llm_config = causal.config
        self.vocab_size: int = causal.config.vocab_size
        self.model, self.lm_head = causal.model, causal.lm_head
        self.model.rotary_emb = _rotary(self.model.rotary_emb)
        contradicted = contradictions({"llm": llm or {}}, {"llm": source.sizes}) if source else ()
        self.start_from(source, contradicted=contradicted)
        self.freeze(freeze)
        for layer in self.model.layers:
            if dropout:
                for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    branch.register_forward_hook(partial(_dropout, p=dropout))
            layer.gradient_checkpointing = activation_checkpointing
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            if compile:
                layer.compile()

    def arguments(self) -> dict[str, Any]:
        """The sizes as arguments of the constructor, which then needs no ``pretrained``."""
        return {"llm": plain_config(self.llm_config)}

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Normal(0, ``initializer_range``), as transformers. Norms one, biases zero."""
        if tensor.ndim > 1:
            tensor.normal_(std=self.llm_config.initializer_range, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)

    def parts(self) -> dict[str, nn.Module]:
        return {"embed": self.model.embed_tokens, "layers": self.model.layers, "head": self.lm_head}

    @property
    def max_document_tokens(self) -> int:
        """Tokens of a document at most: the model has no more positions."""
        return int(self.llm_config.max_position_embeddings)

    def forward(self, batch: PackedBatch) -> LossTerms:
        """The sum of the cross-entropy over the text targets of one micro-batch."""
        logits = self.lm_head(self._hidden_states(batch)[batch.text_target_index])
        text = text_losses(logits, batch.text_target_ids, batch.text_target_weight)
        return loss_terms({"text": text}, training=self.training)

    def logits(self, batch: PackedBatch) -> Tensor:
        """``[T, vocabulary]``: for every token what follows it."""
        return self.lm_head(self._hidden_states(batch))

    def next_token_logits(self, batch: PackedBatch, *, attend: Attend | None = None) -> Tensor:
        """Logits ``[documents, vocabulary]`` of the token that follows each document, on top of cached ones or not."""
        last = torch.tensor(batch.document_lengths, device=batch.document_ids.device).cumsum(0) - 1
        return self.lm_head(self._hidden_states(batch, attend)[last])

    def _hidden_states(self, batch: PackedBatch, attend: Attend | None = None) -> Tensor:
        """Final hidden states ``[T, D]``."""
        if batch.text_ids.numel() != batch.num_tokens:
            raise DataError(
                "a DecoderLM reads text alone, and the batch has images", remedy="take them out of the data"
            )
        longest, limit = max(batch.document_lengths), self.max_document_tokens
        if longest > limit:
            raise DataError(
                f"a document of {longest} tokens for model.llm.max_position_embeddings {limit}",
                remedy=f"train_dataloader.seq_length of at most {limit}",
            )
        dropout = self.llm_config.attention_dropout if self.training else 0.0
        if attend is None:
            attend = partial(_attend_dropping, batch.document_lengths, dropout) if dropout else plan_attention(batch)
        self._rotary_on(batch.document_ids.device)
        output = self.model(
            input_ids=batch.text_ids[None], position_ids=batch.position_ids[None], use_cache=False, attend=attend
        )
        return output.last_hidden_state[0]

    def _rotary_on(self, device: torch.device) -> None:
        """Move the rotary frequencies once; transformers would copy them in every forward pass, and the host would
        wait. They are no buffers (``_rotary``), so no engine moves them.
        """
        rotary = self.model.rotary_emb
        if rotary.inv_freq.device != device:
            for name in [name for name, value in vars(rotary).items() if isinstance(value, Tensor)]:
                setattr(rotary, name, getattr(rotary, name).to(device))

    def shard_units(self) -> list[nn.Module]:
        """Modules an engine may shard and wrap one by one, in forward order; the root holds the rest."""
        return [*self.model.layers]

    def flops(self, batch: PackedBatch) -> float:
        """Floating point operations of forward and backward on this micro-batch (``flops.py``)."""
        width = self.model.layers[0].self_attn.q_proj.out_features
        scores = attention_flops(batch.document_lengths, width, grad=True) * len(self.model.layers)
        token, target = self._row_flops
        return token * batch.num_tokens + target * batch.text_target_index.numel() + scores

    @cached_property
    def _row_flops(self) -> tuple[float, float]:
        """Operations of a token in the layers, and of a target in the head."""
        token = linear_flops(self.model.layers, input_grad=trains(self.model.embed_tokens))
        return token, linear_flops(self.lm_head, input_grad=trains(self.model))


def _causal_lm(config: Any) -> Any:
    """transformers' model in fp32, with our attention."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(_ATTENTION, _attention)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=_ATTENTION, trust_remote_code=False
    )


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, attend: Attend, **_: Any
) -> tuple[Tensor, None]:
    """transformers' call of an attention: ``[1, H, T, E]`` each -> ``[1, T, H, E]``, and no scores to show."""
    return attend(*(x[0].transpose(0, 1) for x in (query, key, value)))[None], None


def _attend_dropping(lengths: Sequence[int], p: float, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
    """Document by document, with dropout on the scores, which plans do not have: FlexAttention cannot."""
    groups = q_THE.shape[1] // k_THE.shape[1]
    k_THE, v_THE = k_THE.repeat_interleave(groups, 1), v_THE.repeat_interleave(groups, 1)
    parts = []
    for q, k, v in zip(q_THE.split(lengths), k_THE.split(lengths), v_THE.split(lengths), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)[0].transpose(0, 1))
    return torch.cat(parts)


def _dropout(module: nn.Module, inputs: Any, output: Tensor, *, p: float) -> Tensor:
    return F.dropout(output, p, module.training)


def _rotary(module: Any) -> Any:
    """transformers' rotary module, whose frequencies are no buffers: those would be left empty on the meta device, and
    an engine that casts a model to bf16 would round them.
    """
    with torch.device("cpu"):
        rotary = type(module)(module.config)
    for name, buffer in list(rotary.named_buffers()):
        delattr(rotary, name)
        setattr(rotary, name, buffer.clone())
    return rotary
