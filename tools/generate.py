"""Generate images and texts: ``python tools/generate.py MODEL --prompt TEXT``; installed as ``unigen-generate``.

MODEL is a checkpoint of any layout, a work dir (its newest checkpoint), or a published directory. The average of the
weights (EMA) is used if there is one. Without --prompt and --prompts, prompts are read from the standard input;
--understand needs no prompt. VLM, CausalLM and ImageTextToText answer in text, with or without --understand; a
DecoderLM continues the prompt.

The folder of --out receives 00000.png, 00001.png, ... and results.jsonl with one line per answer; existing files are
kept, and new numbers follow the highest existing one. Answer i of a call uses the seed --seed + i. With --grid a
contact sheet of all answers of the call is written, too: grid-00000.png, with the number of the first one.

Exit status: 0 done, 1 the model cannot be loaded, or a line of a file is no prompt, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    import _path  # noqa: F401 - a script runs from a checkout without installation

from unigen_ds.core.choices import DTYPE_NAMES
from unigen_ds.core.errors import ConfigError, UnigenError
from unigen_ds.families.bagel.flow_settings import BAGEL_FLOW, RENORMS, FlowSettings
from unigen_ds.inference.prompts import Prompt, Sampling, read_prompts
from unigen_ds.system import log
from unigen_ds.system.files import write_atomic
from unigen_ds.system.pipes import add_source, ends_quietly, tool_parser

if TYPE_CHECKING:
    from unigen_ds.inference.generated import Generated

RESULTS = "results.jsonl"


def parser() -> argparse.ArgumentParser:
    p = tool_parser("unigen-generate", __doc__)
    p.add_argument("model", type=Path, metavar="MODEL")
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; can be repeated")
    source.add_argument("--prompts", type=Path, action="append", metavar="FILE",
                        help='one prompt per line; .jsonl: {"prompt": ..., "images": [...]},\n'
                        'or texts and images in their order: {"parts": ["text", {"image": FILE}, ...], "prompt": ...}; '
                        "can be repeated")  # fmt: skip
    p.add_argument("--image", action="append", default=[], metavar="FILE", help="before the prompt; can be repeated")
    p.add_argument("--out", type=Path, default=Path("generated"), metavar="DIR", help="default: generated")
    p.add_argument("--understand", action="store_true", help="answer in text, generate no image")
    p.add_argument("--think", action="store_true", help="generate a reasoning text first")
    p.add_argument("--size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="size of the image, in pixels")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--max-length", "--max-new-tokens", type=int, default=1000, metavar="N",
                   help="maximum tokens of a text; default: 1000")  # fmt: skip
    p.add_argument("--temperature", type=float, default=0.0, help="of texts; default: 0 (the most likely token)")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P",
                   help="of texts: only the most likely tokens are drawn, which have this probability together;\n"
                   "default: 1 (all)")  # fmt: skip
    p.add_argument("--samples", type=int, default=1, metavar="N", help="answers to each prompt; default: 1")
    p.add_argument("--batch-size", type=int, default=16, metavar="N",
                   help="answers computed together, fewer where memory is not enough; default: 16")  # fmt: skip
    p.add_argument("--grid", action="store_true", help="write a contact sheet of all answers, too")
    p.add_argument("--columns", type=int, metavar="N", help="of the contact sheet; default: about as many as rows")
    add_flow(p)
    p.add_argument("--raw", action="store_true", help="the weights themselves instead of their average (EMA)")
    add_source(p)
    p.add_argument("--device", help="default: cuda if available, otherwise cpu")
    p.add_argument("--dtype", choices=DTYPE_NAMES, help="default: bf16 on a GPU, fp32 on a CPU")
    return p


def add_flow(p: argparse.ArgumentParser) -> None:
    """Settings of drawing: any of the model's family; those of ``FlowSettings`` also under BAGEL's names."""
    flow, absent = BAGEL_FLOW, argparse.SUPPRESS
    p.add_argument("--flow", nargs="+", default=[], metavar="K=V",
                   help="settings of drawing, of the model's family; of a UnifiedModel also:")  # fmt: skip
    p.add_argument("--num-timesteps", type=int, dest="flow.num_timesteps", default=absent, metavar="N",
                   help=f"number of time steps from noise to image; default: {flow.num_timesteps}")  # fmt: skip
    p.add_argument("--timestep-shift", type=float, dest="flow.timestep_shift", default=absent, metavar="S",
                   help="above 1: more steps near the noise; default: that of the training, or for a published\n"
                   f"directory that of the public model (BAGEL: {flow.timestep_shift})")  # fmt: skip
    p.add_argument("--cfg-text-scale", type=float, dest="flow.text_scale", default=absent, metavar="S",
                   help=f"guidance scale of the text; 1: no guidance; default: {flow.text_scale}")  # fmt: skip
    p.add_argument("--cfg-img-scale", type=float, dest="flow.image_scale", default=absent, metavar="S",
                   help=f"guidance scale of the given images; 1: no guidance; default: {flow.image_scale}")  # fmt: skip
    p.add_argument("--cfg-interval", type=float, nargs=2, dest="flow.interval", default=absent, metavar=("LOW", "HIGH"),
                   help=f"time steps with guidance; default: {flow.interval[0]} {flow.interval[1]}")  # fmt: skip
    p.add_argument("--cfg-renorm-type", choices=RENORMS, dest="flow.renorm", default=absent,
                   help=f"how the norm of a guided velocity is limited; default: {flow.renorm}")  # fmt: skip
    p.add_argument("--cfg-renorm-min", type=float, dest="flow.renorm_min", default=absent, metavar="S",
                   help=f"smallest factor of that limit; default: {flow.renorm_min}")  # fmt: skip


def check(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for numbers that cannot work, before the model is loaded."""
    Sampling(arguments.temperature, arguments.top_p)
    for name in ("max_length", "samples", "columns", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}", allowed="at least 1")
    if arguments.columns is not None and not arguments.grid:
        raise ConfigError(f"--columns {arguments.columns} without --grid, which it belongs to", remedy="--grid")
    if arguments.understand and arguments.size is not None:
        raise ConfigError("--size with --understand, which draws nothing", remedy="leave out one of the two")


