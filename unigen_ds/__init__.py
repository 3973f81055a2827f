"""unigen_ds: train unified text + image models; kill a run anywhere and resume it anywhere.

The house has seven floors (``docs/architecture.md``); imports run downwards only. ``Runner`` and ``load_config``
are the two names a library user needs: ``Runner.from_cfg(load_config('unified_digits')).train()``.
"""

__version__ = "0.1.0"
