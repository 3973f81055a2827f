"""The training loop, and the only package that builds objects from a config.

In order: ``settings/`` (config -> typed settings), ``start/`` (settings -> parts), ``loop/`` (``Runner``), and
``open/`` (a checkpoint -> a model for inference).
"""

from unigen_ds.runner.loop.runner import Runner as Runner
from unigen_ds.runner.loop.runner import train_config as train_config