def requests(arguments: argparse.Namespace) -> Iterable[Prompt]:
    """The prompts of the command line or of files, all read before the model is; those of a terminal one by one.

    Raises ``ConfigError`` for files without a prompt, and for an image that does not exist.
    """
    images = tuple(arguments.image)
    if arguments.prompt is not None:
        result = [Prompt(prompt, images) for prompt in arguments.prompt]
    elif arguments.prompts is not None:
        prompts = [prompt for path in arguments.prompts for prompt in read_prompts(path, where="--prompts")]
        result = [replace(prompt, images=(*images, *prompt.images)) for prompt in prompts]
    else:
        return _read_prompts(arguments, images)
    if not result:
        raise ConfigError(f"there is no prompt in {', '.join(map(str, arguments.prompts))}", remedy="one on each line")
    missing = list(dict.fromkeys(path for one in result for path in map(str, one.paths) if not Path(path).is_file()))
    if missing:
        more = f", and {len(missing) - 1:,} more that do not exist" if len(missing) > 1 else ""
        raise ConfigError(f"there is no image {missing[0]}{more}", remedy="the path of a file that exists")
    return result


def _read_prompts(arguments: argparse.Namespace, images: tuple[str, ...]) -> Iterator[Prompt]:
    """Lines of the standard input without empty ones; ``--understand`` needs none, and asks no terminal."""
    terminal, number = sys.stdin is not None and sys.stdin.isatty(), 0
    while sys.stdin is not None and not (terminal and arguments.understand):
        try:
            prompt = input("prompt> " if terminal else "").strip()
        except EOFError:
            break
        if prompt:
            number += 1
            yield Prompt(prompt, images)
    if not number and not arguments.understand:
        raise ConfigError("there is no prompt", remedy="--prompt TEXT, --prompts FILE, or one per line on stdin")
    if not number:
        yield Prompt("", images)


