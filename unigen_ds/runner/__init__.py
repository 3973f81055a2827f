"""Layer 8: the training loop, and the only package that builds objects from a config."""

from unigen_ds.runner.loop.run import train_config as train_config
from unigen_ds.runner.loop.runner import Runner as Runner
