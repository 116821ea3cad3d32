"""Work whose passes are given what the first one computed of Python's values, recorded as a graph records it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from experiment_core_utils.engines.pass_constants import PassConstants
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.recorded_replays import RecordedReplays

WEIGHT = torch.tensor([2.0, 3.0])


def replayed(work: Callable[[torch.Tensor], torch.Tensor], constants: tuple[torch.Tensor, ...] = ()) -> Any:
    """What a recording of the work with [[1, 1], [5, 7], [9, 9]] gives for these numbers plus one."""
    states = torch.tensor([[1.0, 1.0], [5.0, 7.0], [9.0, 9.0]])
    with torch.inference_mode():
        replay = RecordedReplays().capture(lambda: work(states), constants)
        states.add_(1)
        return replay().tolist()


def test_what_the_host_reads_of_constant_inputs_is_read_once() -> None:
    sizes = torch.tensor([2, 1])

    def cut(states: torch.Tensor) -> torch.Tensor:
        ends = (torch.tensor([1, 2]) * sizes).cumsum(0)
        return states[: int(ends[0])] * WEIGHT

    assert replayed(cut, (sizes,)) == [[4.0, 6.0], [12.0, 24.0]]
    with pytest.raises(ConfigurationError, match="cannot be captured"):
        replayed(cut)


def test_a_mask_that_is_a_constant_selects_what_it_selected() -> None:
    def selected(states: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor([[True, False], [False, False], [True, True]])
        return states[mask] * 2

    def filled(states: torch.Tensor) -> torch.Tensor:
        # A list of the host has it tried without constants.
        found = states + torch.tensor([0.0, 1.0])
        found[states > 7] = 0.0
        return found

    # Of [[2, 2], [6, 8], [10, 10]].
    assert replayed(filled) == [[2.0, 3.0], [6.0, 0.0], [0.0, 0.0]]
    assert replayed(selected) == [4.0, 20.0, 20.0]
    with pytest.raises(ConfigurationError, match="cannot be captured"):
        replayed(lambda states: states[states > 5])


def test_a_decision_by_states_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be captured"):
        replayed(lambda states: states[: int(states.sum() > 0)])


def test_positions_that_are_written_one_after_the_other_are_constants() -> None:
    def shifted(states: torch.Tensor) -> torch.Tensor:
        places = torch.zeros(3)
        for index, value in enumerate((4, 0, 1)):
            places[index] = torch.tensor(value)
        return states + places[:, None]

    assert replayed(shifted) == [[6.0, 6.0], [6.0, 8.0], [11.0, 11.0]]


def test_memory_that_states_are_written_to_is_none() -> None:
    def written(states: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([2, 0, 1])
        # Its first values are constants, and so is what is read of it before.
        found = torch.zeros(4, 2)
        before = found + 1
        found[places.tolist()] = states
        return found + before

    assert replayed(written) == [[7.0, 9.0], [11.0, 11.0], [3.0, 3.0], [1.0, 1.0]]


def test_a_constant_that_is_changed_after_its_use_is_refused() -> None:
    def changed(states: torch.Tensor) -> torch.Tensor:
        factors = torch.tensor([1.0, 2.0])
        once = states * factors
        factors.add_(1)
        return once * factors

    with pytest.raises(ConfigurationError, match="changed after it was used"):
        replayed(changed)


def test_lists_of_the_host_are_anew_in_each_pass() -> None:
    def longer(states: torch.Tensor) -> torch.Tensor:
        chosen = torch.tensor([2]).tolist()
        chosen.append(0)
        return states[chosen]

    assert replayed(longer) == [[10.0, 10.0], [2.0, 2.0]]


def test_chance_and_empty_memory_are_no_constants() -> None:
    buffers = []

    def drawn() -> torch.Tensor:
        buffers.append(torch.empty(1))
        return torch.rand(5) + torch.arange(5)

    passed = PassConstants().without(drawn)
    first, second = passed(), passed()
    assert not torch.equal(first, second)
    assert buffers[1] is not buffers[2]


def test_memory_given_back_is_another_afterwards() -> None:
    work = PassConstants().without(lambda: sum(torch.full((3,), float(index)).sum() + 1 for index in range(4)))
    assert [float(work()), float(work())] == [22.0, 22.0]


@pytest.mark.parametrize("additions", [0, 2])
def test_a_pass_of_other_work_is_refused(additions: int) -> None:
    wanted = [1, additions]
    work = PassConstants().without(lambda: sum((torch.arange(3) for _ in range(wanted.pop(0))), torch.zeros(3)))
    with pytest.raises(ConfigurationError, match="not the same in each pass"):
        work()
