"""Merge a checkpoint into plain weight files: ``python tools/zero_to_fp32.py CKPT OUT``; ``unigen-zero-to-fp32``.

The command line, the defaults and the files are those of DeepSpeed's script of this name. In addition it accepts
ZeRO-1, 2 and 3, FSDP and single checkpoints of this project, of plain DeepSpeed, mmengine or xtuner, and the options
--ema and --dtype.

CKPT is a checkpoint; or a work dir or a folder of DeepSpeed, of which the newest checkpoint (or the one of -t) is used.
OUT receives pytorch_model.bin or model.safetensors; above --max-shard-size several files and an index. Then:

    model.load_state_dict(torch.load("OUT/pytorch_model.bin"))

Memory does not grow with the model. Exit status: 0 done, 1 the checkpoint or the disk fails, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.choices import DTYPE_NAMES
from unigen_ds.core.errors import UnigenError
from unigen_ds.system.pipes import ends_quietly, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-zero-to-fp32", __doc__)
    p.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint, or a folder of checkpoints")
    p.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    p.add_argument("-t", "--tag", help="name of the checkpoint below CKPT; default: the one that `latest` names")
    p.add_argument("--ema", action="store_true", help="the average of the weights instead of the weights")
    p.add_argument("--dtype", default="fp32", choices=DTYPE_NAMES, help="of floating-point tensors; default: fp32")
    p.add_argument("--max-shard-size", "--max_shard_size", default="5GB", metavar="SIZE", help="default: 5GB")
    p.add_argument(
        "--safe-serialization", "--safe_serialization", action="store_true", help="safetensors, not torch.save"
    )
    p.add_argument(
        "--exclude-frozen-parameters", "--exclude_frozen_parameters", action="store_true", help="do not write them"
    )
    p.add_argument("--config", help="a config whose custom_imports register the format or the layout of CKPT")

    p.add_argument("-d", "--debug", action="store_true", help="show the traceback of an error")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    begin = time.perf_counter()
    from unigen_ds.checkpoint.convert import DTYPES, merge  # after parsing: --help does not wait for torch

    try:
        if arguments.config:
            from unigen_ds.runner.settings.custom_imports import import_custom
            from unigen_ds.runner.settings.tree import load_config

            import_custom(load_config(arguments.config))
        result = merge(
            arguments.checkpoint,
            arguments.out,
            tag=arguments.tag,
            ema=arguments.ema,
            dtype=DTYPES[arguments.dtype],
            max_shard_size=arguments.max_shard_size,
            safe_serialization=arguments.safe_serialization,
            exclude_frozen=arguments.exclude_frozen_parameters,
        )
    except UnigenError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(
        f"{result.num_tensors} tensors, {result.numel:,} elements, {result.nbytes / 2**20:,.1f} MiB"
        f" in {time.perf_counter() - begin:.1f} s"
    )
    for file in result.files:
        print(arguments.out / file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
