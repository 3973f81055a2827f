"""One text or one image of a conversation: what every record is read as."""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["user", "assistant", "system"]
PLACEHOLDER = "<image>"
"""What some layouts have in a text where an image belongs."""


class Turn(NamedTuple):
    """One text or one image of a conversation. ``role`` is user, assistant or system."""

    role: Role
    kind: Literal["text", "image"]
    value: str
    """The text, or the path of the image; one inside of another file is a ``StoredImage``."""
    learned: bool = True
    """False: of the assistant, and only read: an answer of ``weight`` 0."""

    @property
    def is_target(self) -> bool:
        """Whether it is learned."""
        return self.learned and self.role == "assistant"


def same_message(last: Turn, turn: Turn) -> bool:
    """Whether two turns that follow each other are of one message."""
    return last.role == turn.role and last.learned == turn.learned
