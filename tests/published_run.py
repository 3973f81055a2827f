"""A fine-tune of the tiny published BAGEL directory on the digits, enlarged for its vision tower and autoencoder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.support.golden_files import BAGEL
from tests.tiny import tiny_config
from unigen_ds.data.text.tokenizers import WordTokenizer
from unigen_ds.families.bagel.model import UnifiedModel
from unigen_ds.families.bagel.published import FILES
from unigen_ds.runner.settings.tree import load_config


def write_bagel(folder: Path) -> Path:
    """The files of the model, with the digits' tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(BAGEL / name, folder / name)
    WordTokenizer(words=load_config("unified_digits").tokenizer["words"]).save_pretrained(str(folder))
    return folder


def config_on_bagel(work_dir: Path, digits: Path, source: Path, **overrides: Any) -> Any:
    """``source``: of ``write_bagel``; sizes, weights and the tokenizer are its own. ``overrides``: ``tiny_config``."""
    config = tiny_config(work_dir, digits, **overrides)
    sizes = UnifiedModel.processor_sizes({"pretrained": str(source)})
    config.model = {"type": "UnifiedModel", "pretrained": str(source)}
    config.tokenizer = {"type": "PretrainedTokenizer", "path": str(source)}
    latent = sizes["vae_spatial_downsample"] * sizes["latent_patch_size"]
    config.processor = {
        f"{part}_transform": {"type": "ImageTransform", "max_size": 2 * side, "min_size": side, "stride": side}
        for part, side in (("vit", sizes["vit_patch_size"]), ("vae", latent))
    }
    return config
