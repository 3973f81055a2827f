"""What ``make site`` shows otherwise than Python-Markdown does: ``\\|`` of code in a table, as on other readers."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Of MkDocs: the HTML of each page."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)
