"""In: how many tokens prompts share, how many a text has, how many rows are behind it; out: what each sees, and where.

All rows stand at the place behind the text, each as if it alone were there.
"""

import torch


def suffix_mask(shared: int, tokens: int, rows: int) -> torch.Tensor:
    """[S + R, shared + S + R] on the host: what each of S tokens and R rows behind `shared` tokens sees."""
    seen = torch.ones(tokens + rows, shared + tokens + rows, dtype=torch.bool)
    seen[:, shared:].tril_()
    seen[tokens:, shared + tokens :] = torch.eye(rows, dtype=torch.bool)
    return seen


def suffix_positions(shared: int, tokens: int, rows: int) -> torch.Tensor:
    """[S + R] on the host."""
    return torch.arange(shared, shared + tokens + rows).clamp_(max=shared + tokens)