class Output:
    """The folder to which images and ``results.jsonl`` are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = [path.stem for path in folder.glob("*.png")]
            lines = (folder / RESULTS).read_text(encoding="utf-8").splitlines() if (folder / RESULTS).exists() else []
        except OSError as error:
            raise ConfigError(f"--out {folder} cannot be used: {error}") from error
        self.next = max([len(lines), *(int(name) + 1 for name in names if name.isdigit())])

    def add(self, request: Prompt, result: Generated, *, seed: int) -> dict[str, Any]:
        """Write the images, then their line."""
        row: dict[str, Any] = {"prompt": request.prompt, "images": list(request.images), "seed": seed}
        row |= {"given": list(request.parts)} if request.parts else {}
        row |= {"text": result.text, "file": None}
        names = [f"{self.next:05d}{f'-{k}' if k else ''}.png" for k in range(len(result.images))]
        for name, image in zip(names, result.images, strict=True):
            write_atomic(self.folder / name, lambda path, image=image: image.save(path, format="PNG"))  # type: ignore[misc]
        if names:
            row["file"] = names[0]
        with (self.folder / RESULTS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.next += 1
        return row


def generate(arguments: argparse.Namespace) -> None:
    check(arguments)
    import torch  # after parsing: --help and a wrong argument do not wait for torch

    from unigen_ds.checkpoint.convert import DTYPES
    from unigen_ds.config.overrides import parse_override
    from unigen_ds.evaluation.sheet import Cell, contact_sheet
    from unigen_ds.runner.open.answers import answer_all, drawing_of
    from unigen_ds.runner.open.trained import check_device, open_inferencer, source_of

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    flow = {key.removeprefix("flow."): value for key, value in vars(arguments).items() if key.startswith("flow.")}
    FlowSettings(**flow)  # refused before the model is read
    flow |= dict(map(parse_override, arguments.flow))
    prompts, output = requests(arguments), Output(arguments.out)
    dtype = arguments.dtype or ("fp32" if device == "cpu" else "bf16")
    source = source_of(arguments)
    inferencer = open_inferencer(arguments.model, raw=arguments.raw, **source, device=device, dtype=DTYPES[dtype])
    sheet: list[Cell] = []
    first = output.next
    several = arguments.samples > 1 or (isinstance(prompts, list) and len(prompts) > 1)
    drawing = drawing_of(inferencer, flow, understand=arguments.understand)
    numbers_and_prompts = enumerate((each for each in prompts for _ in range(arguments.samples)), start=arguments.seed)
    options = {name: getattr(arguments, name) for name in ("understand", "think", "size", "max_length", "temperature")}
    options |= {"top_p": arguments.top_p, "flow": drawing}
    at_once = arguments.batch_size if isinstance(prompts, list) else 1
    while group := list(islice(numbers_and_prompts, at_once)):
        for (seed, request), result in zip(group, answer_all(inferencer, group, **options), strict=True):
            with writes(arguments.out):
                row = output.add(request, result, seed=seed)
            if arguments.grid:
                images = [inferencer.processor.read_image(path) for path in request.paths]
                text = "\n".join(line for line in (request.text, result.text and f"> {result.text}") if line)
                sheet.append(Cell([*images, *result.images], text))
            path = row["file"] and str(arguments.out / row["file"])
            prompt = request.text if several and result.text else ""
            print("  ".join(part for part in (path, prompt and f"{prompt} >", row["text"]) if part), flush=True)
    if arguments.grid:
        with writes(arguments.out):
            grid = contact_sheet(sheet, columns=arguments.columns)
            write_atomic(path := arguments.out / f"grid-{first:05d}.png", lambda path: grid.save(path, format="PNG"))
            print(path)


@contextmanager
def writes(folder: Path) -> Iterator[None]:
    """Inside, a file that cannot be written is an error that names ``--out``."""
    try:
        yield
    except OSError as error:
        raise UnigenError(
            f"--out {folder} cannot be written: {error}", remedy="free disk space, or choose another --out"
        ) from error


@ends_quietly
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    log.setup(rank=0)
    try:
        generate(arguments)
    except (MemoryError, RuntimeError) as error:
        from unigen_ds.backends.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        remedy = "a smaller --size or --max-length, --dtype bf16, or another --device"
        raise UnigenError(f"memory is not enough: {str(error).splitlines()[0]}", remedy=remedy) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
