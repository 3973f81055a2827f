"""The values that pass between data, models and runner: a ``Batch`` in, ``LossTerms`` out.

``PackedBatch`` is the batch of models of texts and images. It is flat: the tokens of all its sequences follow each
other, ``T`` in all, without padding. Samples never see each other, because attention is described per token by
document, split and mode, not by rows.

Shape suffixes: T tokens of the micro-batch, X text tokens, V ViT patches, L latent patches, K VAE images,
S splits, C text targets, M image targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unigen_ds.core.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_WEIGHT = 1.0
"""Weight of a loss term that ``loss_weights`` does not name."""
CAUSAL, FULL, NOISE = 0, 1, 2
"""Split modes. CAUSAL: text. FULL: an image all of whose tokens see each other. NOISE: as FULL, and hidden from every
other split of its document."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of one rank, of any kind of model: what the loader and the loop use of it.

    A family derives its own as a frozen dataclass, with a tensor in each field that the model reads. All tensors of its
    fields are moved together; ``num_tokens`` and ``target_counts`` are called on the CPU batch.
    """

    num_sequences: int = 0
    num_samples: int = 0
    sample_ids: tuple[str, ...] = field(default=())
    """Identity of each sample, in order: ``source:index:pass``; what the ledger digests."""
    skipped: tuple[dict[str, str], ...] = field(default=())
    """Samples replaced by padding because they could not be loaded: ``{sample, path, why}``."""
    sample_sources: tuple[int, ...] = field(default=())
    sample_ends: tuple[int, ...] = field(default=())
    """Tokens of the micro-batch up to the end of each sample."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch on this rank; where nothing is a token, units of length (``Split.num_tokens``)."""
        raise NotImplementedError(f"{type(self).__name__}.num_tokens")

    @property
    def num_images(self) -> int:
        """Images of the micro-batch on this rank; 0 where there are none."""
        return 0

    def target_counts(self) -> dict[str, float]:
        """Number of targets (or the sum of their weights) of each loss term: the same terms in every batch."""
        raise NotImplementedError(f"{type(self).__name__}.target_counts")

    def target_positions(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Token index and weight of each target of a term, in the order of ``LossTerms.each``. The losses of a training
        with several sources are then logged for each source; without an entry a term has none.
        """
        return {}

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors, by name, that are moved to the model's device; and everything else, for ``of``."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return tensors, {name: value for name, value in values.items() if name not in tensors}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> Self:
        """The batch of what ``parts`` has returned, or of copies of it."""
        fields: dict[str, Any] = {**tensors, **others}
        return cls(**fields)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        tensors, others = self.parts()
        return self.of({name: change(tensor) for name, tensor in tensors.items()}, others)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Self:
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class PackedBatch(Batch):
    """One micro-batch of one rank. All index tensors are int64 and point into the ``T`` tokens."""

    document_ids: Tensor
    """[T] which sample a token belongs to; non-decreasing."""
    split_ids: Tensor
    """[T] which split (one text, one image) a token belongs to; non-decreasing, 0 .. S-1 over the micro-batch."""
    split_modes: Tensor
    """[S] CAUSAL, FULL or NOISE."""
    position_ids: Tensor
    """[T] rotary positions; restart at 0 with each document; all tokens of an image share one."""

    text_ids: Tensor
    """[X] token ids, begin, end, image-start and image-end ids included."""
    text_index: Tensor
    """[X] their token indices."""
    text_target_ids: Tensor
    """[C] the id to be predicted at each index in ``text_target_index`` (already shifted)."""
    text_target_index: Tensor
    """[C] indices of the tokens whose hidden state predicts a label."""
    text_target_weight: Tensor
    """[C] float32 weight of each target; all ones unless re-weighted."""

    vit_patches: Tensor
    """[V, channels * p * p] float32, (row, column, channel) inside a patch."""
    vit_index: Tensor
    """[V] their token indices; where patches are shuffled into fewer tokens, one index per token."""
    vit_position_ids: Tensor
    """[V] row * max_patches_per_side + column."""
    vit_lengths: tuple[int, ...]
    """Patches of each ViT image."""

    vae_images: Tensor
    """[K, channels, H, W] float32 in [-1, 1], zero-padded at right and bottom to the largest of the micro-batch."""
    vae_noise: Tensor
    """[K, z, H / downsample, W / downsample] standard normal; the VAE samples its latent with it."""
    latent_shapes: tuple[tuple[int, int], ...]
    """(rows, columns) of latent patches of each VAE image, padding excluded."""
    latent_index: Tensor
    """[L] token indices of the latent patches (clean ones too)."""
    latent_position_ids: Tensor
    """[L] row * max_latent_size + column."""
    timesteps: Tensor
    """[L] float32 raw time steps before the sigmoid; -inf marks a clean image (t = 0)."""
    flow_noise: Tensor
    """[L, z * p * p] float32 standard normal; (row, column, channel) inside a patch."""
    image_target_index: Tensor
    """[M] token indices of the noisy latent patches: the rows of ``latent_index`` with a finite time step."""

    document_lengths: tuple[int, ...]
    """Tokens of each document, on the host, so that attention can be planned without a device sync."""

    @property
    def num_tokens(self) -> int:
        return int(self.position_ids.numel())

    @property
    def num_images(self) -> int:
        """Images that the tower or the VAE encodes; one that is seen in two ways counts twice."""
        return len(self.vit_lengths) + len(self.latent_shapes)

    def target_counts(self) -> dict[str, float]:
        return {"text": float(self.text_target_weight.sum()), "image": float(self.image_target_index.numel())}

    def target_positions(self) -> dict[str, tuple[Tensor, Tensor]]:
        image = self.image_target_index
        return {"text": (self.text_target_index, self.text_target_weight), "image": (image, torch.ones(image.numel()))}


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on ``device``, without waiting: such a copy to CUDA needs page-locked memory."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def check_terms(terms: Collection[str], *, of: str, of_family: Collection[str]) -> None:
    """Raise ``ConfigError`` where the loss terms ``of`` a model or a batch are not those of ``Family.terms``."""
    different = sorted(set(terms) ^ set(of_family))
    if different:
        has, lacks = (of, "Family.terms") if different[0] in terms else ("Family.terms", of)
        raise ConfigError(
            f"the loss term {different[0]!r} is in {has} and not in {lacks}",
            allowed="the same terms in LossTerms.sums, Batch.target_counts() and Family.terms",
            remedy="add it (a term without targets in a batch is a zero, and so is its count), or delete it",
        )


def check_counts(counts: Mapping[str, float], *, of: str, of_family: Collection[str]) -> None:
    """The same of ``Batch.target_counts()``. A batch that several families use may count further terms as zero."""
    check_terms([t for t, n in counts.items() if n or t in of_family], of=f"{of}.target_counts()", of_family=of_family)


@dataclass(frozen=True)
class LossTerms:
    """Sums over the targets of one micro-batch, by term, with gradients. No means: only the loop has all counts."""

    sums: Mapping[str, Tensor]
    each: Mapping[str, Tensor] = field(default_factory=dict)
    """A model may add the value of each target, [number of targets] by term, in the batch's order and already weighted
    as in the sum and detached: in a training with several sources their means are logged for each."""

    def weighted_sum(self, loss_weights: Mapping[str, float], counts: Mapping[str, float]) -> Tensor:
        """``sum_k w_k * sum_k / count_k`` with the counts of the whole update. A term without targets adds zero.

        The term is multiplied, not left out, so that every parameter takes part in every micro-batch. A value that is
        not finite has no finite gradient: all ranks then skip the update. Raises ``ConfigError`` for other terms.
        """
        check_terms(self.sums, of="LossTerms.sums", of_family=loss_weights)
        assert self.sums, "a model must return at least one loss term"
        first, *others = [
            value * (loss_weights[name] / counts[name] if counts[name] else 0.0) for name, value in self.sums.items()
        ]
        total = sum(others, first)
        return total * (1.0 + 0.0 * total.detach())


torch.export.register_dataclass(LossTerms)  # else FSDP of older torch does not find the tensors inside
