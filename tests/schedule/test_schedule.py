"""``Schedules``: a pure function of data consumed, lossless as JSON, with strict checks of its arguments."""

from __future__ import annotations

import json
import logging

import pytest
from mmengine.optim.scheduler import CosineAnnealingLR as MmengineCosine

from tests.checkpoint.support import schedules_of
from tests.support.golden_files import NANOVLM, read_json
from unigen_ds.core.errors import CheckpointError, ConfigError
from unigen_ds.core.progress import Geometry, Progress, Ruler
from unigen_ds.schedule.schedule import Schedules

BASE = [{"name": "default", "lr": 1e-4}, {"name": "connector", "lr": 5e-3}, {"name": "frozen", "lr": 0.0}]
WARMUP_COSINE = [
    dict(type="LinearLR", start_factor=1e-5, by_epoch=True, begin=0, end=0.1, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR", eta_min=1e-6, by_epoch=True, begin=0.1, end=4, convert_to_iter_based=True
    ),
]  # fmt: skip
EVERY_KIND = [
    dict(type="LinearLR", start_factor=0.1, unit="update", end=7),
    dict(type="ConstantLR", factor=0.3, begin=1, end=2),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.07, T_max=3.3, begin=0.37, end=3, convert_to_iter_based=True),
    dict(type="PolyLR", power=0.9, eta_min=1e-7, by_epoch=False, begin=11, end=90),
    dict(type="MultiStepLR", milestones=[100, 333.3], gamma=0.7, unit="sequence"),
    dict(type="WarmupCosineLR", warmup_ratio=0.071),
    dict(type="LinearLR", start_factor=1.0, end_factor=0.3, unit="token", begin=1000, end=70_001),
    dict(type="MultiStepLR", milestones=[5000], unit="token"),
]


def make(cfg, *, geometry=Geometry(8), per_epoch=800, total=3200.0, base=BASE) -> Schedules:  # noqa: B008
    return schedules_of(cfg, ruler=Ruler(geometry, per_epoch), base=base, total_sequences=total)


def lrs(schedules: Schedules, sequences: int, tokens: int = 0) -> list[float]:
    return [group["lr"] for group in schedules.at(Progress(sequences=sequences, tokens=tokens))]


@pytest.mark.parametrize("cfg", [None, []])
def test_no_scheduler_keeps_the_learning_rates(cfg) -> None:
    groups = make(cfg).at(Progress(sequences=1234))
    assert groups == [{"name": g["name"], "lr": g["lr"]} for g in BASE]


def test_a_frozen_group_stays_at_zero() -> None:
    """The cosine alone would raise 0 to ``eta_min``."""
    schedules = make(WARMUP_COSINE)
    assert all(lrs(schedules, s)[2] == 0.0 for s in range(0, 3300, 8))
    assert lrs(schedules, 3192)[0] >= 1e-6


