"""Settings of another trainer -> a config: ``python tools/migrate.py GUIDE -- --model_path ...``; installed as
``unigen-migrate``.

After ``--``: the command line of the old trainer, its launcher included, as words or in quotes; or settings,
``NAME=VALUE``; or one file: a script of one command and exported variables, a YAML file, a config of xtuner or
mmengine. Nothing of it is executed. A value of a Python config that only code could compute is ``...`` in the config
that is written, to be filled in; whatever mmengine's ``Config.dump`` writes is read.

The config is complete otherwise, and checked. Whatever has no counterpart is a comment with the reason, and their
number is printed at the end. docs/migrating/index.md explains every name.

Exit status: 0 written, 1 a file cannot be read, 2 wrong usage, or a value that no config may have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.choices import GUIDES
from unigen_ds.core.errors import ConfigError
from unigen_ds.system.pipes import ends_quietly


def parser() -> argparse.ArgumentParser:
    guides = "\n".join(f"  {name:<20}{meaning}" for name, meaning in GUIDES.items())
    p = argparse.ArgumentParser(
        prog="unigen-migrate", description=__doc__, epilog=f"guides:\n{guides}",
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    p.add_argument("guide", choices=GUIDES, metavar="GUIDE", help="the trainer that the settings are of: see below")
    p.add_argument("given", nargs="+", metavar="WORD", help="a file; or after --: a command line, or settings")
    p.add_argument("--out", type=Path, metavar="OUT.py", help="write the config there (default: print it)")
    p.add_argument("--force", action="store_true", help="replace a file that exists")
    return p


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    p = parser()
    arguments, unknown = p.parse_known_args(argv)
    if unknown:
        p.error(f"{' '.join(unknown)}: put -- before the old command line: unigen-migrate {arguments.guide} --"
                f" {' '.join([*arguments.given, *unknown])}")  # fmt: skip
    from unigen_ds.migration.guides import migrate  # after parsing: --help does not wait for torch
    from unigen_ds.runner.settings.tree import Settings

    try:
        out = arguments.out
        if out is not None and out.suffix != ".py":
            raise ConfigError(f"--out {out}", allowed="a name that ends with .py")
        if out is not None and out.exists() and not arguments.force:
            raise ConfigError(f"--out {out} exists", remedy="another name, or --force")
        name = str(out) if out is not None else "CONFIG.py"
        draft = migrate(arguments.guide, arguments.given, check=Settings.from_config)
        text = draft.text(start=draft.command.start(name))
        if out is None:
            print(text, end="")
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    where = f"Written: {out}. " if out is not None else ""
    print(
        f"{where}{len(draft.omissions)} settings could not be carried over; each is a comment at the top of the config."
        f" {len(draft.notes)} notes.",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
