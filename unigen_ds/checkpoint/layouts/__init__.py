"""Files of each engine's layout -> a ``ShardReader``, found in ``LAYOUTS`` by the manifest's name for it. A user's own
is a class with the same constructor, under the name that its backend passes to ``StateFiles``.
"""

from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.config.registry import LAYOUTS

for _name, _reader in (("safetensors", SafetensorsReader), ("deepspeed", DeepSpeedReader), ("dcp", DCPReader)):
    LAYOUTS.register_module(name=_name, module=_reader)
