"""Accuracy and cheap stand-ins of sets of blocks, on a tiny random model and on what can be worked out by hand."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, VisionTarget
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.interface import StagedModel, own_setting
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.registry import get_metric, load_task
from experiments.block_importance.answers import AnswerScorer, DrawnTask, draw_task
from experiments.block_importance.from_checkout.picture_scorers import (
    answer_tokens,
    expected_answer,
    gradient_importances,
)
from experiments.block_importance.importance import leave_one_out
from experiments.block_importance.proxies import activation_changes
from tests.engines.test_answer_ends import CHATML
from tests.models.tiny_checkpoints import write_checkpoint

ONE_TILE = VisionTarget("tokens288", None, 288, CropRange(1, 1))


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> MolmoeStagedModel:
    config = parse_config(["--model_path", str(tiny_checkpoint), "--device", "cpu", "--precision", "float32"])
    model = find_model(config.model.model_path).load(config.model, torch.device("cpu"))
    assert isinstance(model, MolmoeStagedModel)
    return model


class ShortTask:
    """Three questions of `reference_counting`, whose references are what the model itself says at some setting."""

    metric, max_new_tokens, split = "ansl_em", 3, "validation"
    source: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, name: str, ids: Sequence[int]) -> None:
        self.name = name
        self._task = load_task("reference_counting", "validation")
        self.answers: dict[int, str] = {}
        self.ids = ids

    def __len__(self) -> int:
        return len(self._task)

    def __getitem__(self, index: int) -> Sample:
        sample = self._task[index]
        answer = self.answers.get(index)
        return sample if answer is None else Sample(**{**vars(sample), "answers": (answer,)})

    def prompt(self, sample: Sample) -> str:
        return self._task.prompt(sample)

    def question_type(self, index: int) -> str:
        return self._task.question_type(index)


def answers_with(model: MolmoeStagedModel, task: ShortTask, blocks: tuple[int, ...]) -> dict[int, str]:
    model.apply(Setting.of(vision=ONE_TILE, top_k=4, num_active_blocks=RunningBlocks.of(blocks)))
    texts = {}
    for index in task.ids:
        sample = task[index]
        inputs = model.prepare(sample, task.prompt(sample), ONE_TILE.crops).inputs
        texts[index] = model.decode_text(run_staged(model, inputs, task.max_new_tokens).token_ids)
    return texts


def of_one_tile(model: StagedModel) -> Setting:
    return own_setting(model).replaced(vision=ONE_TILE)


def drawn(model: MolmoeStagedModel | TransformersModel, task: ShortTask) -> DrawnTask:
    return draw_task(model, task, task.ids, 10**9)


def test_a_set_of_blocks_scores_what_the_model_answers_with_it(tiny: MolmoeStagedModel) -> None:
    task = ShortTask("short", (0, 1, 4))
    task.answers = answers_with(tiny, task, (0, 2, 3))
    scorer = AnswerScorer(tiny, [drawn(tiny, task)], of_one_tile(tiny), 2)
    right, other = scorer.measured([(0, 2, 3), (0, 1)])
    assert right["short"].values == (1.0, 1.0, 1.0)
    metric = get_metric("ansl_em")
    assert list(other["short"].values) != list(right["short"].values)
    assert all(0 <= value <= metric.best for value in other["short"].values)
    assert right["short"].image_ids == tuple(task[index].image_id for index in task.ids)
    assert scorer.failed == {"short": set()}


def test_leaving_out_block_0_is_passing_its_input_on(tiny: MolmoeStagedModel) -> None:
    """A model whose block 0 adds nothing scores the same without it."""
    task = ShortTask("short", (0, 1))
    block = tiny.decoder_blocks[0]
    kept = {name: value.clone() for name, value in block.state_dict().items()}
    with torch.no_grad():
        block.self_attn.o_proj.weight.zero_()
        block.mlp.experts.down_proj.zero_()
    try:
        task.answers = answers_with(tiny, task, (0, 1, 2, 3))
        scores, whole = leave_one_out(AnswerScorer(tiny, [drawn(tiny, task)], of_one_tile(tiny), 2), 4)
        changes = activation_changes(tiny, [drawn(tiny, task)], of_one_tile(tiny))
        gradients = gradient_importances(tiny, [drawn(tiny, task)], of_one_tile(tiny))
    finally:
        block.load_state_dict(kept)
    assert whole.value == 1.0
    assert scores[0].value == 0.0
    assert any(scores[each].value > 0 for each in (1, 2, 3))
    assert changes[0]["short"].values == pytest.approx((0.0, 0.0), abs=1e-6)
    assert gradients[0]["short"].values == (0.0, 0.0)
    for each in (1, 2, 3):
        assert min(changes[each]["short"].values) > 0.001
        assert min(gradients[each]["short"].values) > 0


def test_the_change_at_the_last_position_is_its_cosine(tiny: MolmoeStagedModel) -> None:
    task = ShortTask("short", (5,))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = tiny.decoder_blocks[2].register_forward_hook(lambda _, given, output: seen.append((given[0], output)))
    found = activation_changes(tiny, [drawn(tiny, task)], of_one_tile(tiny), "last")
    everywhere = activation_changes(tiny, [drawn(tiny, task)], of_one_tile(tiny))
    handle.remove()
    given, output = seen[0][0][0, -1], seen[0][1][0, -1]
    cosine = float(given @ output / given.norm() / output.norm())
    assert found[2]["short"].values[0] == pytest.approx(1 - cosine, abs=1e-5)
    assert everywhere[2]["short"].values != found[2]["short"].values


def test_the_gradient_predicts_a_small_change_of_the_loss(tiny: MolmoeStagedModel) -> None:
    """With a block's addition scaled by 1 - e, the answer's loss changes by e times its importance."""
    task = ShortTask("short", (6,))
    task.answers = {6: "7"}
    importance = gradient_importances(tiny, [drawn(tiny, task)], of_one_tile(tiny))[1]["short"].values[0]
    share = 0.01

    def loss(scale: float) -> float:
        handle = tiny.decoder_blocks[1].register_forward_hook(
            lambda _, given, output: given[0] + scale * (output - given[0])
        )
        try:
            with torch.inference_mode():
                sample = task[6]
                inputs = tiny.prepare(sample, task.prompt(sample), ONE_TILE.crops).inputs
                answer = tiny.processor.tokenizer(" 7", add_special_tokens=False)["input_ids"]
                logits, state = tiny.prefill(inputs, tiny.encode_image(inputs))
                total = 0.0
                for token in [*answer, min(tiny.eos_token_ids)]:
                    total -= float(logits.double().log_softmax(dim=-1)[0, token])
                    logits = tiny.decode_step(torch.tensor([[token]]), state)
                return total
        finally:
            handle.remove()

    tiny.apply(Setting.of(vision=ONE_TILE, top_k=4, num_active_blocks=RunningBlocks.of((0, 1, 2, 3))))
    slope = (loss(1 - share) - loss(1 + share)) / (2 * share)
    assert abs(slope) == pytest.approx(importance, rel=0.02)


def test_the_expected_answer_is_the_assistants_where_there_are_turns(tmp_path: Path) -> None:
    """ChatML ends in a line break, OLMoE's template in a colon, behind which there is a space."""
    for family, answer in (("chatml", "7"), ("olmoe", " 7")):
        folder = write_checkpoint("olmoe", tmp_path / family)
        if family == "chatml":
            (folder / "chat_template.jinja").write_text(CHATML)
        config = parse_config(["--model_path", str(folder), "--device", "cpu", "--execution", "eager"])
        model = find_model(config.model.model_path).load(config.model, torch.device("cpu"))
        assert isinstance(model, TransformersModel)
        task = ShortTask("short", (6,))
        task.answers = {6: "7"}
        inputs = model.prepare(task[6], task.prompt(task[6]), ONE_TILE.crops).inputs
        tokens = answer_tokens(model, task, task[6], inputs, ONE_TILE)  # type: ignore[arg-type]
        tokenizer = model.requests.tokenizer
        assert tokenizer.decode(tokens[:-1]) == answer
        assert tokens[-1] in model.ends.token_ids
        importance = gradient_importances(model, [drawn(model, task)], of_one_tile(model))
        assert any(found["short"].values[0] > 0 for found in importance.values())


def test_what_a_perfect_model_would_say() -> None:
    common = {"sample_id": 0, "image_id": "p", "question": "?", "image": None, "question_type": ""}
    assert expected_answer(Sample(**common, answers=("two", "2", "2"))) == "2"
    assert expected_answer(Sample(**common, answers=("red",), options=("blue", "red"), answer_index=1)) == "B"
