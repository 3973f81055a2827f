"""Write a first config for a model and data: ``python tools/init.py --model DIR_OR_NAME --data FILE_OR_FOLDER``;
installed as ``unigen-init``.

It looks at the model, the records and this machine, writes a config of at most 30 lines, prints what it decided and
why, makes its dry run, and ends with the command that starts the training. docs/first_config.md has an example.

Exit status: 0 written, and the dry run has no problem, 1 it has one, or the data or the model cannot be read, 2 wrong
usage: something must be stated, or the model and the data do not fit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.choices import TASKS
from unigen_ds.core.errors import ConfigError
from unigen_ds.system.pipes import ends_quietly, tool_parser


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-init", __doc__)
    p.add_argument("--model", required=True, metavar="DIR_OR_NAME",
                   help="a directory, a name of the hub, a checkpoint, or for a new model a recipe")  # fmt: skip
    p.add_argument("--data", required=True, metavar="FILE_OR_FOLDER",
                   help="records: a file, a folder, a pattern, or a name of data_registry.json beside it")  # fmt: skip
    p.add_argument("--task", choices=TASKS, help="what is learned; needed where the records do not decide it")
    p.add_argument("--lora", action="store_true", help="train adapters alone")
    p.add_argument("--out", type=Path, default=Path("my.py"), metavar="OUT.py", help="the config (default my.py)")
    p.add_argument("--force", action="store_true", help="replace a file that exists")
    p.add_argument("--epochs", type=float, metavar="N", help="passes over the data")
    p.add_argument("--lr", type=float, metavar="RATE", help="the highest learning rate")
    p.add_argument("--work-dir", metavar="DIR", help="output folder of the run (default work_dirs/<config name>)")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    out: Path = arguments.out
    if out.suffix != ".py":
        raise ConfigError(f"--out {out}", allowed="a name that ends with .py")
    if out.exists() and not arguments.force:
        raise ConfigError(f"--out {out} exists", remedy="another name, or --force")
    for name in ("epochs", "lr"):
        if (value := getattr(arguments, name)) is not None and not value > 0:
            raise ConfigError(f"--{name} {value:g}", allowed="a number above 0")
    from unigen_ds.checks.dry_run.dry_run import dry_run, lines  # after parsing: --help does not wait for torch
    from unigen_ds.checks.dry_run.known import Options
    from unigen_ds.checks.first_config.first_config import first_config
    from unigen_ds.system import log

    log.setup(rank=0, level="WARNING")
    names = ("task", "lora", "epochs", "lr")
    config = first_config(arguments.model, arguments.data, **{name: getattr(arguments, name) for name in names})
    if arguments.work_dir:
        config.values["work_dir"] = arguments.work_dir
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(config.text(str(out)), encoding="utf-8")
    print(f"\nWritten: {out}\n", flush=True)
    number = max(100 // config.values["train_dataloader"]["batch_size"], 1)  # micro-batches, of about 100 sequences
    results = dry_run(Options(str(out), world_size=config.world_size, num_batches=number))
    problems = any(result.status == "problem" for result in results)
    print("\n".join(lines(results, title=f"Dry run of {out}")))
    print(f"\n{'When the problems are solved' if problems else 'Start'}: {config.command(str(out))}")
    return int(problems)


if __name__ == "__main__":
    sys.exit(main())
