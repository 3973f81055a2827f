"""Texts and pictures in, a text or a picture out, with a KV cache: BAGEL's inference rules, number for number.

Three contexts are extended in parallel: ``full`` has everything, ``without_text`` all before the last text (all, where
a picture is the last), and ``without_image`` the texts alone; guidance compares their velocities for the same noise.
Conversations are read one at a time; pictures of one size can be drawn in the same forward passes.

Shape suffixes: L latent patches, C their width, T tokens, D model width.
Source: ByteDance-Seed/Bagel (Deng et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unigen_ds.config.registry import checked
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.records.records import Turn
from unigen_ds.data.samples.sample import LoadedSplit
from unigen_ds.data.samples.splits import ImageSplit, TextSplit, TokenSplit
from unigen_ds.families.bagel.flow_settings import FlowSettings, flow_for
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.bagel.sampler import guide, image_grid, noise_image, steps, vit_image
from unigen_ds.inference.answers import KVCache, chooser, continue_prompts, device_of
from unigen_ds.inference.generated import (
    BOTH,
    Generated,
    MaxLength,
    Picture,
    Request,
    Size,
    in_order,
    one_or_many_pictures,
    to_picture,
)
from unigen_ds.inference.prompts import Prompt, Sampling
from unigen_ds.models.attention import Attend
from unigen_ds.models.flow import unpatchify_latent
from unigen_ds.system.seeding import generator

THINK_THEN_ANSWER = (
    "You should first think about the reasoning process in the mind and then provide the user with the answer. \n"
    "The reasoning process is enclosed within <think> </think> tags, i.e. <think> reasoning process here </think> "
    "answer here"
)
THINK_THEN_DRAW = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here </think> "
    "image here"
)
"""The prompts that BAGEL was trained to think after, word for word."""

_LIKELIEST = Sampling()
OnStep = Callable[[float, Tensor, Tensor], None]
"""Called in each Euler step with t, the noisy patches before it, and their velocity."""
OnPicture = Callable[[float, Image.Image], None]
"""Called in each Euler step with t and the picture that the model predicts at it."""


@dataclass
class Context:
    """Tokens that the model has seen, and the next rotary position."""

    cache: KVCache = field(default_factory=KVCache)
    position: int = 0

    def copy(self) -> Context:
        return Context(self.cache.copy(), self.position)

    def is_equal(self, other: Context) -> bool:
        """Whether the model has seen the same: keys and values are equal to the last bit."""
        pairs = zip(self.cache.layers, other.cache.layers, strict=False)
        equal = all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))
        return equal and self.position == other.position


@dataclass
class Contexts:
    """The three of a conversation."""

    full: Context = field(default_factory=Context)
    without_text: Context = field(default_factory=Context)
    without_image: Context = field(default_factory=Context)


class InterleaveInferencer:
    """A model that draws and reads: a ``UnifiedModel`` in evaluation mode, with its tokenizer and image transforms."""

    answers = ("text", "image")
    """What ``complete`` can be asked for."""
    interleaves = True
    """``complete`` can be asked for a text and a picture in one answer (``BOTH``)."""

    def __init__(self, model: Any, processor: UnifiedProcessor) -> None:
        self.model, self.processor = model, processor

    @checked("unified_generate")
    @torch.no_grad()
    def unified_generate(
        self,
        prompt: str,
        *,
        images: Picture | Sequence[Picture] = (),
        parts: Sequence[str | Image.Image | Path | np.ndarray] = (),
        history: Sequence[Turn] = (),
        understand: bool = False,
        think: bool = False,
        size: Size = None,
        flow: FlowSettings | Mapping[str, Any] | None = None,
        max_length: MaxLength = 1000,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_step: OnStep | None = None,
        on_picture: OnPicture | None = None,
    ) -> Generated:
        """A picture for ``prompt``; with ``images`` an edited one; with ``understand`` a text instead.

        The arguments are in ``docs/inference/generate.md``. The same ones return the same bits.

        Raises ``ConfigError`` for an argument that is unknown, wrong, or without effect, and ``UnreadableImage``.
        """
        drawing = {"size": size, "flow": flow, "on_step": on_step, "on_picture": on_picture}
        if understand and (names := [name for name, value in drawing.items() if value is not None]):
            problem = f"unified_generate got {', '.join(names)} with understand, which draws nothing"
            raise ConfigError(problem, remedy="leave out one of the two")
        sampling, tokenizer = Sampling(temperature, top_p), self.processor.tokenizer
        contexts, num_shown, size_of_last = Contexts(), 0, None
        if think:
            for context in (contexts.full, contexts.without_image):
                self.extend_text(context, tokenizer.encode(THINK_THEN_ANSWER if understand else THINK_THEN_DRAW))
        earlier = [Path(one.value) if one.kind == "image" else one.value for one in history]
        for part in (*earlier, *one_or_many_pictures(images), *in_order(parts)):
            if isinstance(part, str):
                self._add_text(contexts, part)
                continue
            image = self.processor.read_image(part)
            image = self._show_image(contexts, image, draw=not understand, noise_key=(seed, num_shown, "vae"))
            num_shown, size_of_last = num_shown + 1, (image.height, image.width)
        if prompt or not (understand or parts):  # a picture alone may be read, as in training
            self._add_text(contexts, prompt)

        text = ""
        if understand or think:
            text = tokenizer.decode(self.write(contexts.full, max_length=max_length, sampling=sampling, seed=seed))
        if understand:
            return Generated(text, [])
        transform = self.processor.vae_transform
        if transform is None and (num_shown or not size):
            raise ConfigError("this processor has no vae_transform, so it cannot draw")
        if think:
            self.extend_text(contexts.full, tokenizer.encode(text))
        largest = transform.largest_side if transform is not None else 0
        size = size or size_of_last or (largest, largest)
        flow = flow_for(self.model, flow, where="unified_generate.flow")
        return Generated(text, self._draw([contexts], size, flow, [seed], on_step=on_step, on_picture=on_picture))

    @torch.no_grad()
    def complete(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int,
        sampling: Sampling = _LIKELIEST,
        flow: FlowSettings | None = None,
        together: bool = False,
    ) -> list[Generated]:
        """The answer to each of some records, whose parts are read as in training, one record at a time; ``together``:
        answers that are pictures, and of one size, are drawn in the same passes."""
        flow, answers = flow or flow_for(self.model), list[Generated]()
        waiting: dict[Any, list[tuple[Generated, Contexts, int]]] = {}
        for request in requests:
            contexts, begin = Contexts(), request.begin
            for split in (*request.prompt, *([TokenSplit.unlearned(begin[:-1])] if len(begin) > 1 else ())):
                if isinstance(split, TextSplit):
                    contexts.without_text = contexts.full.copy()
                    self._extend(contexts.without_image, split)
                self._extend(contexts.full, split)
            draw = partial(self._draw, [contexts], request.size or (), flow, [request.seed])
            if request.wanted == "image":
                answers.append(Generated("", [] if together else draw()))
                if together:
                    waiting.setdefault(request.size, []).append((answers[-1], contexts, request.seed))
                continue
            images = draw() if request.picture_first else []
            for image in images:
                self.extend_vit(contexts.full, image)
            first, length = begin[-1] if begin else None, max_new_tokens + 1
            ids = self.write(contexts.full, max_length=length, sampling=sampling, seed=request.seed, first=first)
            text = self.processor.tokenizer.decode(ids[1:])
            if request.wanted == BOTH and not images:
                self._add_text(contexts, text)
                images = draw()
            answers.append(Generated(text, images))
        for size, group in waiting.items():
            replies, each, seeds = zip(*group, strict=True)
            for answer, image in zip(replies, self._draw(each, size or (), flow, seeds), strict=True):
                answer.images.append(image)
        return answers

    def request(self, prompt: Prompt, *, seed: int, size: Size = None, **options: Any) -> Request | None:
        """A picture for a text alone, as ``unified_generate`` with these options draws it, as a request, which
        ``complete`` answers together with others; None for anything else."""
        transform = self.processor.vae_transform
        if prompt.paths or prompt.parts or options.get("understand") or options.get("think") or transform is None:
            return None
        text = TextSplit(tuple(self.processor.tokenizer.encode(prompt.prompt)), loss=False)
        height, width = size or (transform.largest_side,) * 2
        return Request([text], "image", seed, size=(height, width))

    def idle(self, method: str) -> tuple[Any, ...]:
        """Arguments of a forward pass that does nothing: of a rank that has no work while others have."""
        batch = self._pack([Context()], TokenSplit.unlearned((self.processor.tokenizer.bos_id,)))
        return (batch, batch.flow_noise, 0.0) if method == "velocity" else (batch,)

    def _draw(
        self,
        contexts: Sequence[Contexts],
        size: Sequence[int],
        flow: FlowSettings,
        seeds: Sequence[int],
        *,
        on_step: OnStep | None = None,
        on_picture: OnPicture | None = None,
    ) -> list[Image.Image]:
        grid = image_grid(self.processor, size)

        def report(t: float, x_LC: Tensor, v_LC: Tensor) -> None:
            if on_step is not None:
                on_step(t, x_LC, v_LC)
            if on_picture is not None:
                on_picture(t, to_picture(self.decode(x_LC - t * v_LC, grid)))

        width = self.processor.latent_channels * self.processor.latent_patch_size**2
        noise_LC = [torch.randn(grid[0] * grid[1], width, generator=generator(seed, 0, "draw")) for seed in seeds]
        latents_LC = self.denoise(contexts, torch.cat(noise_LC), grid, flow=flow, on_step=report)
        return [to_picture(self.decode(each, grid)) for each in latents_LC.chunk(len(seeds))]

    def _add_text(self, contexts: Contexts, text: str) -> None:
        ids = self.processor.tokenizer.encode(text)
        contexts.without_text = contexts.full.copy()
        for context in (contexts.full, contexts.without_image):
            self.extend_text(context, ids)

    def _show_image(
        self, contexts: Contexts, image: Image.Image, *, draw: bool, noise_key: tuple[object, ...]
    ) -> Image.Image:
        """BAGEL resizes for the autoencoder first, and makes the ViT's picture from that one."""
        vae = self.processor.vae_transform
        if vae is not None:
            image = vae.resize(image)
        if draw and vae is not None:
            pixels, side = vae(image), self.processor.vae_spatial_downsample
            shape = (self.processor.latent_channels, pixels.shape[1] // side, pixels.shape[2] // side)
            self.extend_vae(contexts.full, pixels, torch.randn(shape, generator=generator(*noise_key)))
        self.extend_vit(contexts.full, image)
        if draw:  # as in the public code: guidance by the text is by the texts that follow
            contexts.without_text = contexts.full.copy()
        return image

    def extend_text(self, context: Context, ids: Sequence[int]) -> None:
        """Add a text, between the begin and the end token."""
        self._extend(context, TextSplit(tuple(ids), loss=False))

    def extend_vit(self, context: Context, image: Image.Image | Tensor) -> None:
        """Add an image that is understood: a picture, or ``[C, H, W]`` in [-1, 1] of its final size."""
        self._extend(context, vit_image(self.processor, image))

    def extend_vae(self, context: Context, pixels: Tensor, noise: Tensor) -> None:
        """Add a clean image ``[C, H, W]`` in [-1, 1], sampled by the autoencoder with ``noise``."""
        stride = self.processor.vae_downsample
        grid = (pixels.shape[1] // stride, pixels.shape[2] // stride)
        split = ImageSplit("", "vae", grid)
        clean = replace(noise_image(self.processor, grid), split=split, vae_image=pixels, vae_noise=noise)
        self._extend(context, clean)

    def _extend(self, context: Context, split: LoadedSplit) -> None:
        """Add one split: keys and values of its tokens."""
        batch = self._pack([context], split)
        is_text = not (batch.vit_index.numel() or batch.latent_index.numel())
        self.model.next_token_logits(batch, attend=context.cache.attend(causal=is_text, keep=True))
        context.position = int(batch.position_ids[-1]) + 1

    def _pack(self, contexts: Sequence[Context], split: LoadedSplit) -> PackedBatch:
        """The same split after each of these contexts."""
        batch = pack_documents([[split]] * len(contexts), self.processor)
        begin = torch.tensor([context.position for context in contexts])[batch.document_ids]
        return replace(batch, position_ids=batch.position_ids + begin).to(device_of(self.model))

    @torch.no_grad()
    def write(
        self,
        context: Context,
        *,
        max_length: int,
        sampling: Sampling = _LIKELIEST,
        seed: int = 0,
        first: int | None = None,
    ) -> list[int]:
        """Ids that follow the context, which stays as it is. As in the public code the begin token comes first and
        counts (``first`` replaces it); the end token is left out.
        """
        tokenizer = self.processor.tokenizer
        first = tokenizer.bos_id if first is None else first
        [ids] = continue_prompts(
            self.model,
            self.processor,
            [[TokenSplit.unlearned((first,))]],
            max_new_tokens=max_length,
            choose=chooser(sampling, [seed]),
            cache=context.cache.copy(),
            begin=context.position,
        )
        return [first, *(i for i in ids if i != tokenizer.eos_id)][:max_length]

    @torch.no_grad()
    def denoise(
        self,
        contexts: Contexts | Sequence[Contexts],
        noise_LC: Tensor,
        grid: tuple[int, int],
        *,
        flow: FlowSettings,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Euler steps from noise to latent patches ``[L, C]``; those of several conversations follow each other."""
        several = [contexts] if isinstance(contexts, Contexts) else contexts
        views = [(one.full, one.without_text, one.without_image) for one in several]
        own, template = [*zip(*views, strict=True)], noise_image(self.processor, grid)
        batches = [self._pack(each, template) for each in own]
        has_text_alone = all(full.is_equal(without_image) for full, _, without_image in views)

        def velocity(which: int, x_LC: Tensor, t: float) -> Tensor:
            attend = _attend_apart(batches[which], [each.cache for each in own[which]])
            return self.model.velocity(batches[which], x_LC, t, attend=attend)

        x_LC = noise_LC.to(device_of(self.model))
        for t, following in steps(flow):
            v = velocity(0, x_LC, t)
            if flow.guides(t):
                image = None if flow.image_scale <= 1.0 else v if has_text_alone else velocity(2, x_LC, t)
                number, plain = len(several), velocity(1, x_LC, t)
                images = [None] * number if image is None else image.chunk(number)
                triples = zip(v.chunk(number), plain.chunk(number), images, strict=True)
                v = torch.cat([guide(*each, flow) for each in triples])
            if on_step is not None:
                on_step(t, x_LC, v)
            x_LC = x_LC - (t - following) * v
        return x_LC

    @torch.no_grad()
    def decode(self, x_LC: Tensor, grid: tuple[int, int]) -> Tensor:
        """Latent patches -> image ``[C, H, W]`` in about [-1, 1]."""
        return self.model.vae.decode(unpatchify_latent(x_LC, grid, self.processor.latent_patch_size)[None])[0]


def _attend_apart(batch: PackedBatch, caches: Sequence[KVCache]) -> Attend:
    """Attention of documents, each on top of its own cache, exactly as alone; tokens are in expert order."""
    attends = [cache.attend(causal=False, keep=False) for cache in caches]
    if len(attends) == 1:
        return attends[0]
    document_T = batch.document_ids[torch.cat([batch.text_index, batch.vit_index, batch.latent_index])]
    rows = [(document_T == number).nonzero().flatten() for number in range(len(attends))]

    def attend(*qkv_THE: Tensor) -> Tensor:
        out_THE = torch.empty_like(qkv_THE[0])
        for one, index in zip(attends, rows, strict=True):
            out_THE[index] = one(*(x[index] for x in qkv_THE))
        return out_THE

    return attend
