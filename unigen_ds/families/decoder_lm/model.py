"""A Llama or Qwen2 of transformers that may be trained from scratch: ``CausalLM`` with initial values of its own.

Parameters have transformers' names, so a merged checkpoint is a state dict of ``AutoModelForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.config.registry import MODELS, checked
from unigen_ds.core.errors import ConfigError
from unigen_ds.families.auto.attention import is_causal
from unigen_ds.families.auto.model import CausalLM
from unigen_ds.models.settings import check_heads

MODEL_TYPES = ("llama", "qwen2")


@MODELS.register_module()
class DecoderLM(CausalLM):
    """``forward(PackedBatch) -> LossTerms`` with the term ``text``.

    Args:
        llm: ``model_type`` (``llama`` or ``qwen2``) and keys of that kind's config in transformers, under its names and
            with its defaults: ``hidden_size``, ``intermediate_size``, ``num_hidden_layers``, ``num_attention_heads``,
            ``num_key_value_heads``, ``max_position_embeddings`` (the most tokens of a document),
            ``tie_word_embeddings``, ``rms_norm_eps``, ``rope_parameters``, ``attention_dropout``,
            ``initializer_range``, ...; those that ``pretrained`` does not have. ``vocab_size`` is the tokenizer's
            where it is left out.
        pretrained: a directory as transformers writes it (``config.json``, ``*.safetensors``, in one file or many), or
            a name on the hub: initial weights, and every key that is not given.
        dropout: on both residual branches of each layer; that of the scores is ``llm.attention_dropout``.
        freeze: any of ``embed``, ``layers``, ``head`` (with tied embeddings ``embed`` and ``head`` are one): no
            gradient, bit-identical after training.
        activation_checkpointing: compute each decoder layer again in the backward pass: less memory, more time.
        compile: ``torch.compile`` each decoder layer.
    """

    config_key = "llm"
    model: Any
    lm_head: Any

    @checked("model")
    def __init__(
        self,
        *,
        llm: Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
        freeze: Sequence[Literal["embed", "layers", "head"]] = (),
        activation_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__(
            pretrained=pretrained,
            config={key: value for key, value in (llm or {}).items() if value is not None},
            packing=True,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
        )
        config = self.transformers_model.config
        if config.model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model.llm.model_type is {config.model_type!r}", allowed=", ".join(MODEL_TYPES), remedy="CausalLM"
            )
        check_heads("model.llm", config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
        self._attend_inside_documents(is_causal(self.transformers_model))
        if not pretrained and not torch.empty(0).is_meta:
            self.start_from(None)
        for name in freeze:
            self.parts()[name].requires_grad_(False)
        for layer in self.model.layers if dropout else ():
            for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
                branch.register_forward_hook(partial(_dropout, p=dropout))

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Normal(0, ``initializer_range``), as transformers. Norms one, biases zero."""
        if tensor.ndim > 1:
            tensor.normal_(std=self.transformers_model.config.initializer_range, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)

    def parts(self) -> dict[str, nn.Module]:
        return {"embed": self.model.embed_tokens, "layers": self.model.layers, "head": self.lm_head}


def _dropout(module: nn.Module, inputs: Any, output: Tensor, *, p: float) -> Tensor:
    return F.dropout(output, p, module.training)
