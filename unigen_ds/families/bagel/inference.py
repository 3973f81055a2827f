"""Texts and pictures in, a text or a picture out, with a KV cache: BAGEL's inference rules, number for number.

Three contexts are extended in parallel: ``full`` has everything, ``without_text`` all before the last text (all, where
a picture is the last), and
``without_image`` the texts alone; guidance compares their velocities for the same noise. One conversation at a time;
many short drawings at once are ``sampler.draw``'s.

Shape suffixes: L latent patches, C their width, T tokens, D model width.
Source: ByteDance-Seed/Bagel (Deng et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unigen_ds.config.registry import check_arguments, checked
from unigen_ds.core.batch import PackedBatch
from unigen_ds.core.errors import ConfigError
from unigen_ds.data.batches.loader import pack_documents
from unigen_ds.data.samples.sample import Loaded
from unigen_ds.data.samples.splits import ImageSplit, TextSplit, TokenSplit
from unigen_ds.families.bagel.flow_settings import FlowSettings, flow_for
from unigen_ds.families.bagel.processor import UnifiedProcessor
from unigen_ds.families.bagel.sampler import guide, image_grid, noise_image, times, vit_image
from unigen_ds.inference.continuation import chooser, device_of
from unigen_ds.inference.generated import (
    BOTH,
    Generated,
    MaxLength,
    MaxParts,
    Picture,
    Request,
    Size,
    in_order,
    pictures,
    to_picture,
)
from unigen_ds.inference.kv_cache import KVCache
from unigen_ds.inference.sampling import Sampling
from unigen_ds.models.flow import unpatchify_latent
from unigen_ds.models.vae import encode_by_size
from unigen_ds.system.seeding import derive_seed, generator

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


@dataclass
class Context:
    """Tokens that the model has seen, and the next rotary position."""

    cache: KVCache = field(default_factory=KVCache)
    position: int = 0

    def copy(self) -> Context:
        return Context(self.cache.copy(), self.position)


@dataclass
class Contexts:
    """See the module docstring."""

    full: Context = field(default_factory=Context)
    without_text: Context = field(default_factory=Context)
    without_image: Context = field(default_factory=Context)


@dataclass(frozen=True)
class _Options:
    """How texts are written and pictures are drawn (``unified_generate``)."""

    size: Sequence[int]
    flow: FlowSettings
    on_step: OnStep | None
    max_length: int
    sampling: Sampling
    seed: int


class InterleaveInferencer:
    """A model that draws and reads.

    Args:
        model: a ``UnifiedModel`` in evaluation mode.
        processor: its tokenizer and image transforms.
    """

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
        understand: bool = False,
        think: bool = False,
        size: Size = None,
        flow: FlowSettings | Mapping[str, Any] | None = None,
        max_length: MaxLength = 1000,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_step: OnStep | None = None,
        max_parts: MaxParts = 0,
    ) -> Generated:
        """A picture for ``prompt``; with ``images`` an edited one; with ``understand`` a text instead; with
        ``max_parts`` texts and pictures in alternation.

        Args:
            images: pictures (PIL, uint8 ``[H, W, 3]``) or paths, one alone or several, shown before the prompt.
            parts: texts and pictures that follow each other, shown after ``images`` and before the prompt, which may
                then be ''. A ``str`` is a text, a ``Path`` a picture.
            understand: answer in text, and draw nothing.
            think: the model writes its thoughts first, and uses them for the answer, too.
            size: (height, width) of the picture; None: of the last one shown, else the largest square.
            flow: how it is drawn; a mapping changes these fields of the default; None: as ``flow_for`` decides.
            max_length: tokens of the text at most.
            temperature: of the text; 0 chooses the likeliest token.
            top_p: of the text: only the likeliest tokens are drawn, which have this probability together.
            seed: of every random number.
            on_step: called in each Euler step.
            max_parts: 0: one answer, as above. Else a text, a picture, a text, ..., up to so many; each is read again
                before the next, as if the user had sent it. It ends earlier where a text is empty.

        Raises ``ConfigError`` for an argument that is unknown, wrong, or without effect, and ``UnreadableImage``.
        """
        if max_parts and understand:
            raise ConfigError(
                f"max_parts is {max_parts} with understand", allowed="0: there is one text and no picture"
            )
        drawing = {"size": size, "flow": flow, "on_step": on_step}
        if understand and (unused := [name for name, value in drawing.items() if value is not None]):
            problem = f"unified_generate got {', '.join(unused)} with understand, which draws nothing"
            raise ConfigError(problem, remedy="leave out one of the two")
        sampling = Sampling(temperature, top_p)
        contexts, context_parts = Contexts(), [*pictures(images), *in_order(parts)]
        if think:
            self._show_prompt(contexts, THINK_THEN_ANSWER if understand else THINK_THEN_DRAW)
        of_last: Size = None
        num_shown = 0
        for part in context_parts:
            if isinstance(part, str):
                self._add_text(contexts, part)
                continue
            image = self.processor.read_image(part)
            resized = self._show_image(contexts, image, draw=not understand, noise_key=(seed, num_shown, "vae"))
            of_last, num_shown = (resized.height, resized.width), num_shown + 1
        size = size or of_last
        if prompt or not (understand or parts):  # a picture alone may be read, as in training
            self._add_text(contexts, prompt)
        if not understand:
            size = size or self._largest_square()
        options = _Options(size or (), self._flow(flow), on_step, max_length, sampling, seed)
        if max_parts:
            return self._alternate(contexts, options, max_parts, shown=num_shown)
        text = self._written(contexts, options) if think or understand else ""
        if understand:
            return Generated(text, [])
        if think:
            self.extend_text(contexts.full, self.processor.tokenizer.encode(text))
        return Generated(text, [self._drawn(contexts, options)])

    def _flow(self, flow: Any) -> FlowSettings:
        """How a picture is drawn, from the argument ``flow``."""
        where = "unified_generate.flow"
        if isinstance(flow, FlowSettings):
            check_arguments(FlowSettings, vars(flow), where=where)
            return flow
        if not isinstance(flow, Mapping | None):
            raise ConfigError(f"{where} is {flow!r}", allowed="FlowSettings, a mapping with fields of it, or None")
        return flow_for(self.model, flow, where=where)

    @torch.no_grad()
    def complete(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int,
        sampling: Sampling = _LIKELIEST,
        flow: FlowSettings | None = None,
    ) -> list[Generated]:
        """The answer to each of some records, whose parts are read as in training, one record at a time."""
        flow = flow or flow_for(self.model)
        return [self._answered(request, max_new_tokens, sampling, flow) for request in requests]

    def _answered(self, request: Request, max_new_tokens: int, sampling: Sampling, flow: FlowSettings) -> Generated:
        contexts, before = Contexts(), [*request.prompt]
        if len(request.begin) > 1:
            before.append(TokenSplit.unlearned(request.begin[:-1]))
        for split in before:
            if isinstance(split, TextSplit):
                contexts.without_text = contexts.full.copy()
                self._extend(contexts.without_image, split)
            self._extend(contexts.full, split)
        options = _Options(request.size or (), flow, None, 0, sampling, request.seed)
        images = [self._drawn(contexts, options)] if request.wanted == "image" or request.picture_first else []
        if request.wanted == "image":
            return Generated("", images)
        for image in images:
            self.extend_vit(contexts.full, image)
        first = request.begin[-1] if request.begin else None
        ids = self.write(contexts.full, max_length=max_new_tokens + 1, seed=request.seed, first=first, **vars(sampling))
        text = self.processor.tokenizer.decode(ids[1:])
        if request.wanted == BOTH and not images:
            self._add_text(contexts, text)
            images = [self._drawn(contexts, options)]
        return Generated(text, images)

    def idle(self, method: str) -> tuple[Any, ...]:
        """Arguments of a forward pass that does nothing: of a rank that has no work while others have."""
        batch = self._pack(Context(), TokenSplit((self.processor.tokenizer.bos_id,), (-100,)))
        more: dict[str, tuple[Any, ...]] = {
            "forward": (),
            "velocity": (batch.flow_noise, 0.0),
            "next_token_logits": (batch.flow_noise,),
        }
        more["read"] = (batch.flow_noise, KVCache().attend(causal=True, keep=False))
        return (batch, *more[method])

    def _alternate(self, contexts: Contexts, options: _Options, max_parts: int, *, shown: int) -> Generated:
        """Texts and pictures in alternation. ``shown``: images that were passed."""
        parts: list[str | Image.Image] = []
        texts: list[str] = []
        images: list[Image.Image] = []
        while len(parts) < max_parts:
            if len(texts) == len(images):
                text = self._written(contexts, options, number=len(texts))
                if not text.strip():
                    break
                self._add_text(contexts, text)
                texts.append(text)
                parts.append(text)
            else:
                image = self._drawn(contexts, options, number=len(images))
                if len(parts) + 1 < max_parts:
                    key = (options.seed, shown + len(images), "vae")
                    self._show_image(contexts, image, draw=True, noise_key=key)
                images.append(image)
                parts.append(image)
        return Generated("\n".join(texts), images, parts)

    def _written(self, contexts: Contexts, options: _Options, *, number: int = 0) -> str:
        """The text of that number, which is not yet in the contexts."""
        seed = derive_seed(options.seed, "part", number) if number else options.seed
        ids = self.write(contexts.full, max_length=options.max_length, seed=seed, **vars(options.sampling))
        text: str = self.processor.tokenizer.decode(ids)
        return text

    def _drawn(self, contexts: Contexts, options: _Options, *, number: int = 0) -> Image.Image:
        """The picture of that number, from noise of its own."""
        grid = image_grid(self.processor, options.size)
        width = self.processor.latent_channels * self.processor.latent_patch_size**2
        noise_LC = torch.randn(grid[0] * grid[1], width, generator=generator(options.seed, number, "draw"))
        x_LC = self.denoise(contexts, noise_LC, grid, flow=options.flow, on_step=options.on_step)
        return to_picture(self.decode(x_LC, grid))

    # --- contexts ---------------------------------------------------------------------------------------------

    def _show_prompt(self, contexts: Contexts, prompt: str) -> None:
        ids = self.processor.tokenizer.encode(prompt)
        for context in (contexts.full, contexts.without_image):
            self.extend_text(context, ids)

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
        if draw:
            if vae is None:
                raise ConfigError("this processor has no vae_transform, so it cannot draw from images")
            pixels, side = vae(image), self.processor.vae_spatial_downsample
            shape = (self.processor.latent_channels, pixels.shape[1] // side, pixels.shape[2] // side)
            self.extend_vae(contexts.full, pixels, torch.randn(shape, generator=generator(*noise_key)))
        self.extend_vit(contexts.full, image)
        if draw:  # as in the public code: guidance by the text is by the texts that follow
            contexts.without_text = contexts.full.copy()
        return image

    def _largest_square(self) -> tuple[int, int]:
        transform = self.processor.vae_transform
        if transform is None:
            raise ConfigError("this processor has no vae_transform, so it cannot draw")
        return transform.largest_side, transform.largest_side

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
        template = noise_image(self.processor, grid)
        split = ImageSplit("", "vae", grid)
        self._extend(context, replace(template, split=split, vae_image=pixels, vae_noise=noise))

    def _extend(self, context: Context, split: Loaded) -> Tensor:
        """Add one split; returns the logits ``[vocabulary]`` of what follows it."""
        batch = self._pack(context, split)
        is_text = not (batch.vit_index.numel() or batch.latent_index.numel())
        latents_LC = encode_by_size(self.model.vae, batch, self.processor.latent_patch_size)
        logits: Tensor = self.model.read(batch, latents_LC, context.cache.attend(causal=is_text, keep=True))
        context.position = int(batch.position_ids[-1]) + 1
        return logits

    def _pack(self, context: Context, split: Loaded) -> PackedBatch:
        batch = pack_documents([[split]], self.processor)
        batch = replace(batch, position_ids=batch.position_ids + context.position)
        return batch.to(device_of(self.model))

    # --- text -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def write(
        self,
        context: Context,
        *,
        max_length: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        first: int | None = None,
    ) -> list[int]:
        """Ids that follow the context, which stays as it is. As in the public code the begin token comes first and
        counts (``first`` replaces it); the end token is left out.
        """
        tokenizer, context = self.processor.tokenizer, context.copy()
        choose = chooser(Sampling(temperature, top_p), [seed])
        ids: list[int] = []
        token = tokenizer.bos_id if first is None else first
        while len(ids) < max_length:
            ids.append(token)
            [token] = choose(self._extend(context, TokenSplit((token,), (-100,)))[None], [0])
            if token == tokenizer.eos_id:
                break
        return ids

    # --- pictures ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def denoise(
        self,
        contexts: Contexts,
        noise_LC: Tensor,
        grid: tuple[int, int],
        *,
        flow: FlowSettings,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Euler steps from noise to latent patches ``[L, C]``."""
        template = noise_image(self.processor, grid)
        own = (contexts.full, contexts.without_text, contexts.without_image)
        batches = [self._pack(context, template) for context in own]

        def velocity(which: int, x_LC: Tensor, t: float) -> Tensor:
            attend = own[which].cache.attend(causal=False, keep=False)
            v_LC: Tensor = self.model.velocity(batches[which], x_LC, t, attend=attend)
            return v_LC

        x_LC = noise_LC.to(device_of(self.model))
        steps = times(flow)
        for t, following in zip(steps, steps[1:], strict=False):
            v = velocity(0, x_LC, t)
            if flow.guides(t):
                image = velocity(2, x_LC, t) if flow.image_scale > 1.0 else None
                v = guide(v, velocity(1, x_LC, t), image, flow)
            if on_step is not None:
                on_step(t, x_LC, v)
            x_LC = x_LC - (t - following) * v
        return x_LC

    @torch.no_grad()
    def decode(self, x_LC: Tensor, grid: tuple[int, int]) -> Tensor:
        """Latent patches -> image ``[C, H, W]`` in about [-1, 1]."""
        image: Tensor = self.model.vae.decode(unpatchify_latent(x_LC, grid, self.processor.latent_patch_size)[None])[0]
        return image
