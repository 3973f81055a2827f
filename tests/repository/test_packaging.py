"""The installation of a user: a wheel has the package, the configs and the tools, and they work without a checkout."""

from __future__ import annotations

import ast
import configparser
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from unigen_ds.backends.deepspeed.deepspeed_config import ALLOWED_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py") if not path.stem.startswith("_"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built offline from a copy (setuptools leaves a ``build`` folder in its source)."""
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = ["setup.py", "pyproject.toml", "README.md", "unigen_ds", "tools", "ds_configs"]
    present = [name for name in names if (ROOT / name).exists()]
    subprocess.run(["cp", "-r", *present, str(source)], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    subprocess.run(command, cwd=source, check=True, timeout=120)
    (path,) = out.glob("unigen_ds-*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "unigen_ds").rglob("*.py")}
    expected |= {f"unigen_ds/ds_configs/{p.name}" for p in (ROOT / "ds_configs").glob("*.json")}
    for ending in ("css", "js", "j2"):
        expected |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "unigen_ds").rglob(f"*.{ending}")}
    expected |= {f"unigen_ds_tools/{p.name}" for p in (ROOT / "tools").glob("*.py")}
    assert expected <= names, sorted(expected - names)
    assert not [name for name in names if name.startswith(("tests/", "tools/", "ds_configs/"))]
    assert wheel.name.endswith("-py3-none-any.whl"), "pure Python: one wheel, no compiler"


def test_pip_installs_a_deepspeed_that_a_run_accepts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    needs = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: deepspeed")]
    assert [one.specifier for one in needs] == [SpecifierSet(ALLOWED_VERSIONS)]
    assert f"`{ALLOWED_VERSIONS}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_tool_is_a_command_with_a_main(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(name).decode())
    commands = dict(parser["console_scripts"])
    assert commands == {f"unigen-{t.replace('_', '-')}": f"unigen_ds_tools.{t}:main" for t in TOOLS}
    assert {"unigen-train", "unigen-inspect-data", "unigen-checkpoints"} <= set(commands)


# Imported where they are installed by hand: each has its own extra, or is another program's (imitated in our tests).
BY_HAND = {"gradio", "playwright", "lightning", "lmms_eval"}
OURS = {"unigen_ds", "unigen_ds_tools", "tools", "tests", "benchmarks", "docs", "shared", "_path", "tomli"}


def imports_of(folder: Path) -> set[str]:
    """Top-level names of what Python files of the folder import, by statement or by `import_optional("name", ...)`."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "import_optional":
                names |= {first.value for first in node.args[:1] if isinstance(first, ast.Constant)}
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - OURS


def installed_by(requirements: Iterable[str], pairs: set[tuple[str, str]]) -> set[str]:
    """Names of the distributions that pip installs for requirements, with what those require in turn."""
    names: set[str] = set()
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        names.add(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in pairs:
                continue
            pairs.add((name, extra))
            try:
                parts = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # of another platform or Python version
                continue
            rest = [r for r in map(Requirement, parts) if r.marker is None or r.marker.evaluate({"extra": extra})]
            names |= installed_by(map(str, rest), pairs)
    return names


@pytest.mark.slow
def test_every_package_that_is_imported_is_installed_with_the_extras(wheel: Path) -> None:
    """A package that is here by chance (of another extra, or installed by hand) is missing on a clean machine."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    requirements = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    requirements = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": "test"})]
    there = installed_by(map(str, requirements), set())
    providers = metadata.packages_distributions()
    packages = set().union(*(imports_of(ROOT / folder) for folder in ("unigen_ds", "tools", "tests"))) - BY_HAND
    missing = {one for one in packages if not {canonicalize_name(d) for d in providers.get(one, [])} & there}
    assert not missing, "no extra of setup.py installs these; add them to the extra that needs them"


@pytest.fixture(scope="module")
def site_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as in site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(command: list[str], *, cwd: Path, path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path) if path else ""}
    process = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_an_installed_package_finds_its_configs(site_folder: Path, tmp_path: Path) -> None:
    code = (
        "import unigen_ds; from unigen_ds.config.paths import ds_configs_dir\n"
        "from unigen_ds.config.overrides import config_path\n"
        "print(unigen_ds.__file__); print(ds_configs_dir()); print(config_path('unified_digits'))\n"
        "print(config_path('decoder_lm_90m'))"
    )
    for line in run([sys.executable, "-c", code], cwd=tmp_path, path=site_folder).splitlines():
        assert line.startswith(str(site_folder)), line


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_starts_installed_and_from_a_checkout(tool: str, site_folder: Path, tmp_path: Path) -> None:
    entry = f"import sys; from unigen_ds_tools.{tool} import main; sys.exit(main(['--help']))"
    assert "usage" in run([sys.executable, "-c", entry], cwd=tmp_path, path=site_folder)
    assert "usage" in run([sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--help"], cwd=tmp_path)
