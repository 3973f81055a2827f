"""Tokenizers with the five ids that the sequence rules need (``samples.TextTokenizer``)."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from unigen_ds.config.hub import download, folder_of
from unigen_ds.config.paths import download_remedy
from unigen_ds.config.registry import TOKENIZERS, checked
from unigen_ds.core.errors import ConfigError, DataError
from unigen_ds.data.images.tiles import GLOBAL_TOKEN, IMAGE_TOKEN, TILE_TOKENS

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Special:
    """The special tokens of a fast tokenizer of transformers, and texts of users that spell one (``<|im_end|>``,
    ``<image>``), which are encoded as the ordinary text that they are.

    Otherwise a record could forge a turn of its conversation, an image, or its own end. Only what users wrote is
    protected: the tokens of a chat template and of an image stay. A text without such a spelling is encoded as usual.
    ``names``: further tokens that control a sequence, special by their entry in the tokenizer or not.
    """

    def __init__(self, tokenizer: Any, names: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        ids = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids |= {name: tokenizer.convert_tokens_to_ids(name) for name in names}
        self._ids = ids
        self.ids = {number for number in ids.values() if number != tokenizer.unk_token_id}
        self._pattern = re.compile("|".join(sorted(map(re.escape, ids), key=len, reverse=True)))  # longest first

    def is_spelled_in(self, text: str) -> bool:
        """Whether ``text`` spells a special token."""
        return self._pattern.search(text) is not None

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of ``text`` as ordinary text, whatever it spells, and where each begins."""
        encoding = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        )
        ids = list(encoding["input_ids"])
        if self.ids.isdisjoint(ids):
            return ids, [start for start, _ in encoding["offset_mapping"]]
        # the vocabulary itself, or an added token that is not marked special, has the spelling: split into characters
        edges = {p for match in self._pattern.finditer(text) for p in range(match.start(), match.end() + 1)}
        bounds = sorted({0, len(text), *edges})
        ids, starts = [], []
        for first, last in zip(bounds, bounds[1:], strict=False):
            part = self._tokenizer(text[first:last], add_special_tokens=False, split_special_tokens=True)["input_ids"]
            if not self.ids.isdisjoint(part):
                raise DataError(f"the tokenizer can only encode {text[first:last][:60]!r} as a special token")
            ids += part
            starts += [first] * len(part)
        return ids, starts

    def shield(self, texts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The texts with a character that none of them has in place of each spelling, and the spelling of each."""
        spellings = sorted({match for text in texts for match in self._pattern.findall(text)})
        if not spellings:
            return list(texts), {}
        present = set("".join(texts))
        free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in present)  # Unicode's private use
        signs = dict(zip(spellings, free, strict=False))
        safe_texts = [self._pattern.sub(lambda match: signs[match.group()], text) for text in texts]
        return safe_texts, {sign: spelling for spelling, sign in signs.items()}

    def encode_shielded(self, text: str, signs: Mapping[str, str]) -> tuple[list[int], list[int]]:
        """Ids of a rendered chat, and where in ``text`` each begins: its own special tokens stay, not shielded ones."""
        ids: list[int] = []
        starts: list[int] = []
        position = 0
        for match in [*self._pattern.finditer(text), None]:
            segment = text[position : match.start() if match else len(text)]
            if segment:
                offsets = [0, *accumulate(len(signs.get(character, " ")) for character in segment)]
                part, begins = self.encode("".join(signs.get(character, character) for character in segment))
                ids += part
                starts += [position + min(bisect_right(offsets, begin), len(segment)) - 1 for begin in begins]
            if match:
                ids.append(self._ids[match.group()])
                starts.append(match.start())
                position = match.end()
        return ids, starts


class _Tokenizer:
    """Wraps a fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any, names: Sequence[str]) -> None:
        ids = tokenizer.convert_tokens_to_ids(list(names))
        unk = (tokenizer.unk_token_id, tokenizer.unk_token)  # which is the end token of some
        missing = [n for n, i in zip(names, ids, strict=True) if i is None or (i == unk[0] and n != unk[1])]
        if missing:
            raise ConfigError(f"the tokenizer has no token {', '.join(missing)}", remedy="add it as a special token")
        self._tokenizer = self.chat = tokenizer
        """That of transformers, for its chat template and offsets."""
        self.bos_id, self.eos_id, self.image_start_id, self.image_end_id = ids
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_id
        model = tokenizer.backend_tokenizer.model
        unknown = type(model).__name__ == "Unigram" or getattr(model, "unk_token", None) is not None
        self.unk_id: int | None = tokenizer.unk_token_id if unknown else None
        """The id of words that it does not have; None where every text has ids (bytes), even with such a token."""
        self.fingerprint = hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest()
        # which its file may turn on, and transformers turns off in each call
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        self.special = Special(tokenizer, names)

    def __len__(self) -> int:
        """Ids there are; the least ``vocab_size`` a model needs."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ids of texts that users wrote: one that spells a special token is ordinary text."""
        ordinary = iter(self._encode([text for text in texts if not self.special.is_spelled_in(text)]))
        return [self.special.encode(text)[0] if self.special.is_spelled_in(text) else next(ordinary) for text in texts]

    def encode_unprotected(self, text: str) -> list[int]:
        """Return ids of a text of a template: what is spelled becomes the token."""
        return self._encode([text])[0]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode_unprotected`` of each, in one call: several times as fast for short texts."""
        backend = self._tokenizer.backend_tokenizer
        backend.encode_special_tokens = False  # a call for a text that spells a special token leaves it on
        return [one.ids for one in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to the text before it; of a character that several ids make, the last one has all."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream()
        return [stream.step(self._tokenizer.backend_tokenizer, token) or "" for token in ids]

    def save_pretrained(self, directory: str) -> None:
        self._tokenizer.save_pretrained(directory)


@TOKENIZERS.register_module()
class WordTokenizer(_Tokenizer):
    """One id per word, from a given list: for small closed vocabularies. Unknown words become ``<unk>``.

    Args:
        words: one id per word of this list; any other word becomes ``<unk>``.
    """

    def __init__(self, *, words: Sequence[str]) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace
        from transformers import PreTrainedTokenizerFast

        vocabulary = {word: i for i, word in enumerate(dict.fromkeys(("<pad>", "<unk>", *_SPECIAL, *words)))}
        inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        inner.pre_tokenizer = Whitespace()  # type: ignore[assignment]
        fast = PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", additional_special_tokens=list(_SPECIAL)
        )
        super().__init__(fast, _SPECIAL)


@TOKENIZERS.register_module()
class PretrainedTokenizer(_Tokenizer):
    """A tokenizer directory or hub name, as ``AutoTokenizer`` reads it. Tokens it lacks are added as special ones.

    Args:
        path: directory or hub name, as transformers' ``AutoTokenizer`` reads it.
        bos: token that begins each text.
        eos: token that ends each text.
        image_start: token before an image's patches; None: there are no images.
        image_end: token after them; None as ``image_start``.
    """

    def __init__(
        self,
        *,
        path: str,
        bos: str = _SPECIAL[0],
        eos: str = _SPECIAL[1],
        image_start: str | None = _SPECIAL[2],
        image_end: str | None = _SPECIAL[3],
    ) -> None:
        names = (bos, eos, image_start or eos, image_end or eos)
        super().__init__(_read(path, names), names)


@TOKENIZERS.register_module()
class ChatTokenizer(_Tokenizer):
    """A tokenizer with a chat template, for ``VLM``; tokens for images and their tiles are added in nanoVLM's order.

    Args:
        path: directory or hub name, as transformers' ``AutoTokenizer`` reads it.
        chat_template: Jinja text; None: the tokenizer's own. No message may change how earlier ones are shown.
        bos: token that begins each message.
        eos: token that ends each message, and an answer.
    """

    def __init__(
        self, *, path: str, chat_template: str | None = None, bos: str = _SPECIAL[0], eos: str = _SPECIAL[1]
    ) -> None:
        tokenizer = _read(path, (bos, eos, IMAGE_TOKEN, GLOBAL_TOKEN, *TILE_TOKENS))
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        if not tokenizer.chat_template:
            raise ConfigError(f"tokenizer {path!r} has no chat template", remedy="give tokenizer.chat_template")
        super().__init__(tokenizer, (bos, eos, GLOBAL_TOKEN, IMAGE_TOKEN))
        self.image_id = self.image_end_id
        self.fingerprint += "/" + hashlib.blake2b(str(tokenizer.chat_template).encode(), digest_size=8).hexdigest()


PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
"""Beside a tokenizer: of its model's processor, and of the ids that end a text."""


