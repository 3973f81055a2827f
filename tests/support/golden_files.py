"""The golden files (``tests/golden/README.md``): their location and the tolerances.

``UNIGEN_GOLDEN`` names another directory of the same schema: every size, id and setting is read from its files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

GOLDEN = Path(os.environ.get("UNIGEN_GOLDEN") or Path(__file__).parents[1] / "golden")
BAGEL, NANOVLM = GOLDEN / "bagel", GOLDEN / "nanovlm"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


BAGEL_META: dict[str, Any] = read_json(BAGEL / "golden.json")
BAGEL_VAE: dict[str, float] = {key: BAGEL_META["vae_params"][key] for key in ("scale_factor", "shift_factor")}
"""Settings of the autoencoder that a published directory does not contain: ``model.vae`` next to ``pretrained``."""
_TOLERANCES = read_json(GOLDEN / "tolerance.json")


def atol(quantity: str) -> float:
    """The absolute tolerance of a quantity, such as ``bagel/vae.mean``."""
    return float(_TOLERANCES[quantity]["suggested_atol"])
