"""Write a published directory: ``python tools/export.py MODEL OUT``; installed as ``unigen-export``.

MODEL is a checkpoint of any layout or a work dir (its newest checkpoint); OUT is a new folder. For a UnifiedModel it
contains llm_config.json, vit_config.json, ema.safetensors and, with the FLUX autoencoder, ae.safetensors, with BAGEL's
parameter names, and unigen_ds.json (the autoencoder, image sizes and timestep_shift of the training); for a VLM
config.json and model.safetensors with nanoVLM's parameter names; for a DecoderLM the files that transformers'
AutoModelForCausalLM and AutoTokenizer load; for every model the tokenizer. The folder from which the training was
started is not needed, except for adapters (lora): these alone are written, adapter_config.json and
adapter_model.safetensors, which peft loads; with --merge the model with its adapters, on a packed base in bf16. The
files of the base are found by the checkpoint's record of them, or in --base DIR; other files are refused.
With --source the configs (not of a DecoderLM) and all other files (the tokenizer) are copied
from that published directory, byte for byte. The average of the weights (EMA) is written if the checkpoint has one.

With --push-to-hub the complete OUT is then uploaded with the token of `hf auth login` or HF_TOKEN, to the server that
HF_ENDPOINT names (default: huggingface.co). If that fails, OUT is kept, and the message has the command to repeat it.

Exit status: 0 done, 1 the checkpoint cannot be loaded or the upload failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.config.hub import HubRepo
from unigen_ds.core.choices import DTYPE_NAMES
from unigen_ds.core.errors import ConfigError
from unigen_ds.system import log
from unigen_ds.system.pipes import add_source, ends_quietly, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-export", __doc__)
    p.add_argument("model", type=Path, metavar="MODEL")
    p.add_argument("out", type=Path, metavar="OUT")
    p.add_argument("--source", type=Path, metavar="DIR", help="the published directory that was the training's start")
    p.add_argument("--raw", action="store_true", help="the weights themselves instead of their average (EMA)")
    p.add_argument("--dtype", choices=DTYPE_NAMES, help="of the weights; default: fp32, merged on a packed base bf16")
    p.add_argument("--merge", action="store_true", help="of adapters: the model with its adapters, as one")
    p.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a DecoderLM's files; default: 5GB")
    add_source(p)
    p.add_argument("--push-to-hub", metavar="OWNER/NAME", help="upload OUT to this repository, created if needed")
    p.add_argument("--private", action="store_true", help="the repository of --push-to-hub must be a private one")
    p.add_argument("--revision", metavar="BRANCH", help="of --push-to-hub; created if needed; default: the main one")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    repo = None
    if arguments.push_to_hub is not None:
        repo = HubRepo(arguments.push_to_hub, private=arguments.private, revision=arguments.revision)
    elif arguments.private or arguments.revision is not None:
        flag = "--private" if arguments.private else "--revision"
        raise ConfigError(f"{flag} without --push-to-hub", remedy="add --push-to-hub OWNER/NAME, or leave it out")
    from unigen_ds.checkpoint.convert import DTYPES  # after parsing: --help does not wait for torch
    from unigen_ds.runner.open.trained import export_checkpoint, source_of

    log.setup(rank=0)
    export_checkpoint(
        arguments.model,
        arguments.out,
        raw=arguments.raw,
        **source_of(arguments),
        merge=arguments.merge,
        source=arguments.source,
        dtype=None if arguments.dtype is None else DTYPES[arguments.dtype],
        max_shard_size=arguments.max_shard_size,
    )
    print(arguments.out, flush=True)
    if repo is not None:
        print(repo.upload(arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
