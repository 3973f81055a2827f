"""The page of ``benchmarks/gpu.py``: a table for each check, from the values of its JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; width: 100% } td, th { padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: left }
td.n, th.n { text-align: right } .holds { color: #17692e } .misses, .error, .time { color: #a01c1c; font-weight: 600 }
pre { overflow-x: auto; background: #f4f4f4; padding: .6rem }
"""  # noqa: E501


def number(value: Any) -> str:
    """A value of a figure as text."""
    return "no value" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def limits(figure: Mapping[str, Any]) -> str:
    """The limits of a figure as text."""
    parts = [f"at least {figure['least']:g}"] if figure["least"] is not None else []
    return ", ".join(parts + ([f"at most {figure['most']:g}"] if figure["most"] is not None else []))


def page(record: Mapping[str, Any]) -> str:
    """HTML that loads nothing."""
    name = "Rehearsal, on a CPU, of the GPU check" if record["rehearsed"] else "GPU check"
    parts = [f"<h1>{name} of {escape(str(record['date']))}</h1>"]
    facts = {"device": record["device"], "devices": record["num_devices"], "commit": record["commit"],
             "minutes": f"{record['seconds'] / 60:.1f} of {record['minutes']:g}", **record["versions"]}  # fmt: skip
    parts.append(
        "<p>" + ", ".join(f"{escape(str(name))} {escape(str(value))}" for name, value in facts.items()) + "</p>"
    )
    if record["missing"]:
        parts.append(f"<p class=misses>Missing: {escape('; '.join(record['missing']))}</p>")
    for check in record["checks"]:
        head = f"{check['title']}: <span class={check['status']}>{escape(check['text'])}</span>"
        parts.append(f"<h2>{head}</h2><table><tr><th>figure<th class=n>value<th>unit<th>limit<th></tr>")
        for one in check["figures"]:
            word = {True: "holds", False: "misses", None: ""}[one["holds"]]
            cells = "".join(f"<td>{escape(text)}" for text in (one["unit"], limits(one)))
            value = f"<td class=n>{escape(number(one['value']))}"
            parts.append(f"<tr><td>{escape(one['name'])}{value}{cells}<td class={word}>{word}</tr>")
        parts.append("</table>")
        if check["problem"]:
            parts.append(f"<details><summary>what it reports</summary><pre>{escape(check['problem'])}</pre></details>")
    title = f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title><style>{_STYLE}</style>"
    return title + "\n".join(parts) + "</html>\n"
