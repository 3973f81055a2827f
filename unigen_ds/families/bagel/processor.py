"""Turns of a conversation -> a ``Sample`` of splits, by BAGEL's sequence rules. Reads image headers, decodes nothing.

* Only assistant turns carry loss: text predicts itself, an image becomes a ``noise`` split.
* A user image is a ``vit`` split; where a later assistant turn is an image (editing), a clean ``vae`` split is
  before it. An assistant image that is followed by further turns is added again in the same way, as a condition.
* Conditions (user and system text, ``vit``, ``vae``) may be dropped by condition dropout, an image with its position
  kept. Neighbouring texts of the same role are one text, joined by a newline.

Lengths are known after planning; randomness comes later, in ``collate``. Planning costs one header read an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unigen_ds.config.registry import checked
from unigen_ds.config.values import Share
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.images.augment import Augment
from unigen_ds.data.images.image_files import ImageHeader, ImageTransform
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.processor import ConversationProcessor
from unigen_ds.data.samples.sample import Split, TextTokenizer
from unigen_ds.data.samples.splits import ImageKind, ImageSplit, TextSplit


class UnifiedProcessor(ConversationProcessor):
    """The model's view of a conversation.

    Args:
        tokenizer: text to ids, and the five special ids.
        vit_transform: component: transform of images that are understood; None: there are none.
        vit_patch_size: pixels of a side of one ViT patch.
        vae_transform: component: transform of images that are generated or edited; None: there are none.
        latent_channels: channels of the VAE's latent.
        latent_patch_size: latent pixels of a side of one latent patch.
        vae_spatial_downsample: pixels under a side of one latent pixel.
        max_latent_size: rows and columns of the model's table of latent positions.
        vit_max_patches_per_side: rows and columns of the model's table of ViT positions.
        text_dropout: probability that a condition text is left out; needed for guidance when drawing.
        vit_dropout: the same for understood images.
        vae_dropout: the same for clean latents of edited images.
        ce_reweight: weigh each text target by 1 / sqrt(targets of its text) instead of 1.
        augment: list of components: random changes of every image of a record, all in the same way, generated ones
            included; in training only, keyed by sample.
        vit_augment: list of components: random changes of understood images, in training only, keyed by sample.
        seed: of dropout, time steps and noise.
    """

    @checked("processor")
    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        vit_transform: ImageTransform | None = None,
        vit_patch_size: int = 14,
        vae_transform: ImageTransform | None = None,
        latent_channels: int = 16,
        latent_patch_size: int = 2,
        vae_spatial_downsample: int = 8,
        max_latent_size: int = 64,
        vit_max_patches_per_side: int = 70,
        text_dropout: Share = 0.0,
        vit_dropout: Share = 0.0,
        vae_dropout: Share = 0.0,
        ce_reweight: bool = False,
        augment: Sequence[Augment] = (),
        vit_augment: Sequence[Augment] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, ce_reweight=ce_reweight, seed=seed)
        self.vit_transform, self.vit_patch_size = vit_transform, vit_patch_size
        self.vae_transform, self.vae_downsample = vae_transform, vae_spatial_downsample * latent_patch_size
        self.latent_channels, self.latent_patch_size = latent_channels, latent_patch_size
        self.vae_spatial_downsample = vae_spatial_downsample
        self.max_latent_size, self.vit_max_patches_per_side = max_latent_size, vit_max_patches_per_side
        self.dropout = {"text": text_dropout, "vit": vit_dropout, "vae": vae_dropout}
        self.augment, self.vit_augment = tuple(augment), tuple(vit_augment)
        _check_transform("vit_transform", vit_transform, vit_patch_size, vit_max_patches_per_side)
        _check_transform("vae_transform", vae_transform, self.vae_downsample, max_latent_size)

    @property
    def fingerprint(self) -> str:
        """Changes whenever the plan of a record may change; dropout, weights and seed change none."""
        return fingerprint(
            "plan-1",
            self.tokenizer.fingerprint,
            (self.tokenizer.bos_id, self.tokenizer.eos_id, self.tokenizer.image_start_id, self.tokenizer.image_end_id),
            self.vit_transform.fingerprint if self.vit_transform else None,
            self.vit_patch_size,
            self.vae_transform.fingerprint if self.vae_transform else None,
            self.vae_downsample,
        )

    def splits_of(
        self, turns: Sequence[Turn], ids: Iterator[Sequence[int]], where: object, *, keep_images: bool
    ) -> Iterator[Split]:
        last_generated = max((i for i, turn in enumerate(turns) if turn.kind == "image" and turn.is_target), default=-1)
        for i, turn in enumerate(turns):
            is_target = turn.is_target
            if turn.kind == "text":
                yield TextSplit(tuple(next(ids)), loss=is_target, droppable=turn.role != "assistant")
                continue
            header = self.header(turn.value, keep=keep_images)
            if is_target:
                yield self._image(turn.value, "noise", header, where)
            if not is_target or i + 1 < len(turns):  # a condition of what follows
                edits = last_generated > i and self.vae_transform is not None
                if edits:
                    yield self._image(turn.value, "vae", header, where, droppable=True)
                if self.vit_transform is not None or not edits:
                    yield self._image(turn.value, "vit", header, where, droppable=True)

    def _image(
        self, path: str, kind: ImageKind, header: ImageHeader, where: object, *, droppable: bool = False
    ) -> ImageSplit:
        transform = self.vit_transform if kind == "vit" else self.vae_transform
        if transform is None:
            need = ("understood", "vit_transform") if kind == "vit" else ("generated", "vae_transform")
            raise DataError(
                f"{where}: image {path} is to be {need[0]}, but the processor has no {need[1]}",
                remedy="use a model and a processor that have it, or leave such records out; records of an image and"
                f" its text: captions={'generate' if kind == 'vit' else 'understand'!r} of the data set",
            )
        stride = self.vit_patch_size if kind == "vit" else self.vae_downsample
        width, height = transform.size(*(header.size or (transform.min_size, transform.min_size)))
        grid = (height // stride, width // stride)
        return ImageSplit(path, kind, grid, droppable, header.error, content=header.content)


def _check_transform(name: str, transform: ImageTransform | None, stride: int, table: int) -> None:
    if transform is None:
        return
    if transform.stride % stride:
        raise ConfigError(f"{name}.stride is {transform.stride}", allowed=f"a multiple of {stride}")
    if transform.largest_side // stride > table:
        raise ConfigError(
            f"{name}.max_size {transform.max_size} allows up to {transform.largest_side // stride} patches a side",
            allowed=f"at most {table}, the size of the model's position table",
            remedy=f"max_size of at most {table * stride}",
        )
