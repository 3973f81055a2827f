"""Look at an update of a run again: ``python tools/replay.py WORK_DIR --update N``; installed as ``unigen-replay``.

Builds the sequences of the update as they were trained, compares them with the ledger, and computes the loss and the
gradient norm of each sample, one by one, with the weights of the nearest checkpoint at or before the update.
``--html OUT.html`` shows texts and pictures beside them. ``--sequences A:B``: of data that was left out, or trained by
an update that a resume made void.

Exit status: 0 done, 1 the data is not what was trained on, or a checkpoint cannot be read, 2 wrong usage or config.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.system.pipes import ends_quietly, positive, sequence_range, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-replay", __doc__)
    p.add_argument("work_dir", type=Path, metavar="WORK_DIR", help="the output folder of a run")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--update", type=positive, metavar="N", help="an update that the ledger has")
    what.add_argument("--sequences", type=sequence_range, metavar="A:B", help="sequences A .. B-1 of the run instead")
    p.add_argument("--checkpoint", type=Path, metavar="CKPT", help="the weights (default: the nearest one before)")
    p.add_argument("--device", default="cpu", help="where losses are computed (default cpu)")
    p.add_argument("--html", type=Path, metavar="OUT", help="write the page")
    p.add_argument("--allow-custom-imports", action="store_true",
                   help="import (and so execute) the modules that the checkpoint's config names")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print one JSON object")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    from unigen_ds.runner.open.replayed import replay  # after parsing: --help does not wait for torch
    from unigen_ds.runner.open.trained import check_device

    check_device(arguments.device)
    allow = {"allow_custom_imports": arguments.allow_custom_imports}
    update = replay(arguments.work_dir, update=arguments.update, sequences=arguments.sequences or (0, 0), **allow)
    if (checkpoint := arguments.checkpoint or update.checkpoint) is None:
        print("No checkpoint is from before these sequences: no losses are computed.", file=sys.stderr)
        samples = update.samples()
    else:
        samples = update.losses(checkpoint, device=arguments.device, **allow)
    report = {**update.facts, "checkpoint": None if checkpoint is None else str(checkpoint), "samples": samples}
    if arguments.html:
        report["html"] = str(update.write_page(arguments.html, samples))
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(f"{update.title}: {len(update.batches)} sequences, digest {report['digest']}"
          + ", as the ledger has it" * (arguments.update is not None))  # fmt: skip
    for first, stop, why in report["left_out"]:
        print(f"  between them sequences {first}:{stop} were left out: {why}")
    if checkpoint is not None:
        print(f"Losses of each sample alone with the weights of {checkpoint}, in fp32 without dropout:")
    for one in sorted(samples, key=lambda one: -(one["loss"] or 0.0)):
        numbers = "" if checkpoint is None else "no target  "
        if one["loss"] is not None:
            numbers = f"loss {one['loss']:.4g}  grad_norm {one['grad_norm']:.4g}  "
        print(f"  {numbers}sequence {one['sequence']}  {one['sample']}")
    print(report.get("html", "--html OUT.html shows the texts and pictures."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
