"""The Inception network of FID (Szegedy et al., CVPR 2016), as converted from TensorFlow's graph of 2015-12-05.

In: the published file of weights (pytorch-fid's and torch-fidelity's ``...inception-2015-12-05-6726825d.pth``, or the
same names as safetensors), read as data. Out: 2,048 features of a picture of 299 x 299 pixels. Two things differ from
the network in torchvision, as in the graph: average pools do not count padding, and the last block has a maximum pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor, nn
from torch.nn import functional as F

from unigen_ds.checkpoint.layouts.torch_file import load_file
from unigen_ds.core.errors import CheckpointError, ConfigError

SIZE = 299


_Conv = tuple[Any, ...]
"""A convolution of a branch: name, channels, height, width, stride. Without a stride it keeps the size; a stride has no
padding. Two names are two convolutions of the same input, the second transposed, whose outputs are joined."""


class _Unit(nn.Module):
    """Convolution, normalization, ReLU."""

    def __init__(self, inputs: int, channels: int, kernel: tuple[int, int], *, stride: int = 1, same: bool) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else 0
        self.conv = nn.Conv2d(inputs, channels, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class _Block(nn.Module):
    """Branches side by side, joined: chains of convolutions and, last, a pool with a convolution or without one."""

    def __init__(self, inputs: int, pool: str, *branches: list[_Conv]) -> None:
        super().__init__()
        self._pool, self._branches = pool, [[names.split() for names, *_ in branch] for branch in branches]
        for branch in branches:
            channels = inputs
            for names, outputs, height, width, *stride in branch:
                for name, kernel in zip(names.split(), ((height, width), (width, height)), strict=False):
                    unit = _Unit(channels, outputs, kernel, stride=stride[0] if stride else 1, same=not stride)
                    self.add_module(name, unit)
                channels = outputs

    def forward(self, x: Tensor) -> Tensor:
        joined = []
        for branch in self._branches:
            out = self._pooled(x) if branch[0] == ["branch_pool"] else x
            for names in branch:
                out = torch.cat([self.get_submodule(name)(out) for name in names], 1)
            joined.append(out)
        if self._pool == "reduce":
            joined.append(F.max_pool2d(x, 3, stride=2))
        return torch.cat(joined, 1)

    def _pooled(self, x: Tensor) -> Tensor:
        if self._pool == "max":
            return F.max_pool2d(x, 3, stride=1, padding=1)
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def _block_a(inputs: int, pool_channels: int) -> _Block:
    return _Block(
        inputs,
        "average",
        [("branch1x1", 64, 1, 1)],
        [("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 5)],
        [("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 3), ("branch3x3dbl_3", 96, 3, 3)],
        [("branch_pool", pool_channels, 1, 1)],
    )


def _block_b(inputs: int) -> _Block:
    return _Block(
        inputs,
        "reduce",
        [("branch3x3", 384, 3, 3, 2)],
        [("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 3), ("branch3x3dbl_3", 96, 3, 3, 2)],
    )


def _block_c(inputs: int, c: int) -> _Block:
    double = ((c, 1, 1), (c, 7, 1), (c, 1, 7), (c, 7, 1), (192, 1, 7))
    return _Block(
        inputs,
        "average",
        [("branch1x1", 192, 1, 1)],
        [("branch7x7_1", c, 1, 1), ("branch7x7_2", c, 1, 7), ("branch7x7_3", 192, 7, 1)],
        [(f"branch7x7dbl_{n}", *sizes) for n, sizes in enumerate(double, start=1)],
        [("branch_pool", 192, 1, 1)],
    )


def _block_d(inputs: int) -> _Block:
    seven = ((192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3, 2))
    return _Block(
        inputs,
        "reduce",
        [("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 3, 2)],
        [(f"branch7x7x3_{n}", *sizes) for n, sizes in enumerate(seven, start=1)],
    )


def _block_e(inputs: int, pool: str) -> _Block:
    double: list[_Conv] = [("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 3)]
    return _Block(
        inputs,
        pool,
        [("branch1x1", 320, 1, 1)],
        [("branch3x3_1", 384, 1, 1), ("branch3x3_2a branch3x3_2b", 384, 1, 3)],
        [*double, ("branch3x3dbl_3a branch3x3dbl_3b", 384, 1, 3)],
        [("branch_pool", 192, 1, 1)],
    )


class Inception(nn.Module):
    """Pictures -> features before the last layer: float32 (n, 3, 299, 299) from 0 to 255 -> (n, 2048)."""

    def __init__(self) -> None:
        super().__init__()

        def unit(inputs: int, channels: int, size: int, *, stride: int = 1, same: bool = False) -> _Unit:
            return _Unit(inputs, channels, (size, size), stride=stride, same=same)

        self.Conv2d_1a_3x3 = unit(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = unit(32, 32, 3)
        self.Conv2d_2b_3x3 = unit(32, 64, 3, same=True)
        self.Conv2d_3b_1x1 = unit(64, 80, 1)
        self.Conv2d_4a_3x3 = unit(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _block_a(192, 32), _block_a(256, 64), _block_a(288, 64)
        self.Mixed_6a = _block_b(288)
        self.Mixed_6b, self.Mixed_6c = _block_c(768, 128), _block_c(768, 160)
        self.Mixed_6d, self.Mixed_6e = _block_c(768, 160), _block_c(768, 192)
        self.Mixed_7a = _block_d(768)
        self.Mixed_7b, self.Mixed_7c = _block_e(1280, "average"), _block_e(2048, "max")

    def forward(self, images: Tensor) -> Tensor:
        x = (images - 128) / 128
        for name, module in self.named_children():
            x = F.max_pool2d(x, 3, stride=2) if name in ("Conv2d_3b_1x1", "Mixed_5b") else x
            x = module(x)
        return x.mean((2, 3))


def inception(path: Path) -> Inception:
    """The network with the weights of a file. Raises ``ConfigError`` for a file of another network."""
    try:
        stored = load_safetensors(path) if path.suffix == ".safetensors" else load_file(path)
    except (OSError, CheckpointError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    with torch.random.fork_rng(devices=[]):
        network = Inception().eval()
    expected = {k: v for k, v in network.state_dict().items() if not k.endswith("num_batches_tracked")}
    tensors = {k: stored[k] for k in expected if isinstance(stored, dict) and isinstance(stored.get(k), Tensor)}
    wrong = [name for name in expected if name not in tensors or tensors[name].shape != expected[name].shape]
    if wrong:
        raise ConfigError(
            f"{path} is not FID's Inception network: {len(wrong)} of {len(expected)} tensors are missing or have"
            f" another shape, first {wrong[0]}",
            allowed="the file weights-inception-2015-12-05-6726825d.pth of torch-fidelity, or pytorch-fid's",
        )
    network.load_state_dict(tensors, strict=False)
    return network.requires_grad_(False)
