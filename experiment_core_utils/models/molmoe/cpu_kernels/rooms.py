"""In: names and sizes; out: memory that is kept between calls, where fresh pages would cost much of a pass over it."""

import torch


class Workspace:
    """Float32 on the CPU, by name; what stands in a room is lost when another size is requested under its name."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    @torch.inference_mode(False)
    def buffer(self, name: str, *size: int) -> torch.Tensor:
        """Contiguous, of this size, in memory that grows with the largest."""
        elements = torch.Size(size).numel()
        if name not in self._held or self._held[name].numel() < elements:
            self._held[name] = torch.empty(elements)
        return self._held[name][:elements].view(size)
