"""Write a published directory: ``python tools/export.py MODEL OUT``; installed as ``unigen-export``.

MODEL is a checkpoint of any layout or a work dir (its newest checkpoint); OUT is a new folder. For a UnifiedModel it
contains llm_config.json, vit_config.json, ema.safetensors and, with the FLUX autoencoder, ae.safetensors, with BAGEL's
parameter names, and unigen_ds.json (the autoencoder, image sizes and timestep_shift of the training); for a VLM
config.json and model.safetensors with nanoVLM's parameter names; for a DecoderLM the files that transformers'
AutoModelForCausalLM and AutoTokenizer load; for every model the tokenizer. The folder from which the training was
started is not needed. With --source the configs (not of a DecoderLM) and all other files (the tokenizer) are copied
from that published directory, byte for byte. The average of the weights (EMA) is written if the checkpoint has one.

Exit status: 0 done, 1 the checkpoint cannot be loaded, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core import log
from unigen_ds.core.choices import DTYPE_NAMES
from unigen_ds.core.errors import UnigenError


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="unigen-export", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("model", type=Path, metavar="MODEL")
    p.add_argument("out", type=Path, metavar="OUT")
    p.add_argument("--source", type=Path, metavar="DIR", help="the published directory that was the training's start")
    p.add_argument("--raw", action="store_true", help="the weights themselves instead of their average (EMA)")
    p.add_argument("--dtype", choices=DTYPE_NAMES, default="fp32")
    p.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a DecoderLM's files; default: 5GB")
    p.add_argument("--tag", help="name of the checkpoint's folder below MODEL")
    p.add_argument("--config", help="config of the training, if the checkpoint does not contain it")
    p.add_argument("--allow-custom-imports", action="store_true",
                   help="import (and so execute) the modules that the checkpoint's config names")  # fmt: skip
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    from unigen_ds.checkpoint.convert import DTYPES  # after parsing: --help does not wait for torch
    from unigen_ds.runner.publish import publish
    from unigen_ds.runner.settings import load_config
    from unigen_ds.runner.trained import open_model

    log.setup(rank=0)
    try:
        config = load_config(arguments.config) if arguments.config else None
        model, processor = open_model(
            arguments.model,
            raw=arguments.raw,
            tag=arguments.tag,
            config=config,
            allow_custom_imports=arguments.allow_custom_imports,
        )
        publish(
            model,
            processor,
            arguments.out,
            source=arguments.source,
            dtype=DTYPES[arguments.dtype],
            max_shard_size=arguments.max_shard_size,
        )
        print(arguments.out)
    except UnigenError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
