"""In: a latency budget in seconds; out: one more embedding behind the prompt, in the prefill only."""

import math

import torch
from torch import nn

FREQUENCIES = 12
# Of the natural logarithm of the budget in ms: a period of 32 tells 1 ms from a day, one of 0.25 tells 3 % apart.
LONGEST_PERIOD, SHORTEST_PERIOD = 32.0, 0.25
CODE_WIDTH = 24


def sinusoidal_features(budgets_s: torch.Tensor) -> torch.Tensor:
    """[B] seconds -> [B, 2 * FREQUENCIES]: sines, then cosines, of ln(ms) at periods that fall geometrically."""
    steps = torch.linspace(0.0, 1.0, FREQUENCIES, dtype=torch.float64, device=budgets_s.device)
    periods = LONGEST_PERIOD * (SHORTEST_PERIOD / LONGEST_PERIOD) ** steps
    angles = 2 * math.pi * torch.log(budgets_s.double() * 1e3)[:, None] / periods
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


class BudgetToken(nn.Module):
    """Sinusoidal features -> code [B, CODE_WIDTH] -> embedding [B, H] as long as the model's own ones.

    Args:
        hidden_size: H.
        embedding_rms: root mean square of the model's token embeddings; the budget's has the same.
    """

    embedding_rms: torch.Tensor

    def __init__(self, hidden_size: int, embedding_rms: float) -> None:
        super().__init__()
        self.encode = nn.Linear(2 * FREQUENCIES, CODE_WIDTH)
        self.embed = nn.Linear(CODE_WIDTH, hidden_size)
        self.register_buffer("embedding_rms", torch.tensor(embedding_rms))

    def code(self, features: torch.Tensor) -> torch.Tensor:
        """[B, 2 * FREQUENCIES] -> [B, CODE_WIDTH]; what stage 1 reads."""
        return nn.functional.gelu(self.encode(features))

    def token(self, code: torch.Tensor) -> torch.Tensor:
        """[B, CODE_WIDTH] -> [B, H], float32; what is behind the prompt."""
        raw = self.embed(code)
        return raw * torch.rsqrt(raw.pow(2).mean(dim=-1, keepdim=True) + 1e-8) * self.embedding_rms
