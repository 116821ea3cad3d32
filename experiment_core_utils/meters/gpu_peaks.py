"""In: a GPU and a number format; out: the most that its data sheet promises: operations and bytes a second.

Dense products on tensor cores (without sparsity, which data sheets of Hopper and Ada print alone), float32 on the
ordinary cores. What a real product reaches is less.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_TERA = 1e12


@dataclass(frozen=True)
class Peaks:
    """Peaks of one GPU; None where they are not known, for which `reason` says why.

    Attributes:
        dtype: number format that `flops_per_s` is for.
        flops_per_s: one multiply-add as 2.
        bytes_per_s: of its memory.
    """

    gpu_name: str | None
    dtype: str | None
    flops_per_s: float | None
    bytes_per_s: float | None
    reason: str | None


@dataclass(frozen=True)
class _Sheet:
    """A data sheet; half for float16 and bfloat16."""

    tera_bytes: float
    single: float
    tf32: float | None
    half: float
    float8: float | None
    has_bfloat16: bool = True

    @property
    def tera_flops(self) -> Mapping[str, float | None]:
        return {
            "float32": self.single,
            "tf32": self.tf32,
            "float16": self.half,
            "bfloat16": self.half if self.has_bfloat16 else None,
            "float8": self.float8,
        }


# Where the sheet prints products with sparsity, half of that.
# NVIDIA H100 Tensor Core GPU data sheet (SXM, NVL) and its first edition of 2022 (PCIe).
_H100_SXM = _Sheet(3.35, 67.0, 989 / 2, 1979 / 2, 3958 / 2)
_H100_PCIE = _Sheet(2.0, 51.0, 756 / 2, 1513 / 2, 3026 / 2)
_H100_NVL = _Sheet(3.9, 60.0, 835 / 2, 1671 / 2, 3341 / 2)
# NVIDIA H200 Tensor Core GPU data sheet.
_H200_SXM = _Sheet(4.8, 67.0, 989 / 2, 1979 / 2, 3958 / 2)
_H200_NVL = _Sheet(4.8, 60.0, 835 / 2, 1671 / 2, 3341 / 2)
# NVIDIA A100 Tensor Core GPU data sheet, 40 GB and 80 GB.
_A100_40 = _Sheet(1.555, 19.5, 156.0, 312.0, None)
_A100_80_PCIE = _Sheet(1.935, 19.5, 156.0, 312.0, None)
_A100_80_SXM = _Sheet(2.039, 19.5, 156.0, 312.0, None)
# NVIDIA L40S and L4 data sheets.
_L40S = _Sheet(0.864, 91.6, 183.0, 362.05, 733.0)
_L4 = _Sheet(0.3, 30.3, 120 / 2, 242 / 2, 485 / 2)
# NVIDIA V100 Tensor Core GPU data sheet.
_V100_SXM2 = _Sheet(0.9, 15.7, None, 125.0, None, has_bfloat16=False)
_V100_PCIE = _Sheet(0.9, 14.0, None, 112.0, None, has_bfloat16=False)

# Names as the driver tells them; a slice of a GPU has another name, and no peaks here.
_SHEETS: Mapping[str, _Sheet] = {
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H200_SXM,
    "NVIDIA H200 NVL": _H200_NVL,
    "NVIDIA A100-SXM4-40GB": _A100_40,
    "NVIDIA A100-PCIE-40GB": _A100_40,
    "NVIDIA A100-SXM4-80GB": _A100_80_SXM,
    "NVIDIA A100 80GB PCIe": _A100_80_PCIE,
    "NVIDIA L40S": _L40S,
    "NVIDIA L4": _L4,
    "Tesla V100-SXM2-16GB": _V100_SXM2,
    "Tesla V100-SXM2-32GB": _V100_SXM2,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
}


def known_peaks(gpu_name: str, dtype: str) -> Peaks:
    """By the data sheet.

    Args:
        gpu_name: as the driver tells it.
        dtype: `float32` (ordinary cores), `tf32`, `float16`, `bfloat16` or `float8`.
    """
    sheet = _SHEETS.get(gpu_name)
    if sheet is None:
        return Peaks(
            gpu_name, dtype, None, None, f"the peaks of {gpu_name} are not known; known are {', '.join(_SHEETS)}"
        )
    tera_flops = sheet.tera_flops.get(dtype)
    bytes_per_s = sheet.tera_bytes * _TERA
    if tera_flops is None:
        return Peaks(gpu_name, dtype, None, bytes_per_s, f"the data sheet of {gpu_name} has no peak for {dtype}")
    return Peaks(gpu_name, dtype, tera_flops * _TERA, bytes_per_s, None)


def peaks_on(device: torch.device, dtype: str | None) -> Peaks:
    """Of the GPU that a model computes on in `dtype`; None of the CPU, and without a dtype."""
    if device.type != "cuda":
        return Peaks(None, dtype, None, None, f"{device} is no GPU: its peaks are not known")
    name = torch.cuda.get_device_name(device)
    if dtype is None:
        return Peaks(name, None, None, None, "the number format of the model's products is not known")
    is_tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return known_peaks(name, "tf32" if is_tf32 else dtype)
