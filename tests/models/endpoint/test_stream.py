"""What becomes of a streamed answer: its tokens, the marks, and what is not known of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from experiment_core_utils.measuring.staged_runs import staged_run
from experiment_core_utils.models.endpoint.chunks import Choice, Chunk, Delta
from experiment_core_utils.models.endpoint.client import Bounds
from experiment_core_utils.models.endpoint.stream import ArrivingAnswer, PieceIds, ServedEnds
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.records.requests import StagedRun, TimedTokens


class CountedMarks:
    """Mark number n is set at 2**n seconds, so that every interval tells which marks it lies between."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._count = 0

    def mark(self) -> None:
        self.times_s.append(2.0**self._count)
        self._count += 1

    def unmark(self) -> None:
        self.times_s.pop()

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


def chunk(content: str | None = None, finish: str | None = None, **more: Any) -> Chunk:
    return Chunk(choices=[Choice(delta=Delta(content=content, **more), finish_reason=finish)])


def usage(tokens: int, reasoning: int | None = None) -> Chunk:
    details = {"reasoning_tokens": reasoning}
    return Chunk(usage={"prompt_tokens": 7, "completion_tokens": tokens, "completion_tokens_details": details})


def received(chunks: Sequence[Chunk], marks: Marks, ids: PieceIds) -> TimedTokens:
    arriving = ArrivingAnswer("m at here:1", marks, Bounds(5))
    for each in chunks:
        arriving.take(each)
    return arriving.timed_tokens(ids, "m")


def run_of(chunks: Sequence[Chunk]) -> tuple[StagedRun, str]:
    """The run and its text."""
    marks, ids = CountedMarks(), PieceIds()
    marks.mark()
    answer = received(chunks, marks, ids)
    ends = ServedEnds(text_of=ids.text)
    return staged_run(answer, marks.seconds(), ends.up_to_end(answer.token_ids)[1]), ends.text(answer.token_ids)


def test_each_piece_is_a_token_and_the_counted_end_another() -> None:
    """Marks at 1 (sent), 2, 4 (pieces) and 8 (end)."""
    run, text = run_of([chunk(), chunk("four"), chunk("teen"), chunk(finish="stop"), usage(3)])
    assert (text, run.ended, len(run.token_ids), run.prompt_tokens) == ("fourteen", True, 3, 7)
    assert (run.prefill_s, run.vision_s, run.first_token_s) == (None, None, 1.0)
    assert (run.ttft_s, run.inter_token_s, run.decode_s, run.tpot_s, run.total_s) == (1.0, (2.0, 4.0), 6.0, 3.0, 7.0)


def test_an_end_that_is_not_counted_is_no_token() -> None:
    run, text = run_of([chunk("four"), chunk("teen"), chunk(finish="stop"), usage(2)])
    assert (text, run.ended, len(run.token_ids)) == ("fourteen", True, 2)
    assert (run.inter_token_s, run.total_s) == ((2.0,), 3.0)


def test_the_limit_is_no_end() -> None:
    run, _ = run_of([chunk("four"), chunk("teen", finish="length"), usage(2)])
    assert (run.ended, run.inter_token_s, run.total_s) == (False, (2.0,), 3.0)


def test_several_tokens_in_a_piece_have_a_mean_time_and_none_between_them() -> None:
    """Five tokens in two pieces: the decode time of 2 + 4 s is that of four steps."""
    run, text = run_of([chunk("four"), chunk("teen"), chunk(finish="length"), usage(5)])
    assert (text, len(run.token_ids), run.ended) == ("fourteen", 5, False)
    assert (run.inter_token_s, run.decode_s, run.tpot_s, run.total_s) == ((), 6.0, 1.5, 7.0)


def test_a_whole_answer_in_one_piece_has_no_decode_time() -> None:
    run, text = run_of([chunk("fourteen"), chunk(finish="length"), usage(5)])
    assert (text, len(run.token_ids)) == ("fourteen", 5)
    assert (run.inter_token_s, run.decode_s, run.tpot_s, run.ttft_s, run.total_s) == ((), None, None, 1.0, 1.0)


def test_without_usage_pieces_count_as_tokens() -> None:
    run, _ = run_of([chunk("four"), chunk("teen"), chunk(finish="stop")])
    assert (len(run.token_ids), run.prompt_tokens, run.inter_token_s) == (2, None, (2.0,))


def test_an_answer_without_text_is_the_end_alone() -> None:
    run, text = run_of([chunk(), chunk(finish="stop"), usage(1)])
    assert (text, run.ended, len(run.token_ids), run.ttft_s, run.decode_s) == ("", True, 1, 1.0, None)


def test_thinking_is_told_from_the_answer() -> None:
    marks, ids = CountedMarks(), PieceIds()
    chunks = [chunk(reasoning_content="7 + 7"), chunk(reasoning_content="!"), chunk("14"), chunk(finish="stop")]
    answer = received(chunks, marks, ids)
    ends = ServedEnds(text_of=ids.text)
    assert ends.text(answer.token_ids) == "<think>7 + 7!</think>14"
    assert (ends.answer(answer.token_ids), ends.thinking_tokens(answer.token_ids)) == ("14", 3)


def test_thinking_that_is_not_sent_is_no_part_of_the_time_per_token() -> None:
    """Of 103 tokens 100 are thinking before the first piece; two pieces and the end are the others."""
    run, text = run_of([chunk("four"), chunk("teen"), chunk(finish="stop"), usage(103, 100)])
    assert (text, len(run.token_ids), run.hidden_tokens, run.ended) == ("fourteen", 3, 100, True)
    assert (run.inter_token_s, run.tpot_s) == ((2.0, 4.0), 3.0)
    # The limit may come while it thinks.
    run, text = run_of([chunk(finish="length"), usage(6, 6)])
    assert (text, len(run.token_ids), run.hidden_tokens, run.ended, run.tpot_s) == ("", 1, 6, False, None)


@pytest.mark.parametrize("thinking", [[chunk(reasoning_content="7 + 7")], [chunk("<think>7 + 7"), chunk("</think>")]])
def test_thinking_that_is_sent_is_not_hidden(thinking: list[Chunk]) -> None:
    run, _ = run_of([*thinking, chunk("14"), chunk(finish="length"), usage(len(thinking) + 1, len(thinking))])
    assert (len(run.token_ids), run.hidden_tokens) == (len(thinking) + 1, 0)


def test_the_same_text_has_the_same_ids_however_it_came() -> None:
    ids = PieceIds()
    one, other = (
        received([*map(chunk, pieces), chunk(finish="length"), usage(4)], CountedMarks(), ids).token_ids
        for pieces in (("four", "teen"), ("f", "ourt", "een"))
    )
    assert one == other and ids.text(one) == "fourteen"
