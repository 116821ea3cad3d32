"""The judge follows an engine's experts, and tells rounding from faults."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from experiment_core_utils.engines.engine_proof import (
    Computed,
    EngineRun,
    RouterTrace,
    TracedPasses,
    is_right,
    judged_by_modules,
    refuse_other_features,
    refuse_other_tokens,
)
from experiment_core_utils.models.common.judging import judging
from experiment_core_utils.primitives.errors import EngineRefused, GenerationFailed, KnobDidNotAct

SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.15, 0.35, 0.25]])


def test_a_trace_sees_the_choices_of_routers_alone_and_can_make_them() -> None:
    """The first token's choice is its own, the last one's is forced; a vocabulary of 5 is no row of experts."""
    trace = RouterTrace(4, keeps_scores=True)
    with trace.of_pass([torch.tensor([[1, 3]])]):
        weights, ids = torch.topk(SCORES, 2, dim=-1)
        SCORES.new_ones(2, 5).topk(1)
        own = SCORES.topk(1, dim=-1).indices
    assert ids.tolist() == [[1, 2], [1, 3]]
    assert weights.flatten().tolist() == pytest.approx([0.4, 0.3, 0.15, 0.25])
    assert own.tolist() == [[1], [2]]
    assert [chosen.tolist() for chosen in trace.chosen] == [ids.tolist(), own.tolist()]
    assert len(trace.scores) == 2
    with trace.of_pass():
        pass
    assert trace.chosen == trace.scores == []
    with RouterTrace(None).of_pass():
        assert torch.topk(SCORES, 1).indices.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("dtype", "engine", "modules", "expected"),
    [
        (torch.bfloat16, 0.019, 0.01, True),
        (torch.bfloat16, 0.021, 0.01, False),
        # Half the spacing is 0.0039: lucky modules count at least as much.
        (torch.bfloat16, 0.0077, 1e-6, True),
        (torch.bfloat16, 0.0079, 1e-6, False),
        (torch.float32, 1.5e-4, 2e-5, True),
        (torch.float32, 1.7e-4, 2e-5, False),
        # 8 times 16 times half the spacing are 7.6e-6.
        (torch.float32, 7.5e-6, 1e-7, True),
        (torch.float32, 7.7e-6, 1e-7, False),
        (torch.float32, float("nan"), 1e-7, False),
    ],
)
def test_an_engine_may_be_off_a_few_times_as_much_as_the_modules(
    dtype: torch.dtype, engine: float, modules: float, expected: bool
) -> None:
    assert is_right(engine, modules, dtype) is expected


EXACT = [torch.tensor([[3.0, 4.0]], dtype=torch.float64)] * 4


CLEAR = [0.1, 0.4, 0.3, 0.2]
# Keys and values of one block with one head, of two prompt tokens and three after them.
KEYS = torch.tensor([[[3.0, 4.0], [0.0, 2.0], [6.0, 8.0], [1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)


class Two(nn.Module):
    """Scores of four experts for one token, in two precisions, then logits: what a model's passes come to."""

    def __init__(self, rounded: Sequence[float], exact: Sequence[float]) -> None:
        super().__init__()
        self.rounded, self.exact = torch.tensor([rounded]), torch.tensor([exact], dtype=torch.float64)

    def repeat(self, passes: TracedPasses) -> Computed:
        is_judge = torch.zeros(1).half().dtype != torch.float16
        with passes.next():
            torch.topk(self.exact if is_judge else self.rounded, 2, dim=-1)
        off = 0.0 if is_judge else 0.05
        return Computed([logits + off for logits in EXACT], [(KEYS, KEYS * (1 + off / 5))])


def judge(
    off: Sequence[float],
    chosen: Sequence[int] = (1, 2),
    rounded: Sequence[float] = CLEAR,
    exact: Sequence[float] = CLEAR,
    keys: torch.Tensor = KEYS,
    values: torch.Tensor = KEYS,
) -> None:
    """Logits of four positions, each off by so much of its norm of 5; the modules' are off by 0.05 * sqrt(2) / 5, and
    their values by 1 %.
    """
    logits = [good + torch.tensor([[0.0, 5 * by]]) for good, by in zip(EXACT, off, strict=True)]
    run, model = EngineRun(Computed(logits, [(keys, values)]), 2, [[torch.tensor([chosen])]]), Two(rounded, exact)
    names, dtype = ("first engine", "second engine"), torch.bfloat16
    found = judged_by_modules(names, run, judging(model, dtype), model.repeat, 4, dtype)
    assert found.positions == 4
    assert found.modules == pytest.approx(0.01414, rel=1e-3)
    assert found.engine == pytest.approx(sum(off) / 4)


