"""What is asked of a model, as plain values: prompts, and how tokens are chosen. No torch: ``--help`` does not wait."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unigen_ds.core.errors import ConfigError, DataError


@dataclass(frozen=True)
class Sampling:
    """The likeliest token each time, or one drawn at random. Raises ``ConfigError`` for other values."""

    temperature: float = 0.0
    """Logits are divided by it; 0 chooses the likeliest token."""
    top_p: float = 1.0
    """The likeliest tokens of this probability together are drawn; 1: all (Holtzman et al., arXiv 1904.09751)."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < math.inf):
            raise ConfigError(
                f"temperature is {self.temperature}", allowed="a number of at least 0; 0 chooses the likeliest token"
            )
        if not (0.0 < self.top_p <= 1.0):
            raise ConfigError(f"top_p is {self.top_p}", allowed="more than 0, at most 1; 1 leaves out no token")
        if self.top_p < 1.0 and self.temperature == 0.0:
            raise ConfigError(
                f"top_p is {self.top_p} and temperature is 0, which chooses the likeliest token",
                remedy="a temperature above 0, or leave top_p out",
            )


ROW = '{"prompt": "...", "images": ["a.png"]}, or {"parts": ["a text", {"image": "a.png"}], "prompt": "..."}'


@dataclass(frozen=True)
class Prompt:
    """One call of ``unified_generate``: a prompt, and the pictures and texts before it. Raises ``ConfigError``."""

    prompt: str = ""
    images: Sequence[str] = ()
    """Paths of pictures, shown first."""
    parts: Sequence[str | Mapping[str, str]] = ()
    """Texts, and pictures as ``{"image": path}``, in their order, shown after ``images`` and before ``prompt``."""

    def __post_init__(self) -> None:
        if isinstance(self.images, str) or not all(isinstance(one, str) for one in self.images):
            raise ConfigError(f"images is {self.images!r}", allowed="a list of paths")
        for part in self.parts if isinstance(self.parts, (list, tuple)) else [None]:
            is_picture = isinstance(part, Mapping) and {*part} == {"image"} and isinstance(part["image"], str)
            if not isinstance(part, str) and not is_picture:
                raise ConfigError(f"parts is {self.parts!r}", allowed='a list of texts and of {"image": "a.png"}')

    @property
    def paths(self) -> list[str]:
        """Paths of all pictures, in the order in which the model reads them."""
        return [*self.images, *(part["image"] for part in self.parts if not isinstance(part, str))]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments ``images`` and ``parts`` of ``unified_generate``, those that are given."""
        parts = [part if isinstance(part, str) else Path(part["image"]) for part in self.parts]
        return {**({"images": list(self.images)} if self.images else {}), **({"parts": parts} if parts else {})}

    @property
    def text(self) -> str:
        """All its texts, a line each."""
        return "\n".join(text for text in (*(one for one in self.parts if isinstance(one, str)), self.prompt) if text)


def read_prompts(path: Path, *, where: str) -> list[Prompt]:
    """Read prompts: of a file ``.jsonl`` as in ``ROW``, else one on each line. Empty lines are ignored. Raises
    ``ConfigError`` where the file cannot be read, ``DataError`` with the line that is no prompt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} {path} cannot be read: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if path.suffix == ".jsonl" else {"prompt": line.strip()}
            if not isinstance(row, Mapping) or not {"prompt", "parts"} & {*row}:
                raise ValueError("no prompt")
            prompts.append(Prompt(**{**row, "prompt": str(row.get("prompt", ""))}))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}:{number} is no prompt: {line!r} ({error})", allowed=ROW) from error
    return prompts
