"""The peak of a device: dense bf16 operations a second, from the maker's data sheet. MFU is a share of it."""

from __future__ import annotations

import torch

PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989,
    "H20": 148, "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10": 125, "RTX A6000": 155, "RTX 3090": 71,
    "L40S": 362, "L40": 181, "L4": 121, "RTX 6000 Ada": 364, "RTX 4090": 165, "RTX 5090": 209,
    "V100 PCIE": 112, "V100": 125, "T4": 65, "MI300X": 1307,
}  # fmt: skip
"""Words of a device's name -> 10**12 dense bf16 operations a second with fp32 sums (V100 and T4 have no bf16: fp16).
The first that fits is used."""


def device_peak_tflops(name: str) -> float | None:
    """Of a device by its name; None where the table does not have it."""
    words = f" {name.replace('-', ' ')} "
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if f" {part} " in words), None)


def peak_tflops(given: float | None) -> float | None:
    """``given``, else the device's, where it is known."""
    if given is not None:
        return given
    return device_peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
