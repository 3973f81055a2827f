"""Writes the tables of keys and arguments in ``docs/configs`` from the code: ``make docs``.

A table is between ``<!-- keys: PREFIX ... -->`` (of settings), ``<!-- arguments: NAME -->`` (of a component),
``<!-- section: NAME.ARGUMENT -->`` (of an argument that has keys of its own), ``<!-- loss_weights: families -->``,
``<!-- recipes: decoder_lm -->`` and ``<!-- end -->``; everything else of a page is
written by hand. The meaning of a component's argument is in the section ``Args:`` of its class's docstring, its limits
in its annotation. Links of a docstring are relative to ``docs``.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - a script runs from a checkout
from annotated_types import Ge, Gt, Le, Lt  # noqa: E402
from mmengine.registry import Registry  # noqa: E402

import unigen_ds.examples.digits  # noqa: E402
import unigen_ds.examples.emoji  # noqa: E402
import unigen_ds.runner.start.build  # noqa: E402, F401 - registers everything else
from unigen_ds.config import registry  # noqa: E402
from unigen_ds.config.section import Section, section_of  # noqa: E402
from unigen_ds.config.values import Choices, argument_hints, describe_hint, nested_section  # noqa: E402
from unigen_ds.core.batch import DEFAULT_WEIGHT  # noqa: E402
from unigen_ds.data.sources.base import RecordSource  # noqa: E402
from unigen_ds.families.base import families  # noqa: E402
from unigen_ds.runner.settings.tree import PROCESSOR_KEYS, ModelSettings, Settings, family_of, load_config  # noqa: E402
from unigen_ds.schedule.curves import Curve  # noqa: E402

LIMITS = (Ge, Gt, Le, Lt)
PAGES = ROOT / "docs" / "configs"
PROVIDED = {"processor", "writers"}
"""Arguments that a run passes; a config cannot set them."""
_TABLE = re.compile(r"(<!-- (keys|arguments|section|loss_weights|recipes): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_LINK = re.compile(r"\]\(([\w/]+\.md)(#[\w-]+)?\)")
_ARGUMENT = re.compile(r"^    (\w+): ?(.*(?:\n     .*)*)", re.MULTILINE)


def rows(section: type[Section], prefix: str) -> Iterator[str]:
    """A row for each key of a section, those of the sections below it included."""
    for name, info in section.model_fields.items():
        inner = section_of(info)
        default = "required" if info.is_required() else f"`{info.get_default(call_default_factory=True)!r}`"
        default = "section" if inner is not None and not info.is_required() else default
        yield f"| `{prefix}.{name}` | {default} | {meaning(section, name)} |"
        if inner is not None and inner.model_config.get("extra") == "forbid":
            yield from rows(inner, f"{prefix}.{name}")


def meaning(section: type[Section], name: str) -> str:
    """What a field is, and the limits of a number."""
    info = section.model_fields[name]
    limited = any(isinstance(one, LIMITS) for one in info.metadata)
    limits = f" ({describe_hint(info.annotation, info.metadata)})" if limited else ""
    return field_texts(section).get(name, "").replace("|", "\\|") + limits


@cache
def field_texts(section: type[Section]) -> dict[str, str]:
    """Field -> its description, or else the text below it in the source, of this section or of one that it extends. As
    in a cell: ``Tokens at most.`` is ``tokens at most``.
    """
    found: dict[str, str] = {}
    for base in reversed([one for one in section.__mro__ if issubclass(one, Section)]):
        found |= {name: info.description for name, info in base.model_fields.items() if info.description}
        body: Any = ast.parse(inspect.getsource(base)).body[0]
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                words = " ".join(str(text.value.value).split()).removesuffix(".")
                found[field.target.id] = (
                    words[:1].lower() + words[1:] if words[1:2].islower() and words[:4] != "True" else words
                )
    return found


def table(keys: str) -> str:
    """Of sections or single keys at the top of a config, by name."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key in keys.split():
        info = Settings.model_fields[key]
        section = section_of(info)
        if section is not None and key in ("load_cfg", "custom_imports"):
            lines.append(f"| `{key}` | section | {meaning(Settings, key)} |")
        if section is not None:
            lines += rows(section, key)
        else:
            lines.append(f"| `{key}` | `{info.get_default(call_default_factory=True)!r}` | {meaning(Settings, key)} |")
    return "\n".join(lines) + "\n"


def section_table(name: str) -> str:
    """Of the keys of a component's argument: ``UnifiedModel.llm``."""
    kind, _, argument = name.partition(".")
    section: Any = nested_section(argument_hints(components()[kind])[argument])
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows(section, f"model.{argument}")]) + "\n"


