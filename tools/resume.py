"""Check a resume without starting it: ``python tools/resume.py CONFIG``; installed as ``unigen-resume``.

Makes the checks of the checklist (checkpoint, model, effective batch, learning rate, data, engine, disk, ...) and lists
every split of the batch (batch size x accumulation x processes) that keeps the effective batch size.
Needs no GPU and joins no process group; nothing is changed.
Exit status: 0 nothing blocks, 1 there is nothing to resume from, 2 wrong usage or config, 3 the resume is blocked.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.system.pipes import add_config, ends_quietly, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-resume", __doc__)
    add_config(p, backend=True, resume=True)
    p.add_argument("--checkpoint", metavar="CKPT", help="default: the newest of the work dir")
    p.add_argument("--world-size", type=int, metavar="N", help="processes of the resumed run; default: as saved")
    p.add_argument("--verify", action="store_true", help="also read and hash every byte of the checkpoint")
    p.add_argument("--json", action="store_true", help="print everything as JSON")
    p.add_argument("--run", action="store_true", help="start the training if nothing blocks")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    from unigen_ds.checks.resume import inspect_resume, train_command  # after parsing: see train.py
    from unigen_ds.config.overrides import overrides_of
    from unigen_ds.resume import finding
    from unigen_ds.runner.settings.tree import load_settings

    overrides = overrides_of(arguments, checkpoint=arguments.checkpoint)
    settings = load_settings(arguments.config, overrides)
    inspection = inspect_resume(settings, world_size=arguments.world_size, verify=arguments.verify)
    if arguments.json:
        print(json.dumps(inspection.state_dict(), indent=1))
    else:
        print("\n".join(finding.finding_lines(inspection.findings)))
        print("\n".join(finding.plans(inspection.geometries, inspection.memory)))
    if inspection.blocked:
        print("The resume is blocked: see above.", file=sys.stderr)
        return 3
    if not arguments.run:
        return 0
    words = [arguments.config, "--resume", str(inspection.plan.checkpoint)]
    for flag in ("work_dir", "checkpoint_dir", "backend", "on_batch_change", "on_data_change"):
        if getattr(arguments, flag) is not None:
            words += ["--" + flag.replace("_", "-"), getattr(arguments, flag)]
    if arguments.cfg_options:
        words += ["--cfg-options", *arguments.cfg_options]
    command = train_command(words, world_size=inspection.geometry.dp_size)
    print(shlex.join(command), file=sys.stderr, flush=True)
    os.execv(command[0], command)  # replaces this process by the training


if __name__ == "__main__":
    sys.exit(main())
