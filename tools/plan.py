"""Plan the memory of a run before it starts: ``python tools/plan.py CONFIG --world-size 64``; installed as
``unigen-plan``.

The real model and every engine run on tensors without memory, so neither a GPU nor several processes are needed, and
the largest micro-batch of the config's own data is what they compute. Each line is one engine, each column a part of
the run: the highest sum of bytes on a process. What the trace cannot see is the reserve, which is added to each device
and each process. docs/planning.md has what is exact and what is not.

Exit status: 0 the engine of the config fits, or no memory was given, 1 it does not fit, or it cannot be planned, 2
wrong usage or config.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from unittest import mock

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.system.pipes import add_config, ends_quietly, positive, share, size, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-plan", __doc__)
    add_config(p, backend=True)
    p.add_argument("--world-size", type=positive, metavar="N",
                   help="processes, one for each device (default: world_size of the config, else 1)")  # fmt: skip
    p.add_argument("--per-node", type=positive, metavar="N", help="processes of a node (default: 8, or all if fewer)")
    p.add_argument("--only", action="store_true", help="plan the engine of the config alone, not the others")
    p.add_argument("--device-memory", type=size, metavar="SIZE", help="of a device: 80GiB")
    p.add_argument("--host-memory", type=size, metavar="SIZE", help="of a node: 512GiB")
    p.add_argument("--device-reserve", type=size, default=size("2GiB"), metavar="SIZE",
                   help="of a device, for what is not traced: CUDA's context, NCCL, cuBLAS (default 2GiB)")  # fmt: skip
    p.add_argument("--fragmentation", type=share, default=0.05, metavar="SHARE",
                   help="of what is traced, for gaps between blocks of the allocator (default 5%%)")  # fmt: skip
    p.add_argument("--host-reserve", type=size, default=size("4GiB"), metavar="SIZE",
                   help="of a process, for Python, libraries and the workers of its loader (default 4GiB)")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu"):  # nothing is computed on a device
        return _plan(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from unigen_ds.checks.memory.planned import Reserve, plan_memory, report_lines, report_values
    from unigen_ds.checks.resume import as_launched
    from unigen_ds.config.overrides import overrides_of, stated_world_size
    from unigen_ds.runner.settings.tree import Settings, read_config
    from unigen_ds.system import log  # after parsing: --help does not wait for torch

    log.setup(rank=0)
    config = read_config(arguments.config, overrides_of(arguments))
    world_size = arguments.world_size or stated_world_size(config.values)
    per_node = arguments.per_node or min(8, world_size)
    with as_launched(world_size, per_node=per_node):
        settings = Settings.from_config(config)
    report = plan_memory(settings, world_size=world_size, per_node=per_node, alternatives=not arguments.only)
    names = ("device_reserve", "fragmentation", "host_reserve", "device_memory", "host_memory")
    values = report_values(report, Reserve(*(getattr(arguments, name) for name in names)))
    print(json.dumps(values, indent=1) if arguments.json else "\n".join(report_lines(values)))
    engine = values["engines"][0]
    return 0 if engine["problem"] is None and engine["fits"] is not False else 1


if __name__ == "__main__":
    sys.exit(main())
