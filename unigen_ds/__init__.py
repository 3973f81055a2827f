"""unigen_ds: train unified text + image models; kill a run anywhere and resume it anywhere.

Its packages form layers (``docs/architecture.md``), which import only lower layers. ``Runner`` and ``load_config``
are the two names that a user of the library needs: ``Runner.from_cfg(load_config('unified_digits')).train()``.
"""

import sys
from importlib.machinery import ModuleSpec

__version__ = "0.1.0"


class _FormerModules:
    """Asked last, for modules of this package that Python does not find: module paths of former versions."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("unigen_ds."):
            return None
        from unigen_ds.core.former import spec_of

        return spec_of(name)


sys.meta_path.append(_FormerModules)  # type: ignore[arg-type]
