"""What the tables say is best: for a sample, at a budget, for similar prompts."""

import torch

from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import ActionSpace
from experiments.controller.training.environment import RewardRecipe
from experiments.controller.training.tabled_environment import TabledEnvironment, Tables

SPACE = ActionSpace(KnobSpace(("low", "high"), (4,), (3, 4), 4, 8), (1,), ((True, True),))
REWARD = RewardRecipe(latency_weight=0.0, over_budget_penalty=1.0)
# Two kinds of prompt, two samples of each.
PROMPTS = torch.tensor([[4.0, 0.0, 0.0, 0.0], [4.0, 0.1, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0], [0.0, 0.0, 0.1, 4.0]])
# Of (low, 3), (low, 4), (high, 3), (high, 4): the first kind needs the high tier, the second all blocks; the second
# sample of each was right at (low, 3) by luck.
ACCURACY = [[0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]]
LATENCY_S = [0.1, 0.2, 0.3, 0.4]


def environment() -> TabledEnvironment:
    shape = (4, 2, 1, 2)
    tables = Tables(
        prompts=PROMPTS,
        last=torch.zeros(4, 2, 1, 4),
        tokens=torch.zeros(4, 2, 1, 3, 4),
        budgets_s=torch.tensor([0.15, 0.35, 0.45], dtype=torch.float64),
        accuracy=torch.tensor(ACCURACY).reshape(shape),
        latency_s=torch.tensor([LATENCY_S] * 4).reshape(shape),
    )
    return TabledEnvironment(SPACE, tables, {}, budget_token_is_fixed=True)


def test_each_sample_has_its_own_best_choice_at_each_budget() -> None:
    # Of equal rewards the first: at 0.35 s the lucky samples take (low, 3).
    assert environment().trained_choices(REWARD, "per_sample").tolist() == [
        [[0, 0, 0], [1, 0, 0], [1, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 1], [0, 0, 1]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    ]


def test_a_table_by_budget_is_the_same_for_all_samples() -> None:
    # At 0.35 s (low, 3), (low, 4) and (high, 3) are right for half of the samples; at 0.45 s (high, 4) for all.
    expected = [[[0, 0, 0], [0, 0, 0], [1, 0, 1]]] * 4
    assert environment().trained_choices(REWARD, "per_budget").tolist() == expected


def test_similar_prompts_share_what_they_need() -> None:
    made = environment()
    first, second = [[0, 0, 0], [1, 0, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 1], [0, 0, 1]]
    # The likeness is of directions: a prompt ten times as long is the same.
    prompts = torch.tensor([[40.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert made.best_for_prompts(prompts, REWARD, neighbourhood=0.5).tolist() == [first, second]
    # With all four as neighbours it is the table by budget; a fifth of four is a sample alone.
    assert made.best_for_prompts(PROMPTS, REWARD, neighbourhood=1.0).equal(made.trained_choices(REWARD, "per_budget"))
    assert made.trained_choices(REWARD, "per_neighbours").equal(made.trained_choices(REWARD, "per_sample"))
