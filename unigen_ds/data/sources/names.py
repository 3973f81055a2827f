"""Many short texts as two arrays, as the index keeps them: names of files, of members of a tar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Names:
    """Texts in one array of bytes; ``ends`` [N]: where each of them ends."""

    def __init__(self, letters: NDArray[Any], ends: NDArray[Any]) -> None:
        self.letters, self.ends = letters, ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> Names:
        """Of any texts, also those of bytes that are no UTF-8."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(one) for one in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.letters[start : int(self.ends[index])].tobytes().decode("utf-8", "surrogateescape")
