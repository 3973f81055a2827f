"""Loss terms as sums over targets; the mean over the whole update is the loop's (``core/batch.py: LossTerms``)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def text_loss_sum(logits: Tensor, target_ids: Tensor, weight: Tensor) -> Tensor:
    """Weighted cross-entropy ``[C, vocabulary] x [C]``, summed, in fp32. No target: a zero that keeps the graph."""
    losses = F.cross_entropy(logits.float(), target_ids, reduction="none")
    return (losses * weight).sum()


def image_loss_sum(velocity: Tensor, target: Tensor) -> Tensor:
    """Squared error, mean over the channels of a patch, summed over the ``M`` patches, in fp32."""
    return (velocity.float() - target.float()).square().mean(-1).sum()