def weight_table(_: str) -> str:
    """Of the loss terms of this package's families."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    own = [family for family in families() if type(family).__module__.startswith("unigen_ds.")]
    texts: list[Any] = [family.terms for family in own]
    meant = {term: text for terms in texts for term, text in terms.items()}
    return "\n".join([*lines, *(f"| `loss_weights.{t}` | `{DEFAULT_WEIGHT}` | {m} |" for t, m in meant.items())]) + "\n"


def recipe_table(family: str) -> str:
    """Of the shipped configs of a ``DecoderLM``, smallest first."""
    columns = ("parameters", "shipped config", "layers", "`hidden_size`", "heads (key/value)", "`intermediate_size`")
    lines = [f"| {' | '.join(columns)} | vocabulary |", "|---" * 7 + "|"]
    found = []
    for path in (ROOT / "unigen_ds" / "families" / family / "configs").glob("*.py"):
        settings = ModelSettings.of(load_config(path))
        with torch.device("meta"):
            model: Any = settings.model.build()
        llm, number = model.transformers_model.config, sum(p.numel() for p in model.parameters())
        tied = ", tied" if llm.tie_word_embeddings else ""
        heads = f"{llm.num_attention_heads} ({llm.num_key_value_heads})"
        sizes = (llm.num_hidden_layers, llm.hidden_size, heads, llm.intermediate_size, f"{llm.vocab_size}{tied}")
        found.append((number, f"| {number:,} | `{path.stem}` | " + " | ".join(map(str, sizes)) + " |"))
    return "\n".join([*lines, *(line for _, line in sorted(found))]) + "\n"


def components() -> dict[str, type]:
    """Every class of this package that a config can name, and the base of the curves."""
    named = [value for value in vars(registry).values() if isinstance(value, Registry)]
    registries = [kind for kind in named if kind not in (registry.LAYOUTS, registry.FAMILIES)]
    found = {name: cls for kind in registries for name, cls in kind.module_dict.items()}
    return {name: cls for name, cls in found.items() if cls.__module__.startswith("unigen_ds.")}


def arguments(cls: type) -> list[inspect.Parameter]:
    """The arguments in a component's own table: not those of a run, nor those that every curve has."""
    shared = inspect.signature(Curve).parameters if issubclass(cls, Curve) and cls is not Curve else {}
    if issubclass(cls, RecordSource):  # what the data set passes
        shared = {**shared, **inspect.signature(RecordSource).parameters}
    found = inspect.signature(cls).parameters.values()
    return [p for p in found if p.name not in PROVIDED and p.name not in shared]


def is_repeated(cls: Any) -> bool:
    """Whether a component that is registered before has the same arguments, and so the same table."""
    same = [one for one in components().values() if one.__init__ is cls.__init__]
    return next(one for one in same if meanings(one) == meanings(cls)) is not cls


def meanings(cls: type) -> dict[str, str]:
    """Argument -> its text in the section ``Args:`` of the docstring of a class, or of one that it derives from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = re.search(r"^Args:\n((?:(?: .*)?\n)+)", inspect.cleandoc(base.__doc__ or "") + "\n", re.MULTILINE)
        for name, text in _ARGUMENT.findall(section[1]) if section else ():
            found[name] = " ".join(text.split())
    return {name: text for name, text in found.items() if text}


def component_table(name: str) -> str:
    """Of the arguments of a component, by its name; of ``processor of MODEL``, with their section."""
    if name.startswith("processor of "):
        family = family_of(components()[name.removeprefix("processor of ")])
        kind = family.processor_arguments()
        found = inspect.signature(kind).parameters
        return argument_table(kind, [found[key] for key in PROCESSOR_KEYS if key in found], prefix="processor.")
    cls = {**components(), "Curve": Curve}[name]
    return argument_table(cls, arguments(cls))


def argument_table(cls: type, shown: Iterable[inspect.Parameter], *, prefix: str = "") -> str:
    """A row for each argument."""
    texts, hints = meanings(cls), argument_hints(cls)
    lines = [f"| {'key' if prefix else 'argument'} | default | meaning |", "|---|---|---|"]
    for one in shown:
        text = texts.get(one.name, "").removesuffix(".").replace("``", "`").replace("|", "\\|")
        limits = f" ({describe_hint(hints[one.name])})" if limited(hints.get(one.name)) else ""
        lines.append(f"| `{prefix}{one.name}` | {default_cell(one)} | {text}{limits} |")
    return "\n".join(lines) + "\n"


def limited(hint: Any) -> bool:
    """Whether a hint, or a part of it, has the limits of a number."""
    if get_origin(hint) is Annotated and any(isinstance(one, (*LIMITS, Choices)) for one in hint.__metadata__):
        return True
    return any(map(limited, get_args(hint)))


def default_cell(parameter: inspect.Parameter) -> str:
    """``required``, or the default as Python writes it; 1/3 as a fraction."""
    default = parameter.default
    if default is parameter.empty:
        return "required"
    text = repr(default)
    if isinstance(default, float) and len(text) > 10:
        fraction = Fraction(default).limit_denominator(10)
        text = str(fraction) if float(fraction) == default else text
    return "`" + text.replace("|", "\\|") + "`"


WRITERS: Mapping[str, Any] = {
    "keys": table,
    "arguments": component_table,
    "section": section_table,
    "loss_weights": weight_table,
    "recipes": recipe_table,
}


def updated(page: Path) -> str:
    """The text of a page with every table as the code has it."""
    text = page.read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: found[1] + linked(WRITERS[found[2]](found[3]), page) + found[4], text)


def linked(table: str, page: Path) -> str:
    """A table with its links relative to its page, instead of to ``docs``."""

    def link(match: re.Match[str]) -> str:
        target = os.path.relpath(ROOT / "docs" / match[1], page.parent)
        return f"]({target if target != page.name else ''}{match[2] or ''})"

    return _LINK.sub(link, table)


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(updated(page), encoding="utf-8")
