"""Imported by a tool that runs as a script: puts the checkout first on ``sys.path``; no installation is needed.

The folder of the tools is moved to the end: a tool's name (``resume``, ``evaluate``) must not hide another package.
"""

import sys
from pathlib import Path

_TOOLS = str(Path(__file__).resolve().parent)
_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [_ROOT, *(entry for entry in sys.path if entry not in (_TOOLS, _ROOT)), _TOOLS]
