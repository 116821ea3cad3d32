"""Order of the stages, ends of a generation, and which spans between marks become which times."""

from dataclasses import dataclass

import pytest
import torch

from experiment_core_utils.e_inference import generate_greedily, run_staged
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import HostMarks
from experiment_core_utils.primitives.records import StagedRun
from tests.scripted_model import EOS, ScriptedModel

TEXT = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
PICTURE = {**TEXT, "pixel_values": torch.zeros(1, 2, 3, 4, 4)}


@dataclass
class MarksAmongCalls:
    """Writes each mark into the list of the model's calls."""

    calls: list[str]

    def mark(self) -> None:
        self.calls.append("|")

    def seconds(self) -> list[float]:
        return []


def test_the_order_of_the_stages_and_of_the_marks_between_them() -> None:
    model = ScriptedModel(script=(1, 2, 3, EOS))
    assert generate_greedily(model, PICTURE, 16, MarksAmongCalls(model.calls)) == ([1, 2, 3, EOS], True)
    assert model.calls == [
        "|", "encode_image", "|", "prefill features", "|", "decode_step 1", "|", "decode_step 2", "|", "decode_step 3",
        "|",
    ]  # fmt: skip


def test_without_a_picture_there_is_no_mark_after_the_vision_stage() -> None:
    model = ScriptedModel(script=(1, EOS))
    assert generate_greedily(model, TEXT, 16, MarksAmongCalls(model.calls)) == ([1, EOS], False)
    assert model.calls == ["|", "encode_image", "prefill None", "|", "decode_step 1", "|"]


@pytest.mark.parametrize(
    ("limit", "tokens", "ended"),
    [(1, (1,), False), (2, (1, 2), False), (3, (1, 2, EOS), True), (4, (1, 2, EOS), True)],
)
def test_a_generation_ends_at_end_of_sequence_or_at_the_limit(limit: int, tokens: tuple[int, ...], ended: bool) -> None:
    model = ScriptedModel(script=(1, 2, EOS, 4))
    run = run_staged(model, TEXT, limit)
    assert (run.token_ids, run.ended) == (tokens, ended)
    # n tokens take n - 1 decode steps.
    assert sum(call.startswith("decode_step") for call in model.calls) == len(tokens) - 1 == len(run.inter_token_s)


def test_every_end_of_sequence_token_ends() -> None:
    model = ScriptedModel(script=(1, 7, 2), eos_token_ids=frozenset({EOS, 7}))
    assert run_staged(model, TEXT, 16).token_ids == (1, 7)


@pytest.mark.parametrize("script", [(EOS, 1), (1, EOS)])
def test_one_token_has_no_decode(script: tuple[int, ...]) -> None:
    run = run_staged(ScriptedModel(script=script), PICTURE, 1)
    assert len(run.token_ids) == 1
    assert run.ended == (script[0] == EOS)
    assert (run.decode_s, run.tpot_s, run.inter_token_s) == (None, None, ())
    assert run.vision_s is not None
    assert run.total_s == run.vision_s + run.prefill_s == run.ttft_s


def test_no_picture_has_no_vision_time() -> None:
    run = run_staged(ScriptedModel(), TEXT, 16)
    assert run.vision_s is None
    assert run.decode_s is not None
    assert run.total_s == pytest.approx(run.prefill_s + run.decode_s)
    assert run.ttft_s == run.prefill_s


def test_each_stage_gets_its_own_time_and_the_stages_add_up() -> None:
    model = ScriptedModel(script=(1, 2, 3, EOS), vision_s=0.06, prefill_s=0.03, decode_s=0.01)
    run = run_staged(model, PICTURE, 16)
    assert run.vision_s is not None and run.decode_s is not None and run.tpot_s is not None
    # Sleeps last at least as long as asked and, here, less than the next longer one.
    assert 0.06 <= run.vision_s < 0.09
    assert 0.03 <= run.prefill_s < 0.06
    assert 0.03 <= run.decode_s < 0.06  # three steps of 0.01
    assert all(0.01 <= gap < 0.03 for gap in run.inter_token_s)
    assert run.decode_s == pytest.approx(sum(run.inter_token_s))
    assert run.tpot_s == pytest.approx(run.decode_s / 3)
    assert run.total_s == pytest.approx(run.vision_s + run.prefill_s + run.decode_s)


def test_times_of_a_run_by_hand() -> None:
    run = StagedRun((5, 6, 7), 0.25, 0.5, 0.125, 0.875, (0.0625, 0.0625), ended=False)
    assert run.tpot_s == 0.0625  # 0.125 over 2 steps
    assert run.ttft_s == 0.75


def test_generation_keeps_no_graph() -> None:
    weight = torch.ones(1, requires_grad=True)

    class Trainable(ScriptedModel):
        def _logits(self, token: int) -> torch.Tensor:
            logits = super()._logits(token) * weight
            assert not logits.requires_grad
            return logits

    model: StagedModel = Trainable()
    assert generate_greedily(model, TEXT, 2, HostMarks()) == ([1, 2], False)