class TestGeometry:
    @pytest.mark.parametrize("per_epoch", [800, 1000, 804, 997])
    @pytest.mark.parametrize(
        "cfg", [WARMUP_COSINE, EVERY_KIND[:3], EVERY_KIND[5:6]], ids=["epochs", "mixed", "nanovlm"]
    )
    def test_accumulation_changes_nothing(self, cfg, per_epoch: int) -> None:
        """New runs with 8 x 1 and 4 x 2: bit-equal, even if an epoch or a warm-up is not a whole number of updates."""
        a = make(cfg, geometry=Geometry(8, 1), per_epoch=per_epoch, total=4.0 * per_epoch)
        b = make(cfg, geometry=Geometry(4, 2), per_epoch=per_epoch, total=4.0 * per_epoch)
        c = make(cfg, geometry=Geometry(1, 4, 2), per_epoch=per_epoch, total=4.0 * per_epoch)
        rates = [lrs(a, sequences) for sequences in range(0, 4 * per_epoch, 8)]
        assert len({tuple(s) for s in rates}) > 20
        assert (
            rates == [lrs(b, s) for s in range(0, 4 * per_epoch, 8)] == [lrs(c, s) for s in range(0, 4 * per_epoch, 8)]
        )

    def test_only_the_data_consumed_counts(self) -> None:
        """Other counts of ``Progress`` (updates, epoch, samples) are different after a change of geometry."""
        schedules = make(WARMUP_COSINE)
        for sequences in range(0, 3200, 40):
            few = Progress(sequences=sequences, updates=sequences // 16, epoch=0, samples=5)
            many = Progress(sequences=sequences, updates=sequences // 8, epoch=3, skipped_updates=2)
            assert schedules.at(few) == schedules.at(many)

    @pytest.mark.parametrize(("unit", "size"), [({"by_epoch": False}, 8), ({"unit": "update"}, 24)])
    def test_steps_are_those_of_the_first_geometry(self, unit: dict, size: int) -> None:
        """``LinearLR`` over 10 iterations of 8, or updates of 24 sequences, ends at the last of them."""
        schedules = make(dict(type="LinearLR", start_factor=0.1, end=10, **unit), geometry=Geometry(4, 3, 2))
        assert lrs(schedules, 9 * size)[0] == BASE[0]["lr"] > lrs(schedules, 8 * size)[0]


class TestUnits:
    def test_tokens(self) -> None:
        """Continuous, without steps: half-way is the mean; the number of sequences has no effect."""
        schedules = make(dict(type="LinearLR", start_factor=0.0, unit="token", begin=100, end=300))
        assert lrs(schedules, 0, tokens=99)[0] == BASE[0]["lr"], "before its begin a curve has no effect"
        assert lrs(schedules, 0, tokens=100)[0] == 0.0
        assert lrs(schedules, 9999, tokens=200)[0] == pytest.approx(0.5e-4, rel=1e-15)
        assert lrs(schedules, 0, tokens=300)[0] == BASE[0]["lr"]

    def test_a_billion_tokens_is_an_amount(self) -> None:
        """mmengine's INF is 1e9 steps; 1e9 tokens is an ordinary number."""
        schedules = make(dict(type="CosineAnnealingLR", unit="token", end=10**9))
        assert lrs(schedules, 0, tokens=5 * 10**8)[0] == pytest.approx(0.5e-4, rel=1e-12)

    def test_epochs_are_fractions_of_the_stored_length(self) -> None:
        """An epoch of 1003 sequences is not a whole number of updates (packing): the exact fraction is used."""
        curve = make(WARMUP_COSINE, per_epoch=1003, total=4012).curves[1]
        assert curve.begin == pytest.approx(100.3, rel=1e-15) and curve.end == 4012

    def test_plain_by_epoch_is_constant_inside_an_epoch(self) -> None:
        """The epoch length need not be a multiple of the update: the next update that starts has the new value."""
        schedules = make(dict(type="MultiStepLR", milestones=[1], begin=0, end=3), per_epoch=1003)
        assert lrs(schedules, 1000)[0] == 1e-4
        assert lrs(schedules, 1008)[0] == pytest.approx(1e-5)

    def test_training_may_stop_inside_an_epoch(self) -> None:
        """A missing ``end`` with plain ``by_epoch`` includes the epoch in which training stops."""
        curve = make(dict(type="PolyLR"), per_epoch=800, total=1700).curves[0]
        assert curve.end == 2400


class TestState:
    @pytest.mark.parametrize("cfg", [WARMUP_COSINE, EVERY_KIND, None], ids=["xtuner", "every kind", "none"])
    def test_round_trip_is_bit_equal(self, cfg) -> None:
        state = make(cfg, per_epoch=797, geometry=Geometry(3, 2, 2)).state_dict()
        plain, before = (Schedules.from_state_dict({**state, "lr_scale": scale}) for scale in (1.0, 1 / 3))
        text = json.dumps(before.state_dict(), allow_nan=False)
        after = Schedules.from_state_dict(json.loads(text))
        assert after == before
        assert json.dumps(after.state_dict()) == text
        for i in range(600):
            progress = Progress(sequences=7 * i, tokens=131 * i)
            assert after.at(progress) == before.at(progress)
            assert after.at(progress) == [{**group, "lr": group["lr"] * (1 / 3)} for group in plain.at(progress)]

    def test_it_needs_no_config(self) -> None:
        """Sequences and tokens are stored: the begin of the cosine is 0.1 x 800."""
        state = make(WARMUP_COSINE).state_dict()
        assert state["version"] == 1
        assert [(c["type"], c["axis"], c["begin"], c["end"], c["step"]) for c in state["curves"]] == [
            ("LinearLR", "sequence", 0.0, 80.0, 8.0),
            ("CosineAnnealingLR", "sequence", 80.0, 3200.0, 8.0),
        ]
        assert state["base"] == BASE and state["lr_scale"] == 1.0 and state["total_sequences"] == 3200.0

    def test_the_text_tells_an_edit(self) -> None:
        old = make(WARMUP_COSINE).config
        other_order = [dict(reversed(list(spec.items()))) for spec in WARMUP_COSINE]
        assert make(other_order).config == old
        assert make([WARMUP_COSINE[0], {**WARMUP_COSINE[1], "end": 4.0}]).config == old
        assert make([WARMUP_COSINE[0], {**WARMUP_COSINE[1], "end": 5}]).config != old
        assert make(WARMUP_COSINE[0]).config == make(WARMUP_COSINE[:1]).config

    def test_a_default_made_explicit_is_no_edit(self) -> None:
        old = make(WARMUP_COSINE)
        explicit = make([{**WARMUP_COSINE[0], "end_factor": 1, "unit": None}, WARMUP_COSINE[1]])
        assert explicit.config != old.config and explicit.same_curves(old)
        assert not make([{**WARMUP_COSINE[0], "end_factor": 0.9}, WARMUP_COSINE[1]]).same_curves(old)

    def test_refuses_what_it_cannot_read(self) -> None:
        state = make(WARMUP_COSINE).state_dict()
        with pytest.raises(CheckpointError, match="version 2"):
            Schedules.from_state_dict({**state, "version": 2})
        with pytest.raises(CheckpointError, match="no 'base'"):
            Schedules.from_state_dict({k: v for k, v in state.items() if k != "base"})
        unknown = {**state, "curves": [{**state["curves"][0], "type": "LinearLRR"}]}
        with pytest.raises(ConfigError, match="did you mean 'LinearLR'"):
            Schedules.from_state_dict(unknown)


class TestErrors:
    @pytest.mark.parametrize(
        ("cfg", "words"),
        [
            (dict(type="CosineAnealingLR"), "did you mean 'CosineAnnealingLR'"),
            ([WARMUP_COSINE[0], "cosine"], r"param_scheduler\[1\]"),
            (dict(type="MultiStepLR"), "milestones"),
            (dict(type="CosineAnnealingLR", eta_min=0.0, eta_min_ratio=0.1), "one of the two"),
            (dict(type="LinearLR", begin=2, end=2), "an end after the begin"),
            (dict(type="LinearLR", by_epoch=False, convert_to_iter_based=True), "Allowed: by_epoch=True"),
            (dict(type="LinearLR", begin=0, end=0.1), "add convert_to_iter_based=True"),
            (dict(type="LinearLR", unit="token"), "give the end in tokens"),
            (dict(type="LinearLR", by_epoch=False, begin=400), "begin before the end of training"),
            (dict(type=dict, begin=0), "type is builtins.dict, which has no place"),
        ],
    )
    def test_bad_config(self, cfg, words: str) -> None:
        with pytest.raises(ConfigError, match=words) as error:
            make(cfg)
        assert "param_scheduler" in str(error.value)


@pytest.mark.parametrize("curve", read_json(NANOVLM / "lr.json"), ids=lambda c: f"{c['max_steps']} updates")
def test_every_value_of_nanovlm(curve: dict) -> None:
    """``WarmupCosineLR`` compared with numbers of public nanoVLM (see ``tests/golden/README.md``)."""
    geometry = Geometry(batch_size=3, accumulative_counts=4, dp_size=2)
    size, (first, last) = geometry.global_batch_size, curve["it"]
    base, sizes = (
        [{"name": "default", "lr": curve["max_lr"]}],
        {"per_epoch": 10 * size, "total": curve["max_steps"] * size},
    )
    schedules = make(dict(type="WarmupCosineLR"), geometry=geometry, base=base, **sizes)
    assert len(curve["values"]) == last - first + 1 > 10
    ours = [schedules.at(Progress(sequences=i * size))[0]["lr"] for i in range(first, last + 1)]
    assert ours == pytest.approx(curve["values"], rel=1e-12, abs=0.0)


def test_a_class_of_mmengine_means_the_curve_of_its_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="unigen_ds"):
        by_class = make(dict(type=MmengineCosine, by_epoch=False, end=50))
    assert by_class == make(dict(type="CosineAnnealingLR", by_epoch=False, end=50))
    assert len(caplog.records) == 1 and "CosineAnnealingLR" in caplog.text
