"""Module paths and component names of former versions, and what they are now: the one table of both.

Imports of a former path work, and so do configs and checkpoints that name a former component; each is one line in the
log. ``unigen_ds/__init__.py`` calls ``spec_of`` for every module of the package that Python does not find; the registry
calls ``component`` for every type that nothing has registered. Whoever moves or renames something adds rows here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from unigen_ds.core.log import notice

MODULES: Mapping[str, str] = MappingProxyType({
    "unigen_ds.backends.sharded": "unigen_ds.backends.base",
    "unigen_ds.checkpoint.report": "unigen_ds.checkpoint.listing",
    "unigen_ds.data.digits": "unigen_ds.examples.digits.dataset",
    "unigen_ds.data.formats": "unigen_ds.data.records",
    "unigen_ds.data.vlm_processor": "unigen_ds.families.nanovlm.processor",
    "unigen_ds.evaluation.curves": "unigen_ds.evaluation.plots",
    "unigen_ds.evaluation.digits": "unigen_ds.examples.digits.scores",
    "unigen_ds.hooks.digits_report": "unigen_ds.examples.digits.report_hook",
    "unigen_ds.hooks.writers": "unigen_ds.tracking.writer",
    "unigen_ds.inference.chat": "unigen_ds.families.nanovlm.inference",
    "unigen_ds.inference.flow_settings": "unigen_ds.families.bagel.flow_settings",
    "unigen_ds.inference.inferencer": "unigen_ds.families.bagel.inference",
    "unigen_ds.inference.sampler": "unigen_ds.families.bagel.sampler",
    "unigen_ds.inference.text": "unigen_ds.families.decoder_lm.inference",
    "unigen_ds.models.decoder_lm": "unigen_ds.families.decoder_lm.model",
    "unigen_ds.models.exported": "unigen_ds.families.bagel.exported",
    "unigen_ds.models.hf_directory": "unigen_ds.families.decoder_lm.published",
    "unigen_ds.models.hf_names": "unigen_ds.families.nanovlm.published",
    "unigen_ds.models.published": "unigen_ds.families.bagel.published",
    "unigen_ds.models.unified": "unigen_ds.families.bagel.model",
    "unigen_ds.models.vlm": "unigen_ds.families.nanovlm.model",
    "unigen_ds.optim.ema": "unigen_ds.optim.averaging",
})  # fmt: skip
"""Former module -> where its names are now."""

NAMES: Mapping[str, str] = MappingProxyType({
    "unigen_ds.backends.sharded.ShardedBackend": "unigen_ds.backends.base.Backend",
    "unigen_ds.data.formats.Place": "unigen_ds.data.sources.json_lines.Place",
    "unigen_ds.data.formats.load_record": "unigen_ds.data.sources.json_lines.load_record",
    "unigen_ds.data.formats.read_bytes": "unigen_ds.data.sources.json_lines.read_bytes",
    "unigen_ds.data.formats.read_record": "unigen_ds.data.sources.json_lines.read_record",
    "unigen_ds.data.formats.scan": "unigen_ds.data.sources.json_lines.scan",
    "unigen_ds.evaluation.digits.Verdict": "unigen_ds.examples.digits.scores.Scores",
    "unigen_ds.evaluation.digits.train_judge": "unigen_ds.examples.digits.scores.train_classifier",
    "unigen_ds.hooks.writers.ALIASES": "unigen_ds.tracking.wandb.ALIASES",
    "unigen_ds.hooks.writers.TensorboardVisBackend": "unigen_ds.tracking.tensorboard.TensorboardVisBackend",
    "unigen_ds.hooks.writers.WandbVisBackend": "unigen_ds.tracking.wandb.WandbVisBackend",
    "unigen_ds.models.hf_directory.open_directory": "unigen_ds.families.decoder_lm.published.read_pretrained",
    "unigen_ds.models.hf_names.open_pretrained_vlm": "unigen_ds.families.nanovlm.published.read_pretrained",
    "unigen_ds.models.published.open_pretrained": "unigen_ds.families.bagel.published.read_pretrained",
})  # fmt: skip
"""Names of a former module that are in another module than the others, or have another name now."""

MOVED: Mapping[str, str] = MappingProxyType({
    "unigen_ds.core.config.load_config": "unigen_ds.runner.settings",
    "unigen_ds.data.collate.DroppedImage": "unigen_ds.data.splits",
    "unigen_ds.data.collate.LoadedImage": "unigen_ds.data.splits",
    "unigen_ds.data.collate.LoadedTiles": "unigen_ds.families.nanovlm.splits",
    "unigen_ds.data.collate.text_tokens": "unigen_ds.data.splits",
    "unigen_ds.data.datasets.DatasetAdapter": "unigen_ds.data.adapter",
    "unigen_ds.data.processor.UnifiedProcessor": "unigen_ds.families.bagel.processor",
    "unigen_ds.data.samples.END": "unigen_ds.data.splits",
    "unigen_ds.data.samples.ImageSplit": "unigen_ds.data.splits",
    "unigen_ds.data.samples.TextSplit": "unigen_ds.data.splits",
    "unigen_ds.data.samples.TiledSplit": "unigen_ds.families.nanovlm.splits",
    "unigen_ds.data.samples.TokenSplit": "unigen_ds.data.splits",
    "unigen_ds.models.DecoderLM": "unigen_ds.families.decoder_lm.model",
    "unigen_ds.models.UnifiedModel": "unigen_ds.families.bagel.model",
    "unigen_ds.models.VLM": "unigen_ds.families.nanovlm.model",
})  # fmt: skip
"""Names that left a module which still exists -> the module that has them now (``moved``)."""

COMPONENTS: Mapping[str, str] = MappingProxyType({
    "DigitsDataset": "unigen_ds.examples.digits.DigitsDataset",
    "DigitsReportHook": "unigen_ds.examples.digits.DigitsReportHook",
})  # fmt: skip
"""What a former version's registries named -> the class now: it has another name, or its module is not imported by
every run any more.
"""


def spec_of(module: str) -> ModuleSpec | None:
    """How to import a former module path; None where the table does not have it."""
    if module in MODULES:
        return ModuleSpec(module, _FormerModule(), is_package=_above(module, MODULES))
    if _above(module, MODULES):  # a package of which nothing is left
        return ModuleSpec(module, _FormerModule(), is_package=True)
    return None


def _above(module: str, rows: Mapping[str, str] | Sequence[str]) -> bool:
    return any(row.startswith(f"{module}.") for row in rows)


class _FormerModule(Loader):
    """Makes a module whose names are looked up where they are now."""

    def create_module(self, spec: ModuleSpec) -> None:
        """As Python does it by default."""

    def exec_module(self, module: ModuleType) -> None:
        former = module.__name__
        if former in MODULES:
            notice(f"{former} is now {MODULES[former]}: please change the import.")
        module.__dict__["__getattr__"] = lambda name: _find(former, name)


def _find(former: str, name: str) -> Any:
    if not name.startswith("__"):
        path = NAMES.get(f"{former}.{name}")
        if path is None and former in MODULES:
            path = f"{MODULES[former]}.{name}"
        module, _, present = (path or "").rpartition(".")
        if module and hasattr(found := importlib.import_module(module), present):
            return getattr(found, present)
    raise AttributeError(f"module {former!r} has no attribute {name!r}")


def moved(module: str, name: str) -> Any:
    """A former name of ``module``, which still exists; for its ``__getattr__``."""
    path = f"{module}.{name}"
    if path not in MOVED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    notice(f"{path} is now {MOVED[path]}.{name}: please change the import.")
    return getattr(importlib.import_module(MOVED[path]), name)


def component(name: str, *, where: str = "") -> type | None:
    """The present class of a registered name of a former version; None where the table does not have it.

    Its module is imported, which registers it. ``where`` is the config path shown in the log; where it is not
    known yet, ``report`` logs the line later.
    """
    path = COMPONENTS.get(name)
    if path is None:
        return None
    module, _, present = path.rpartition(".")
    found: type = getattr(importlib.import_module(module), present)
    _unreported.add(name)
    if where:
        report(name, where=where)
    return found


_unreported: set[str] = set()
"""Former names of components that were looked up without a config path."""


def report(name: str, *, where: str) -> None:
    """Log where a config has a former name that ``component`` has looked up."""
    if name not in _unreported:
        return
    _unreported.discard(name)
    module, _, present = COMPONENTS[name].rpartition(".")
    renamed = f" is now {present!r}" if present != name else f" is in {module} now"
    remedy = f"; import it with custom_imports=dict(imports=[{module!r}])" if present == name else ""
    notice(f"{where}.type: {name!r}{renamed}{remedy}.")
