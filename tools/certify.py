"""Test kill and resume with your own config: ``python tools/certify.py CONFIG --kills 20``; installed as
``unigen-certify``.

Trains a few updates without a kill, in a folder of its own beside the work dir of the config; then trains them again,
while all processes get SIGKILL at random moments, half of them within a save, and are started again with --resume.
What the runs leave is compared: the lines of metrics.jsonl and ledger.jsonl, and of the last checkpoint every tensor,
generator and state, to the bit. The work dir of the config is not touched; trackers, uploads to a hub and evaluations
by AsyncEvaluateHook are left out.

Exit status: 0 bit-equal, 1 not bit-equal, no kill came after a save, or a start failed, 2 wrong usage or config.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.system.pipes import add_config, ends_quietly, positive, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-certify", __doc__)
    add_config(p, backend=True)
    p.add_argument("--kills", type=positive, default=20, metavar="N", help="how often the processes are killed (20)")
    p.add_argument("--updates", type=positive, default=12, metavar="N", help="updates of each run (12)")
    p.add_argument("--save-every", type=positive, default=3, metavar="N", help="updates between two saves (3)")
    p.add_argument("--nproc-per-node", type=positive, metavar="N",
                   help="processes, all on this machine (default: world_size of the config, else 1)")  # fmt: skip
    p.add_argument("--work-dir", type=Path, metavar="DIR",
                   help="folder in which that of the runs is made (default: beside the config's work dir)")  # fmt: skip
    p.add_argument("--keep", action="store_true",
                   help="keep that folder; it is kept anyway where the runs are not bit-equal")  # fmt: skip
    p.add_argument("--seed", type=int, default=0, help="of the moments of the kills (0)")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    from unigen_ds.checks.certificate import Launch, Trial, changes_of  # after parsing: --help does not wait for torch
    from unigen_ds.config.overrides import overrides_of
    from unigen_ds.config.paths import tool
    from unigen_ds.runner.settings.tree import load_settings
    from unigen_ds.system.files import delete_inside, make_directory

    settings = load_settings(
        arguments.config, overrides_of(argparse.Namespace(**{**vars(arguments), "work_dir": None}))
    )
    world_size = arguments.nproc_per_node or settings.world_size or 1
    changes, left_out = changes_of(settings, every=arguments.save_every)
    folders = []
    for text in filter(None, (settings.work_dir, settings.checkpoint_dir)):
        parent = arguments.work_dir or next(one for one in Path(text).parents if "{" not in str(one))
        make_directory(parent)
        folders.append(Path(tempfile.mkdtemp(prefix="certify-", dir=parent)).resolve())
    options = [f"{key}={value!r}" for key, value in {**changes, "world_size": world_size}.items()]
    backend = [f"--backend={arguments.backend}"] if arguments.backend else []
    command = [sys.executable, *tool("train"), arguments.config, "--max-updates", str(arguments.updates), *backend,
               "--cfg-options", *arguments.cfg_options, *options]  # fmt: skip
    environment = {**os.environ, "WANDB_MODE": "disabled"}
    launch = Launch(command, world_size, checkpoints=folders[-1] if folders[1:] else None, environment=environment)
    rng, say = random.Random(arguments.seed), partial(print, flush=True)
    trial = Trial(launch, folders[0], arguments.save_every, rng, keep=arguments.keep, say=say)
    print(f"{arguments.config} under {settings.backend.name} on {world_size} process(es), in {folders[0]}", flush=True)
    try:
        trial.train_undisturbed()
        trial.kill(arguments.kills)
        result = trial.result()
    finally:
        if not (arguments.keep or trial.problems):
            for folder in folders:
                delete_inside(folder, folder.parent)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**result, "left_out": left_out}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(result, left_out)))
    if trial.problems:
        print(f"The runs are kept in {', '.join(map(str, folders))}; *.log there is what they printed.")
    return int(not (result["bit_equal"] and result["resumed"]))


def lines(result: dict[str, Any], left_out: list[str]) -> list[str]:
    """The table."""
    import torch

    moments = ", ".join(f"{number} {name}" for name, number in sorted(result["moments"].items()))
    save, update, every = (result[key] for key in ("seconds_of_save", "seconds_of_update", "updates_between_saves"))
    resume, updates, lost_s = (result[key] for key in ("resume_seconds", "lost_updates", "lost_seconds"))
    equal = "bit-equal" if result["resumed"] else "NOT tested: no kill came after a save. Remedy: more --updates"
    rows = {
        "result": equal if result["bit_equal"] else f"NOT bit-equal: {len(result['differences'])} differences",
        "kills": f"{result['kills']} ({moments}), {result['resumed']} of them with a checkpoint to resume from, in"
        f" {result['runs']} run(s) of {result['updates']} updates",
        "saves": f"{save:.3g} s each: {result['share_of_saves']:.1%} of the time with {every} updates of {update:.3g} s"
        f" between them, {save / max(save + 1000 * update, 1e-9):.2%} with 1,000",
        "resume": "none"
        if not resume
        else f"{resume['median']:.3g} s from the start of the processes to the first new"
        f" update (median; at most {resume['max']:.3g}; the first start: {result['first_start_seconds']:.3g})",
        "lost work": "none"
        if not updates
        else f"{updates['mean']:.2g} updates, {lost_s['mean']:.2g} s a kill (mean; at most"
        f" {updates['max']:.0f} updates, {lost_s['max']:.2g} s)",
    }
    text = [f"{name:<10} {value}" for name, value in rows.items()]
    text += [f"  {problem}" for problem in result["differences"][:20]]
    if result["deterministic"] is False:
        text.append("Two runs without any kill are not bit-equal, either: the kernels of this machine are not"
                    " deterministic, also without a kill. Remedy: env.deterministic=True")  # fmt: skip
    elif result["deterministic"]:
        text.append("Two runs without any kill are bit-equal: the difference comes from a kill or a resume.")
    no_device = "" if torch.cuda.is_available() else "a GPU (this machine has none); "
    text.append(f"Not tested: {no_device}a loss of power (what the kernel has not written yet); a kill of one process"
                f" or node alone; several nodes; updates after {result['updates']}; what hooks of your own write"
                " elsewhere" + (f"; left out: {', '.join(left_out)}" if left_out else "") + ".")  # fmt: skip
    return text


if __name__ == "__main__":
    sys.exit(main())
