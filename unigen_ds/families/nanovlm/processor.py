"""Turns of a conversation -> a ``Sample`` for a vision-language model, by nanoVLM's rules: chat template, tiled images.

The images of a message are before its text. The assistant's text carries loss, its end token included; no image
does. Everything is causal, every token has a rotary position of its own. Planning reads image headers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unigen_ds.config.registry import checked
from unigen_ds.core.batch import CAUSAL
from unigen_ds.core.errors import DataError
from unigen_ds.data.cache.array_cache import fingerprint
from unigen_ds.data.images.augment import Augment, augment_image
from unigen_ds.data.images.image_files import ImageHeader, UnreadableImage, patchify
from unigen_ds.data.images.tiles import Tiling, image_string, num_tiles, split_tiles
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.sample import Split
from unigen_ds.data.samples.splits import ImageKind, ImageSplit, PackedBuilder
from unigen_ds.data.text.chat import RenderedChat
from unigen_ds.data.text.tokenizers import ChatTokenizer
from unigen_ds.families.chat import Chat, ChatImage, ChatProcessor


class VLMProcessor(ChatProcessor):
    """The model's view of a conversation.

    Args:
        tokenizer: with a chat template and the tokens of images.
        tile_size: pixels of a side of a tile, the ViT's image size.
        vit_patch_size: pixels of a side of one ViT patch.
        pixel_shuffle_factor: sides of a square of patches that become one token.
        max_image_size: pixels of the longer side at most: 1, 2, ... or 8 times ``vit.image_size``; None: 4 times.
        resize_to_max_side_len: enlarge smaller images to ``max_image_size``.
        ce_reweight: weigh each text target by 1 / sqrt(targets of its text) instead of 1.
        augment: list of components: random changes of every image of a record, all in the same way, generated ones
            included; in training only, keyed by sample.
        vit_augment: as ``augment``, of the resized picture before it is split into tiles.
        seed: of the random changes.
    """

    tokenizer: ChatTokenizer

    @checked("processor")
    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        tile_size: int,
        vit_patch_size: int,
        pixel_shuffle_factor: int,
        max_image_size: int | None = None,
        resize_to_max_side_len: bool = False,
        ce_reweight: bool = False,
        augment: Sequence[Augment] = (),
        vit_augment: Sequence[Augment] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, ce_reweight=ce_reweight, seed=seed)
        side = tile_size // vit_patch_size
        self.vit_patch_size, self.vit_max_patches_per_side = vit_patch_size, side
        self.tokens_per_tile = (side // pixel_shuffle_factor) ** 2
        self.augment, self.vit_augment = tuple(augment), tuple(vit_augment)
        largest = 4 * tile_size if max_image_size is None else max_image_size
        self.tiling = Tiling(tile_size, largest, resize_to_max_side_len)

    @property
    def fingerprint(self) -> str:
        return fingerprint("vlm-plan-1", self.tokenizer.fingerprint, self.tiling, self.tokens_per_tile)

    vit_lowest = 0.0
    """Black, of pixels in [0, 1]."""

    def ready_image(self, image: Tensor, kind: ImageKind, where: str) -> ImageSplit:
        """A ``VLM`` reads tiles among the tokens of the chat template, which a tensor beside ids does not have."""
        raise DataError(
            f"{where} is an image as a tensor, and the model is a VLM",
            allowed="items of text alone",
            remedy="records with paths of images (UnifiedGenerationDataset), or a UnifiedModel",
        )

    def render(self, turns: Sequence[Turn], where: object, *, keep_images: bool, reply: bool) -> Chat:
        messages = self.messages(turns, where)
        message_texts = ["\n".join(turn.value for turn in turns if turn.kind == "text") for turns in messages]
        texts, signs = self.tokenizer.special.shield(message_texts)
        template_input, images = [], list[tuple[str, int, ImageHeader]]()  # path, tiles, header
        for message, text in zip(messages, texts, strict=True):
            grids = []
            for path in (turn.value for turn in message if turn.kind == "image"):
                header = self.header(path, keep=keep_images)
                grids.append(self.tiling.grid(*header.size) if header.size else (1, 1))
                images.append((path, num_tiles(grids[-1]), header))
            content = image_string(grids, tokens_per_tile=self.tokens_per_tile) + text
            template_input.append({"role": message[0].role, "content": content})
        without_loss = [number for number, message in enumerate(messages) if not message[0].learned]
        chat = RenderedChat.of(self.tokenizer.chat, template_input, reply=reply, without_loss=without_loss)
        return Chat(turns, where, chat, signs, images)

    def image_splits(
        self, chat: Chat, ids: Sequence[int], starts: Sequence[int], labels: Sequence[int]
    ) -> Iterator[tuple[int, int, Split]]:
        """Each from its first tile's own token to its last image token."""
        image_id = self.tokenizer.image_id
        indices = [index for index, token in enumerate(ids) if token == image_id]
        if len(indices) != self.tokens_per_tile * sum(number for _, number, _ in chat.images):
            raise DataError(f"{chat.where}: the chat template drops or repeats text of a message")
        count = 0
        for path, number, header in chat.images:
            first, last = indices[count] - 1, indices[count + number * self.tokens_per_tile - 1] + 1
            count += number * self.tokens_per_tile
            state = {"error": header.error, "content": header.content}
            yield first, last, TiledSplit(path, tuple(ids[first:last]), image_id, number, **state)


@dataclass(frozen=True)
class TiledSplit(ChatImage):
    """An image split into tiles (``tiles.Tiling``), with the tokens before and between them. Causal, as text is."""

    image_id: int
    """Is in ``ids`` at each index of a tile's token, tile by tile."""
    num_tiles: int

    @property
    def num_encoded(self) -> int:
        return self.num_tiles

    def load(self, processor: VLMProcessor, key: tuple[object, ...] | None) -> LoadedTiles:
        tiling, image = processor.tiling, processor.read_image(self.content or self.path)
        grid, pixels = tiling.grid(*image.size), tiling.pixels(image)
        if num_tiles(grid) != self.num_tiles:  # a file that was replaced between two readings
            problem = f"image {self.path} has {num_tiles(grid)} tiles, {self.num_tiles} when planned"
            raise UnreadableImage(problem, path=self.path)
        pixels = augment_image(pixels, processor.augment, processor.vit_augment, key)
        tiles = split_tiles(pixels, tiling.tile_size)
        return LoadedTiles(self, torch.cat([patchify(each, processor.vit_patch_size) for each in tiles]))


@dataclass(frozen=True)
class LoadedTiles:
    """The patches of all tiles of one image."""

    split: TiledSplit
    vit_patches: Tensor

    def place(self, builder: PackedBuilder, position: int) -> int:
        split, start, side = self.split, builder.num_tokens, builder.processor.vit_max_patches_per_side
        text = [i for i, token in enumerate(split.ids) if token != split.image_id]
        builder.add_text([split.ids[i] for i in text], [start + i for i in text])
        indices = [start + i for i, token in enumerate(split.ids) if token == split.image_id]
        index = torch.tensor(indices, dtype=torch.int64)
        positions = torch.arange(side * side).repeat(split.num_tiles)
        builder.add_patches(self.vit_patches, index, positions, (side * side,) * split.num_tiles)
        builder.add_split(len(split.ids), CAUSAL, torch.arange(position, position + len(split.ids)))
        return position + split.num_tokens