@TOKENIZERS.register_module()
class ModelTokenizer(_Tokenizer):
    """A model's own tokenizer and chat template, unchanged, for ``CausalLM`` and ``ImageTextToText``.

    Args:
        path: the model's directory, or its name on the hub.
        chat_template: Jinja text; None: the model's own.
        learn: answers of a conversation with loss: ``'all'``, or ``'last'`` for templates that change earlier ones.
    """

    @checked("tokenizer")
    def __init__(self, *, path: str, chat_template: str | None = None, learn: Literal["all", "last"] = "all") -> None:
        folder = _folder(path)
        if not folder.is_dir():  # its model's processor is needed, too
            folder = download(path, where=f"tokenizer.path {path!r}", weights=False)
        tokenizer = _read(str(folder))
        if not tokenizer.is_fast:
            raise ConfigError(f"tokenizer.path {path!r} has no fast tokenizer", allowed="one with a tokenizer.json")
        if tokenizer.eos_token is None:
            raise ConfigError(f"the tokenizer {path!r} has no end token", remedy="eos_token in tokenizer_config.json")
        self.files = {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).is_file()}
        self.name, self.learn = path, learn
        own = self._read_json("chat_template.json").get("chat_template")
        template = chat_template or tokenizer.chat_template or own
        tokenizer.chat_template = template.get("default") if isinstance(template, Mapping) else template
        super().__init__(tokenizer, (tokenizer.bos_token or tokenizer.eos_token, *(tokenizer.eos_token,) * 3))
        end_ids = self._read_json("generation_config.json").get("eos_token_id")
        self.end_ids = frozenset({self.eos_id, *(end_ids if isinstance(end_ids, list) else [end_ids])}) - {None}
        """Each of them ends an answer."""
        facts = repr((tokenizer.chat_template, sorted(self.files.items()))) + learn * (learn != "all")
        self.fingerprint += "/" + hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads(self.files.get(name, b"{}"))
        except ValueError as error:
            raise ConfigError(f"tokenizer.path {self.name!r}: {name} cannot be read: {error}") from error
        return content if isinstance(content, dict) else {}

    def save_pretrained(self, directory: str) -> None:
        """Also the files of the model's processor, as they are."""
        super().save_pretrained(directory)
        for name, content in self.files.items():
            (Path(directory) / name).write_bytes(content)


