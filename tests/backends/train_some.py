"""Train the tiny model, in several processes: ``-m tests.backends.train_some WORK_DIR DATA UPDATES KEY=VALUE...``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.tiny import tiny_config
from unigen_ds.core.config import parse_override
from unigen_ds.runner import Runner

if __name__ == "__main__":
    torch.set_num_threads(1)
    work_dir, data, updates, *options = sys.argv[1:]
    config = tiny_config(Path(work_dir), Path(data), **dict(map(parse_override, options)))
    Runner.from_cfg(config, max_updates=int(updates)).train()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # gloo and DeepSpeed sometimes abort while the interpreter takes them down
