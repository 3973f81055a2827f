"""Floor 6: the loop, and the one room that turns a config into objects."""

from unigen_ds.runner.run import train_config as train_config
from unigen_ds.runner.runner import Runner as Runner
