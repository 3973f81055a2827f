"""The training loop, and the only package that builds objects from a config.

``settings/`` (config -> settings), ``start/`` (-> parts), ``loop/`` (``Runner``); ``open/`` (checkpoint -> a model).
"""

from unigen_ds.runner.loop.runner import Runner as Runner
from unigen_ds.runner.loop.runner import train_config as train_config
