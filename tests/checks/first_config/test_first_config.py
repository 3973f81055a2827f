"""What a first config decides, where no machine of this kind is needed; and that recipes say how they differ."""

from __future__ import annotations

import re

import pytest

from unigen_ds.config.file import shipped_configs


@pytest.mark.parametrize("name", shipped_configs())
def test_a_recipe_states_how_it_differs_from_what_init_writes(name: str) -> None:
    lines = shipped_configs()[name].read_text(encoding="utf-8").splitlines()
    comments = []
    for line in lines:
        if not line.startswith("#"):
            break
        comments.append(line.removeprefix("# "))
    assert re.fullmatch(r"init\.py would write .+: differs because .+\.", " ".join(comments))
