"""States recorded picture by picture, by engines and by modules, against each sample's own prefill."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.models.molmoe.eager.paused_prefill import trace_prefill
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.progress import sample_lines
from experiment_core_utils.tasks.interface import Sample
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.training.recorded_states import RecordedStates, questions_by_picture, record_states
from tests.models.molmoe.executions import eager_and_graph

KNOBS = KnobSpace(("low", "medium", "high"), (2, 4), (3, 4), num_total_blocks=4, first_top_k=4)
SPACE = action_space(KNOBS, BlockChoice(scores={1: 0.1, 2: 0.2, 3: 0.3}), pauses=(1, 2, 4))
BUDGETS_S = (0.1, 0.4, 2.0)
WIDTH = 32
RED, BLUE = (Image.new("RGB", size, colour) for size, colour in (((500, 400), "red"), ((300, 350), "blue")))


@dataclass(eq=False)
class Scripted:
    """A task of (picture, prompt); a string in place of the picture is why it cannot be read."""

    name: str
    questions: list[tuple[Image.Image | str | None, str]]
    split: str = "validation"
    reads: list[int] = field(default_factory=list)

    def __getitem__(self, index: int) -> Sample:
        picture, question = self.questions[index]
        self.reads.append(index)
        if isinstance(picture, str):
            raise SampleError(picture)
        return Sample(index, str(index), question, ("a",), picture, "kind")

    def prompt(self, sample: Sample) -> str:
        return sample.question


def tasks() -> tuple[Any, Any]:
    return (
        Scripted("first", [(RED, "Which colour?"), (BLUE, "And this one, which is another?"), ("gone", "?")]),
        Scripted("second", [(None, "No picture at all"), (BLUE.copy(), "Blue?"), (RED.copy(), "word " * 3000)]),
    )


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path) -> dict[str, MolmoeStagedModel]:
    return eager_and_graph(tiny_checkpoint)


@pytest.fixture(scope="module")
def networks() -> TwoStageNetworks:
    return TwoStageNetworks(SPACE, WIDTH, embedding_rms=0.2, seed=2)


def recorded(model: MolmoeStagedModel, networks: TwoStageNetworks, output: io.StringIO) -> RecordedStates:
    first, second = tasks()
    sample_keys = [(second, 1), (first, 0), (first, 2), (second, 2), (first, 1), (second, 0)]
    progress = sample_lines("recording states", len(sample_keys), output)
    return record_states(model, sample_keys, networks, BUDGETS_S, {"name": "tiny"}, progress)


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_states_are_those_of_each_sample_alone_in_the_order_requested(
    models: dict[str, MolmoeStagedModel], networks: TwoStageNetworks, execution: str
) -> None:
    model, output = models[execution], io.StringIO()
    states = recorded(model, networks, output)
    assert states.keys == (("second", 1), ("first", 0), ("first", 1), ("second", 0))
    assert states.last.shape == (4, 3, 3, WIDTH) and states.tokens.shape == (4, 3, 3, 3, WIDTH)
    # 3000 words are longer than the context, which is no reason against the other question about that picture.
    assert set(states.failed) == {"first 2", "second 2"} and states.failed["first 2"] == "gone"
    assert states.failed["second 2"].startswith("sample 2: its prompt of")
    first, *_, last = output.getvalue().splitlines()
    assert first == "recording states: 0/6 samples; 00:00 elapsed, ? left"
    assert last.startswith("recording states: 6/6 samples; ") and last.endswith(", 00:00 left")
    by_name, eager = {task.name: task for task in tasks()}, models["eager"]
    with torch.no_grad(), eager.restored_afterwards():
        rows = networks.budget_token(torch.tensor(BUDGETS_S, dtype=torch.float64))
        for place, (name, index) in enumerate(states.keys):
            sample = by_name[name][index]
            for at, tier in enumerate(KNOBS.tiers):
                inputs = eager.prepare(sample, sample.question, tier_target(tier).crops).inputs
                expected = trace_prefill(eager.model, inputs["input_ids"], eager.encode_image(inputs), 4, rows)
                pauses = [pause - 1 for pause in SPACE.pauses]
                torch.testing.assert_close(states.last[place, at], expected.last[pauses], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(states.tokens[place, at], expected.appended[pauses], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_modules_run_where_they_alone_are_requested_and_the_setting_stays(
    models: dict[str, MolmoeStagedModel], networks: TwoStageNetworks, execution: str
) -> None:
    model, ran = models[execution], []
    model.model.set_knobs(2, (0, 1, 3))
    parts = (model.model.all_blocks[0], model.model.model.vision_tower)
    hooks = [part.register_forward_hook(lambda module, *_: ran.append(type(module).__name__)) for part in parts]
    recorded(model, networks, io.StringIO())
    for hook in hooks:
        hook.remove()
    assert model.active_setting == (2, (0, 1, 3))
    model.model.reset_knobs()
    assert ("OlmoeDecoderLayer" in ran) == ("MolmoeVisionTower" in ran) == (execution == "eager")
    assert model.prompt_traces.reason is None


def test_samples_are_put_together_by_their_pixels(models: dict[str, MolmoeStagedModel]) -> None:
    first, second = tasks()
    sample_keys = [(first, 1), (second, 0), (first, 0), (second, 1), (first, 2), (first, 1)]
    pictures, failed = questions_by_picture(models["eager"], sample_keys)
    keys = [[question.key for question in questions] for questions in pictures]
    assert keys == [[("first", 1), ("second", 1)], [("second", 0)], [("first", 0)]]
    assert failed == {("first", 2): "gone"} and first.reads == [1, 0, 2]
    assert pictures[0][1].read().question == "Blue?"
