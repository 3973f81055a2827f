"""What a module tree holds, by name."""

from __future__ import annotations

from torch import Tensor, nn


def tied_names(model: nn.Module) -> dict[str, str]:
    """Of parameters that several modules share: each further name, and the first, under which they are kept."""
    first: dict[int, str] = {}
    everywhere = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in everywhere:
        first.setdefault(id(parameter), name)
    return {name: first[id(p)] for name, p in everywhere if first[id(p)] != name}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a ``state_dict`` has; no hook of an engine is called."""
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in model.named_modules()
        for name in part._buffers
        if name not in part._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}