def _folder(path: str) -> Path:
    """The folder of a tokenizer. Raises ``ConfigError`` for one without, or that is neither here nor a hub's name."""
    folder = folder_of(path, where="tokenizer.path", weights=False)
    choices = "a folder with tokenizer.json, or a name on the hub: organisation/name"
    if folder.is_dir():
        if not any((folder / name).is_file() for name in _FILES):
            names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
            raise ConfigError(f"tokenizer.path {path!r} holds no tokenizer (it holds: {names})", allowed=choices)
    elif "/" in path or folder.exists():
        remedy = f"check the path; a relative one begins at {Path.cwd()}"
        raise ConfigError(f"tokenizer.path is {path!r}, and there is no such folder", allowed=choices, remedy=remedy)
    return folder


def _read(path: str, tokens: Sequence[str] = ()) -> Any:
    """The tokenizer at ``path``; those of ``tokens`` that it lacks are added as special ones. No code of its is run."""
    from transformers import AutoTokenizer

    folder = _folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        why, remedy = str(error).strip().splitlines()[0], download_remedy(path)
        if folder.is_dir():
            remedy = "name a tokenizer of a class that transformers has: code beside its files is never run"
        raise ConfigError(f"tokenizer.path {path!r} cannot be read: {why}", remedy=remedy) from error
    if tokens:
        present = tokenizer.get_vocab()
        tokenizer.add_special_tokens({"additional_special_tokens": [one for one in tokens if one not in present]})
    return tokenizer
