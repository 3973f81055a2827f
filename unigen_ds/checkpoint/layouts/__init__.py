"""Files of each engine's layout -> a ``ShardReader``. ``open_reader`` picks it in the registry ``LAYOUTS`` by the
manifest's name for it. A user's own layout registers a class with the constructor of the readers here, under the name
that its backend passes to ``StateFiles``.
"""

from unigen_ds.checkpoint.layouts.dcp import DCPReader
from unigen_ds.checkpoint.layouts.deepspeed import DeepSpeedReader
from unigen_ds.checkpoint.layouts.safetensors import SafetensorsReader
from unigen_ds.config.registry import LAYOUTS

for _name, _reader in (("safetensors", SafetensorsReader), ("deepspeed", DeepSpeedReader), ("dcp", DCPReader)):
    LAYOUTS.register_module(name=_name, module=_reader)
