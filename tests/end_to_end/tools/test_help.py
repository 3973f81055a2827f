"""``--help`` and a wrong argument are answered before anything large is imported: torch alone takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py") if not path.stem.startswith("_"))
LARGE = ("torch", "transformers", "mmengine", "deepspeed", "numpy", "rich")
OF_SOME_RUNS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "deepspeed",
                "transformers", "matplotlib", "sympy", "unigen_ds.examples")  # fmt: skip
"""What only some engines, models and hooks need."""
CODE = """
import importlib, sys
for tool in sys.argv[1].split(','):
    main = importlib.import_module('tools.' + tool).main
    for given in (['--help'], ['--no-such-argument']):
        try:
            main(given)
            raise SystemExit(f'{tool} {given} returned')
        except SystemExit as ended:
            print(tool, given[0], ended.code)
    print(tool, 'imported', *(name for name in sys.argv[2].split(',') if name in sys.modules))
import unigen_ds.runner
print('the runner imported', *(name for name in sys.argv[3].split(',') if name in sys.modules))
"""


@pytest.fixture(scope="module")
def process() -> subprocess.CompletedProcess[str]:
    """One process for all of them: what one imports would show at the next one, too."""
    assert {"train", "resume", "inspect_data", "checkpoints", "generate", "export", "zero_to_fp32"} <= set(TOOLS)
    command = [sys.executable, "-c", CODE, ",".join(TOOLS), ",".join(LARGE), ",".join(OF_SOME_RUNS)]
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process


def test_no_tool_imports_torch_to_answer_help_or_a_wrong_argument(process):
    lines = process.stdout.splitlines()
    for tool in TOOLS:
        assert f"{tool} --help 0" in lines
        assert f"{tool} --no-such-argument 2" in lines
        assert f"{tool} imported" in lines, [line for line in lines if line.startswith(f"{tool} imported")]
    assert process.stderr.count("usage: unigen-") == len(TOOLS)


def test_a_run_imports_an_engine_only_where_it_is_used(process):
    """All engines register at import; FSDP2's own modules and DeepSpeed need a second and more."""
    assert "the runner imported" in process.stdout.splitlines(), process.stdout.splitlines()[-1]
