"""The files of ``DeepSpeedEngine.save_checkpoint`` as ``Output``s, which refer to the engine's memory: DeepSpeed writes
between its barriers, so with a full disk on one rank the others would wait until the time limit. Source: DeepSpeed
0.19.8, ``runtime/engine.py: save_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

import torch

from unigen_ds.core.json_values import STAMP
from unigen_ds.system.outputs import Output, nested_bytes

_BY_NAME = ("module", "buffer_names", "frozen_param_shapes", "frozen_param_fragments")
"""Keys of a model file whose values are by the names of parameters and buffers."""
SAVE_FOLDER = "."
"""The directory passed to DeepSpeed, which only appends names to it."""


class CapturedSave:
    """Replaces an engine's ``checkpoint_engine`` during one ``save_checkpoint`` and collects what it would save.

    ``left_out``: names of frozen parameters and buffers that no file gets. ``stamp``: as of ``Backend``.
    """

    def __init__(self, original: Any, *, left_out: Collection[str] = (), stamp: str = "") -> None:
        self._original, self._left_out, self._stamp = original, left_out, stamp
        self.outputs: list[Output] = []

    @contextmanager
    def install(self, engine: Any) -> Iterator[None]:
        from deepspeed import comm

        engine.checkpoint_engine, barrier = self, comm.barrier
        unneeded = "_copy_recovery_script", "_checkpoint_tag_validation"  # files of rank 0; reductions
        for name in unneeded:
            setattr(engine, name, lambda _: None)
        comm.barrier = lambda: None  # nothing is written that another rank could wait for
        try:
            yield
        finally:
            engine.checkpoint_engine, comm.barrier = self._original, barrier
            for name in unneeded:
                delattr(engine, name)

    def save(self, state_dict: Any, path: str) -> None:
        """DeepSpeed calls it by keyword: the names are its own."""
        state_dict = {**state_dict, STAMP: self._stamp}
        for key in _BY_NAME if self._left_out else ():
            content = state_dict.get(key)
            if isinstance(content, Mapping):
                rest = [(name, value) for name, value in content.items() if name not in self._left_out]
                state_dict[key] = type(content)(rest)  # type: ignore[call-arg]
            elif content:
                state_dict[key] = [name for name in content if name not in self._left_out]
        self.outputs.append(Output(PurePath(path).name, nested_bytes(state_dict), partial(torch.save, state_dict)))

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...
    def create(self, info: Any) -> None: ...

    def commit(self, info: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextmanager
def gathered_parameters_released(zero: Any) -> Iterator[None]:
    """Inside, small parameters of the ZeRO-3 optimizer ``zero`` (``persistent``) are released, and not gathered again:
    they have not changed, so afterwards they are what they were.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameters = zero.persistent_parameters
    whole = [(p, p.data, p.ds_status) for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE]
    for parameter, data, _ in whole:
        parameter.data, parameter.ds_status = data.new_empty(0), ZeroParamStatus.NOT_AVAILABLE
    zero.persistent_parameters = []
    try:
        yield
    finally:
        zero.persistent_parameters = parameters
        for parameter, data, status in whole:
            parameter.data, parameter.ds_status = data, status
