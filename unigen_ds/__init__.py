"""unigen_ds: train unified text + image models; kill a run anywhere and resume it anywhere.

Its packages form layers (``docs/architecture.md``), which import only lower layers. ``Runner`` and ``load_config``
are the two names that a user of the library needs: ``Runner.from_cfg(load_config('unified_digits')).train()``.
"""

__version__ = "0.1.0"