def test_the_mean_over_positions_decides() -> None:
    """Its bound is 0.0283; a single position may be off by more. The stage is the first that is wrong."""
    judge([0.0, 0.1, 0.0, 0.01])
    with pytest.raises(EngineRefused, match="^the second engine is off by 0.03 .* in bfloat16 are off by 0.0141 "):
        judge([0.0, 0.1, 0.0, 0.02], [2, 1])
    with pytest.raises(EngineRefused, match="^the first engine is off by 0.03 "):
        judge([0.1, 0.0, 0.0, 0.02])
    with pytest.raises(EngineRefused, match="off by nan"):
        judge([0.0, float("nan"), 0.0, 0.0])


def test_a_fault_shows_in_the_keys_and_values_of_some_tokens() -> None:
    """The roots of the mean squares of (0, 3 %, 0) and of (0, 4 %, 0) are 1.73 and 2.31 %; 2 % are allowed in values.

    The modules' keys are exact, so that half the spacing of bfloat16 counts, twice: 0.78 %.
    """
    by = torch.ones(1, 5, 1, dtype=torch.float64)
    by[0, 3] = 1.03
    judge([0.0] * 4, values=KEYS * by)
    by[0, 3] = 1.04
    with pytest.raises(
        EngineRefused, match="^the second engine is off by 0.0231 .* by 0.01 .*over the tokens' values in"
    ):
        judge([0.0] * 4, values=KEYS * by)
    by[0, 3], by[0, 0] = 1, 1.02
    with pytest.raises(
        EngineRefused, match="^the first engine is off by 0.0141 .* off by 0 .*tokens' keys in active block 0"
    ):
        judge([0.0] * 4, keys=KEYS * by)


def test_another_expert_may_be_chosen_only_where_rounding_decides() -> None:
    """By logarithms: experts 2 and 3 are 0.34 % apart, and rounding moves a score by 0.1 %, which allows 0.4 %."""
    near, rounded = [0.1, 0.4, 0.3, 0.299], [0.1, 0.4, 0.3003, 0.299]
    judge([0.0] * 4, [1, 3], rounded, near)
    with pytest.raises(EngineRefused, match="^an engine chose experts for 1 of 1 tokens in block 0 "):
        judge([0.0] * 4, [1, 3], [0.1, 0.4, 0.3001, 0.299], near)
    with pytest.raises(EngineRefused, match="whose scores are below"):
        judge([0.0] * 4, [0, 1], rounded, near)


def test_features_are_judged_by_their_rows() -> None:
    """One row of four is off by its norm, the mean by a quarter; the modules' rows are off by 2 and 0 %."""
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0], [6.0, 8.0]], dtype=torch.float64)
    modules = exact * torch.tensor([[1.02], [1.0], [0.98], [1.0]])
    refuse_other_features("tower", exact * 1.019, modules, exact, torch.bfloat16)
    with pytest.raises(EngineRefused, match="^the tower is off by 0.25 from the modules in float32, .* by 0.01 "):
        refuse_other_features(
            "tower", exact * torch.tensor([[1.0], [2.0], [1.0], [1.0]]), modules, exact, torch.bfloat16
        )


def test_logits_that_overflow_are_no_fault_of_the_engine() -> None:
    model = Two(CLEAR, CLEAR)

    def repeat(passes: TracedPasses) -> Computed:
        is_judge = torch.zeros(1).half().dtype != torch.float16
        found = model.repeat(passes)
        return Computed([logits if is_judge else logits * float("inf") for logits in found.logits], found.cache)

    run = EngineRun(Computed(EXACT, [(KEYS, KEYS)]), 2, [[torch.tensor([[1, 2]])]])
    with pytest.raises(GenerationFailed, match="^logits are not finite$"):
        judged_by_modules(("a", "b"), run, judging(model, torch.float16), repeat, 4, torch.float16)


ROW = torch.tensor([[1.0, -2.0, 3.0, 0.5], [0.0, 4.0, 3.9999, -1.0]])


def test_tokens_of_the_untouched_model_may_change_places_in_a_tie_only() -> None:
    """The second row's logits have a root mean square of 2.87, so that float32 explains 16 x 16 x 6e-8 x 2.87."""
    refuse_other_tokens("own", (2, 1), (2, 1), ROW, 0.0, torch.float32)
    words = r"own: .* its token 1 is 2, .* generate\(\) is 1, whose logit is 9.99e-05 larger"
    with pytest.raises(KnobDidNotAct, match=words):
        refuse_other_tokens("own", (2, 2), (2, 1), ROW, 0.0, torch.float32)
    # bfloat16 explains 16 x 0.0039 x 2.87, and an engine's error of 1e-5 explains 16 x 1e-5 x 2.87.
    refuse_other_tokens("own", (2, 2), (2, 1), ROW, 0.0, torch.bfloat16)
    refuse_other_tokens("own", (2, 2), (2, 1), ROW, 1e-5, torch.float32)
    with pytest.raises(KnobDidNotAct, match="its token 0 is 0"):
        refuse_other_tokens("own", (0, 1), (2, 1), ROW, 0.0, torch.bfloat16)
    with pytest.raises(KnobDidNotAct, match=r"it gives 1 tokens, and its own generate\(\) 2"):
        refuse_other_tokens("own", (2,), (2, 1), ROW, 0.0, torch.bfloat16)
