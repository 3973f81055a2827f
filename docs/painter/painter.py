"""A unified model of one's own, with pictures of 16 tokens, in one file: ``docs/extending/unified_model.md``."""

import json
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from unigen_ds import (
    FAMILIES,
    IGNORED,
    MODELS,
    ConversationFamily,
    ConversationProcessor,
    Generated,
    LlamaLM,
    LossTerms,
    Pretrained,
    PublishedFormat,
    Request,
    Sampling,
    Split,
    TextSplit,
    TokenSplit,
    chooser,
    continue_prompts,
    count_image,
    idle_arguments,
    new_directory,
    stored_tensors,
    text_loss_sum,
)

SIDE, LEVELS = 4, 4
TOKENS, CODES = SIDE**2, LEVELS**3


def encode(picture):
    """Your tokenizer of pictures: here the colour of each of 4 x 4 squares, one of 64."""
    small = np.asarray(picture.convert("RGB").resize((SIDE, SIDE)), dtype=int) * LEVELS // 256
    return (small @ [LEVELS**2, LEVELS, 1]).ravel().tolist()


def decode(codes):
    colours = np.reshape(codes, (SIDE, SIDE, 1)) // [LEVELS**2, LEVELS, 1] % LEVELS
    return Image.fromarray((colours * 255 // (LEVELS - 1)).astype(np.uint8)).resize((32, 32), Image.Resampling.NEAREST)


@dataclass(frozen=True)
class Picture(Split):
    path: str
    drawn: bool
    num_tokens = 1 + TOKENS

    @property
    def source(self):
        return self.path

    def count(self, tally):
        count_image(tally, self)
        tally.image_targets += TOKENS * self.drawn

    def load(self, processor, key):
        codes = [processor.first + code for code in encode(processor.read_image(self.path))]
        ids = (processor.tokenizer.image_start_id, *codes)
        return TokenSplit(ids, (*codes, IGNORED)) if self.drawn else TokenSplit.unlearned(ids)

    def pixels(self, processor):
        picture = np.array(decode(encode(processor.read_image(self.path))))
        return torch.from_numpy(picture).permute(2, 0, 1) / 127.5 - 1


class PainterProcessor(ConversationProcessor):
    @property
    def first(self):  # the id of the first code
        return len(self.tokenizer)

    def splits_of(self, turns, ids, where, *, keep_images):
        for turn in turns:
            if turn.kind == "text":
                yield TextSplit(tuple(next(ids)), loss=turn.is_target)
            else:
                yield Picture(turn.value, drawn=turn.is_target)


@MODELS.register_module()
class Painter(nn.Module):
    forward_methods = ("next_token_logits",)

    def __init__(self, *, llm: dict):
        super().__init__()
        self.llm, self.vocab_size = dict(llm), llm["vocab_size"] + CODES  # the tokenizer's ids, then the codes
        self.language_model = LlamaLM({**llm, "vocab_size": self.vocab_size})

    def arguments(self):
        return {"llm": self.llm}

    def shard_units(self):
        return list(self.language_model.model.layers)

    def logits(self, batch, of, attend=None):
        backbone = self.language_model.model
        return self.language_model.lm_head(backbone(backbone.embed_tokens(batch.text_ids), batch, attend)[of])

    def forward(self, batch):
        logits = self.logits(batch, batch.text_target_index)
        return LossTerms({"text": text_loss_sum(logits, batch.text_target_ids, batch.text_target_weight)})

    def next_token_logits(self, batch, attend=None):
        return self.logits(batch, torch.tensor(batch.document_lengths).cumsum(0) - 1, attend)


@dataclass(frozen=True)
class Drawing:
    temperature: float = 1.0


class PainterInferencer:
    answers = ("text", "image")

    def __init__(self, model, processor):
        self.model, self.processor = model, processor

    def unified_generate(self, prompt, *, images=(), understand=False, max_length=20, seed=0, flow=None, **_):
        tokenizer, wanted = self.processor.tokenizer, "text" if understand else "image"
        shown = [Picture(path, drawn=False).load(self.processor, None) for path in images]
        text = TextSplit(tuple(tokenizer.encode(prompt)), loss=False)
        request = Request([*shown, text], wanted, seed, begin=(tokenizer.bos_id,))
        return self.complete([request], max_new_tokens=max_length, flow=flow)[0]

    def complete(self, requests, *, max_new_tokens, sampling=None, flow=None):
        sampling, flow = sampling or Sampling(), flow or Drawing()
        return [self.answer(request, max_new_tokens, sampling, flow) for request in requests]

    def answer(self, request, length, sampling, flow):
        if request.wanted == "text":
            ids = self.write(request, request.begin, length, slice(0, self.processor.first), sampling)
            return Generated(self.processor.tokenizer.decode(ids), [])
        begin, codes = (self.processor.tokenizer.image_start_id,), slice(self.processor.first, None)
        ids = self.write(request, begin, TOKENS, codes, Sampling(flow.temperature))
        return Generated("", [decode([id - self.processor.first for id in ids])])

    def write(self, request, begin, length, allowed, sampling):
        choose = chooser(sampling, [request.seed])
        prompt = [*request.prompt, TokenSplit.unlearned(begin)]
        [ids] = continue_prompts(
            self.model, self.processor, [prompt], max_new_tokens=length,
            choose=lambda logits, of: [allowed.start + kind for kind in choose(logits[:, allowed], of)],
        )  # fmt: skip
        return ids

    def idle(self, method):
        return idle_arguments(self.model, self.processor)


class PainterDirectory(PublishedFormat):
    name, pretrained = "a directory of Painter", False

    def recognises(self, folder):
        return (folder / "painter.json").is_file()

    def config(self, folder):
        tokenizer = {"type": "PretrainedTokenizer", "path": str(folder)}
        return {"model": json.loads((folder / "painter.json").read_text()), "tokenizer": tokenizer}

    def weights(self, folder):
        return Pretrained(str(folder), {}, stored_tensors(folder / "painter.tensors"))

    def write(self, model, processor, out, *, dtype, **_):
        with new_directory(out) as folder:
            (folder / "painter.json").write_text(json.dumps({"type": "Painter", **model.arguments()}))
            save_file(model.to(dtype).state_dict(), folder / "painter.tensors")
            processor.tokenizer.save_pretrained(str(folder))


@FAMILIES.register_module()
class PainterFamily(ConversationFamily):
    model, processor_type, inferencer = Painter, PainterProcessor, PainterInferencer
    terms, drawing, published = ("text",), Drawing, (PainterDirectory(),)
