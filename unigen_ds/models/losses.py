"""Loss terms as sums over targets; the mean over the whole update is the loop's (``core/batch.py: LossTerms``)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from unigen_ds.core.batch import LossTerms


def text_losses(logits: Tensor, target_ids: Tensor, weight: Tensor) -> Tensor:
    """[C] weighted cross-entropy ``[C, vocabulary] x [C]``, in fp32."""
    return F.cross_entropy(logits.float(), target_ids, reduction="none") * weight


def text_loss_sum(logits: Tensor, target_ids: Tensor, weight: Tensor) -> Tensor:
    """``text_losses``, summed. No target: a zero that keeps the graph."""
    return text_losses(logits, target_ids, weight).sum()


def image_losses(velocity: Tensor, target: Tensor) -> Tensor:
    """[M] squared error, mean over the channels of a patch, in fp32."""
    return (velocity.float() - target.float()).square().mean(-1)


def loss_terms(each: Mapping[str, Tensor], *, training: bool) -> LossTerms:
    """Sums of the values of each target, [number of targets] by term; and the values, in a training detached."""
    values = {name: losses.detach() for name, losses in each.items()} if training else each
    return LossTerms({name: losses.sum() for name, losses in each.items()}, values)
