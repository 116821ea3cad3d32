"""Graphed vision stage on a GPU: one CUDA graph for each number of crops.

Importing this module does not need Triton; making an engine does.
"""

from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.engines.api import VisionEngine
from experiment_core_utils.engines.cuda_graphs import CudaGraphPool
from experiment_core_utils.engines.weights import VisionWeights
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.triton_build import built, kernels_unsupported_reason

# Graphs kept: more than there are tiers of crops, few enough for requests of any size.
MOST_GRAPHS = 64


@dataclass(frozen=True)
class _Crops:
    """The inputs of the graph of one number of crops."""

    patches: torch.Tensor  # [N * P, C]; columns past the pixels are zero
    masks: torch.Tensor  # [N, P]


def cut_patches(pixel_values: torch.Tensor, side: int) -> torch.Tensor:
    """A view of crops as patches: [N, 3, S, S] -> [N, S / side, S / side, 3, side, side], pixels of a patch as a
    convolution reads them.
    """
    crops, colours, height, width = pixel_values.shape
    cut = pixel_values.view(crops, colours, height // side, side, width // side, side)
    return cut.permute(0, 2, 4, 1, 3, 5)


def real_crops(patches: torch.Tensor, crops: int, pixels: int, pad_value: float) -> torch.Tensor:
    """Whether each crop is real or padding: [N * P, C], of which the first `pixels` columns are a patch's -> [N]
    bool.
    """
    return (patches.view(crops, -1, patches.shape[1])[:, :, :pixels] != pad_value).any(dim=2).any(dim=1)


class GraphedVision(VisionEngine):
    """A `VisionEngine` by CUDA graphs.

    Raises:
        ConfigurationError: the reason, where the tower cannot be captured.
    """

    def __init__(self, vision: VisionWeights, graphs: CudaGraphPool | None = None) -> None:
        reason = kernels_unsupported_reason(vision.device, _kernels)
        if reason is not None:
            raise ConfigurationError(f"the vision tower cannot be captured: {reason}")
        self._vision = vision
        self._kernels = _kernels()
        self._graphs = CudaGraphPool(MOST_GRAPHS) if graphs is None else graphs
        self._crops: dict[int, _Crops] = {}

    @torch.inference_mode()
    def warm_up(self, crops: int) -> None:
        name = ("vision", crops)
        if name in self._graphs:
            return
        if crops not in self._crops:
            with torch.inference_mode(False):
                self._crops[crops] = self._new_crops(crops)
        static, vision = self._crops[crops], self._vision
        pixels = 3 * vision.patch_side**2

        def run() -> torch.Tensor:
            real = real_crops(static.patches, crops, pixels, vision.pad_value)
            features: torch.Tensor = self._kernels.encode(vision, static.patches, real, static.masks)
            return features

        with built("the kernels of the vision tower", ConfigurationError):
            self._graphs.capture(name, run)

    def release(self) -> None:
        # A pool that no graph uses any more cannot be captured into again.
        self._graphs, self._crops = CudaGraphPool(MOST_GRAPHS), {}

    @torch.inference_mode()
    def encode(self, pixel_values: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        """Requests of several pictures may be placed one after the other."""
        crops = pixel_values.shape[0]
        self.warm_up(crops)
        static = self._crops[crops]
        cut = cut_patches(pixel_values, self._vision.patch_side)
        pixels = cut[0, 0, 0].numel()
        static.patches[:, :pixels].view(cut.shape).copy_(cut)
        static.masks.copy_(image_masks)
        return self._graphs.replay(("vision", crops))

    def _new_crops(self, crops: int) -> _Crops:
        """Crops of zeros, kept from the first request of this size on."""
        vision = self._vision
        patches = vision.positions.shape[0] - 1
        pixels = torch.zeros(crops * patches, vision.patch_weight.shape[1], dtype=vision.dtype, device=vision.device)
        return _Crops(pixels, torch.ones(crops, patches, dtype=vision.dtype, device=vision.device))


def _kernels() -> Any:
    """The kernels of the vision stage; raises ImportError where Triton is missing."""
    from experiment_core_utils.engines.gpu.triton import vision_forward as vision

    return vision
