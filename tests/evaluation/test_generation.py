"""Records as questions, and the turns in which ranks call a model; ``answers``: ``test_previews.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unigen_ds.data.samples.sample import Sample
from unigen_ds.data.samples.splits import ImageSplit, TextSplit, TokenSplit
from unigen_ds.evaluation.generation import NO_ANSWER, TOO_LONG, UNREADABLE, Records, ask, question_of
from unigen_ds.inference.together import AnotherRankFailed, TrainedModel
from unigen_ds.system import dist

ASKED, REPLY, LATER = TextSplit((5, 6), loss=False), TextSplit((7,), loss=True), TextSplit((8, 9), loss=True)
SEEN, DRAWN = ImageSplit("a.png", "vit", (1, 1)), ImageSplit("b.png", "noise", (2, 3))
EOS = 1


def test_the_last_answer_of_a_kind_is_asked_for() -> None:
    sample = Sample((SEEN, ASKED, REPLY, DRAWN, ImageSplit("b.png", "vit", (1, 1)), ASKED, LATER))
    text = question_of(sample, "text", key="a:0")
    assert text is not None and (text.target, text.reference_ids) == (LATER, (8, 9))
    assert DRAWN not in text.before and len(text.before) == 5, (
        "a drawn picture is read as the condition that follows it"
    )
    image = question_of(sample, "image", key="a:0")
    assert image is not None and (image.target, image.before) == (DRAWN, (SEEN, ASKED, REPLY))


def test_ids_with_labels_are_divided_at_the_last_run_of_targets() -> None:
    ids, labels = (3, 4, 5, 6, 7, EOS, 9), (-100, -100, 5, -100, 7, EOS, 9)
    question = question_of(Sample((SEEN, TokenSplit(ids, labels))), "text", key="a:0", end_ids=(EOS,))
    assert question is not None and question.begin == (3, 4, 5, 6, 7) and question.reference_ids == (7,)


@pytest.mark.parametrize("splits", [(ASKED,), (REPLY,), (TokenSplit((3, 4), (4, -100)),)])
def test_without_an_answer_or_a_prompt_there_is_no_question(splits: Any) -> None:
    assert question_of(Sample(splits), "text", key="a:0") is None
    assert question_of(Sample((ASKED, REPLY), plain=True), "text", key="a:0") is None


class Samples(list):
    """A data set of samples."""

    def sample(self, index: int, *, pass_number: int = 0) -> Sample:
        return self[index]


def test_sources_in_turns_and_what_is_left_out_is_counted() -> None:
    good, bad = Sample((ASKED, REPLY)), Sample((ImageSplit("c.png", "vit", (1, 1), error="broken"), REPLY))
    long = Sample((TextSplit(tuple(range(30)), loss=False), REPLY))
    processor = SimpleNamespace(tokenizer=SimpleNamespace(bos_id=0, eos_id=EOS))
    sources: Any = [Samples([good, bad, good, good]), Samples([Sample((ASKED,)), good, long])]
    data = Records(sources, ["a", "b"], processor)
    pairs, left_out = ask(data, kind="text", max_samples=None, limit=20)
    assert pairs == [(0, 0), (1, 1), (0, 2), (0, 3)] and left_out == {NO_ANSWER: 1, UNREADABLE: 1, TOO_LONG: 1}
    assert ask(data, kind="text", max_samples=2)[0] == [(0, 0), (1, 1)]


class Engine:
    """Two ranks share the weights of a model with two methods."""

    gathers_in_forward, device = True, torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.model = self
        self.forward_methods = ("read", "draw")

    def read(self) -> None:
        self.calls.append("read")

    def draw(self) -> None:
        self.calls.append("draw")


@pytest.mark.parametrize(
    ("other", "message"), [([1.0, 0, 0, 0], "1 other process"), ([0, 0, 1.0, 0], "different calls")]
)
def test_a_failure_or_a_call_without_a_partner_ends_all(
    other: list[float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "sum_floats", lambda mine: [a + b for a, b in zip(mine, other, strict=True)])
    engine = Engine()
    model = TrainedModel(engine)  # type: ignore[arg-type]
    with pytest.raises(AnotherRankFailed, match=message):
        model.draw()
    assert not engine.calls and not model.shares
