"""The part of a config that docs/extending/mmengine_hooks.md shows."""

from tests.hooks.own_mmengine import MyHook

custom_imports = dict(imports=["tests.hooks.own_mmengine"])
custom_hooks = [
    dict(type="mmengine.EmptyCacheHook", after_iter=True),  # one of mmengine's, by its name there
    dict(type=MyHook, priority="LOW"),  # a subclass of mmengine.hooks.Hook, imported by the config
    dict(type="MyOtherHook"),  # registered in mmengine's HOOKS by a module of custom_imports
]
