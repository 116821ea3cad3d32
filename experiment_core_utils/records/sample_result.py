"""One sample of a setting's result: its request, answer, score, times and energy, or how it failed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import LibraryFault, SampleError
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.records.json_record import (
    Count,
    Delay,
    Knob,
    Number,
    Positive,
    Record,
    Text,
    TextOrNumber,
    Time,
)
from experiment_core_utils.records.quantities import compute, energy, latency
from experiment_core_utils.records.quantities.quantity import quantities_of
from experiment_core_utils.records.result_files import saved_traceback


class ContinuationScore(Record):
    """How likely a model finds a given continuation of its prompt."""

    logprob: Number  #: sum of the natural log-probabilities of its tokens
    num_tokens: Count  #: how many these are
    is_greedy: bool  #: whether each of them is the likeliest in its place


class Metadata(Record):
    """What a sample's answer is scored against, and what the task says of the sample."""

    question: Text = ""  #: the question without the prompt's template
    answers: list[Text]  #: reference answers
    image_id: TextOrNumber  #: name of the picture
    options: list[Text] = []  #: the choices, in the order of their letters; [] for none
    #: which option is right, counted from 0; None if not known, or there are no options
    answer_index: Count | None = None
    prompt: Text | None = None  #: the prompt before a chat template


class DecoderKnobValues(Record):
    """The published knobs of the decoder, of a setting and of each of its samples."""

    #: requested experts per token, in the blocks after the first with experts; None if a dense model
    top_k: Knob | None
    num_active_blocks: Knob | None  #: requested blocks, block 0 counted; None if a server shows none


class SampleRequest(DecoderKnobValues):
    """The request of a sample at a setting: its knobs and its picture's crops."""

    sample_id: Count  #: position in the task's split
    #: N of a token target; for a fraction so much of what the model takes by itself, rounded; else
    #: `theoretical_vision_tokens`; None if no picture and no number of tokens
    target_vision_tokens: Count | None = None
    target_crops: Count | None  #: crops that the rule gives; None if no picture, or one that is not cut
    actual_num_crops: Count | None  #: crops, read off the tensors; None if no picture, or one that is not cut
    actual_tiling: list[Count] | None = None  #: [rows, columns], read off the tensors; None if no picture
    actual_image_size: list[Count] | None = None  #: canvas of that tiling; None if no picture


class TheoreticalGeometry(Record):
    """What the rule gives for a picture."""

    #: crops that the rule gives; at the top level those of the geometry that most samples have; None if no picture
    theoretical_num_crops: Count | None = None
    theoretical_tiling: list[Count] | None = None  #: [rows, columns] that it gives; None if no picture
    theoretical_image_size: list[Count] | None = None  #: canvas for it, [height, width] in pixels; None if no picture
    theoretical_vision_tokens: Count | None = None  #: (crops + 1) x 144 for it; None if no picture


class SampleScore(Record):
    """How a sample's answer is scored."""

    #: score of the answer, from 0 to `metric_best`; 0 where it could not be parsed; None if the metric has none (CIDEr
    #: of fewer than two pictures; a metric of lmms-eval that fails, or is no number from 0 to 1)
    accuracy: Positive | None
    #: how the answer was read: `text` where any text is one, otherwise a word of the metric's, such as
    #: `letter` or `unparsed`
    parse_status: str | None = None
    #: further numbers of the same answer by name, such as `anls` and `em`; `{}` for none
    score_details: dict[str, Any] | None = None


class RunTimes(latency.StageTimes):
    """The times of one run in milliseconds."""

    T_LLM_prefill: Time | None  #: as above, of this run; None if a server does not show it
    T_total: Time  #: as above, of this run
    #: list of the times between neighbouring tokens; `[]` for one token, and where several came at once
    T_inter_token: list[Delay]
    #: how many settings ran this sample before in the same round; None if measured outside rounds
    place_in_round: Count | None = None
    #: output tokens of all requests of the batch, without padding; only there at a `batch_size` above 1
    batch_output_tokens: Count | None = None

    @property
    def first_token_ms(self) -> float:
        """Time to the first token: of vision and prefill, at a server what decode leaves of the total."""
        if self.T_LLM_prefill is None:
            return self.T_total - (self.T_LLM_decode or 0.0)
        return (self.T_vision_total or 0.0) + self.T_LLM_prefill

    def thinking_ms(self, tokens: int) -> float | None:
        """Decode time of so many thinking tokens after the first; None without such tokens."""
        return sum(self.T_inter_token[: tokens - 1]) if tokens > 1 and self.T_inter_token else None


def times_over_runs(
    runs: Sequence[RunTimes], thinking_tokens: int | None, *, is_scored: bool = False
) -> dict[str, float | None]:
    """The times of a sample by key: the mean of its runs, each of which weighs 1/n, so that the stages add up.

    A stage that no run has is None, and so is everything without runs. A run without a stage that others have counts as
    0 there; `T_decode_per_token` is the mean of the runs with a decode.

    Args:
        thinking_tokens: output tokens up to the end of thinking; None as 0.
        is_scored: whether log-probabilities were scored, so that there is no first token.
    """
    found: dict[str, Sequence[float | None]] = {
        name: [getattr(run, name) for run in runs] for name in latency.StageTimes.model_fields
    }
    found["T_first_token"] = [None if is_scored else run.first_token_ms for run in runs]
    found["T_thinking"] = [run.thinking_ms(thinking_tokens or 0) for run in runs]
    return {name: mean_of(QUANTITIES[name].with_absent_parts(values)) for name, values in found.items()}


class SampleResult(
    energy.SampleEnergy,
    compute.SampleFlops,
    latency.ThinkingPart,
    latency.AnswerTokens,
    latency.SampleTimes,
    latency.StageTimes,
    SampleScore,
    TheoreticalGeometry,
    latency.RequestTokens,
    SampleRequest,
):
    """One sample at a setting: its question, answer, score and times."""

    #: whether the end (end-of-sequence or a stop text) came in the first run, or in the answer in a batch
    output_ended: bool | None = None
    pred: Text  #: text of the first run, or of the answer in a batch, up to its end, thinking included
    answer: Text | None = None  #: the part of `pred` that is scored, without thinking; None if it is `pred`
    #: of each option in its order, or of each window of a text, if log-probabilities were scored; not there if an
    #: answer was generated
    continuations: list[ContinuationScore] | None = None
    question_type: Text  #: the task's category of the question
    metadata: Metadata  #: what the task says about the sample, below
    data_sha256: str | None = None  #: SHA-256 of the sample's data: question, answers, options and picture
    #: SHA-256 of the picture: of its file, or of the bytes in its row; in a generated task, a module's or one of
    #: lmms-eval of its mode, size and pixels; None if no picture
    picture_sha256: str | None = None
    outputs_identical: bool | None = None  #: whether all runs gave the same tokens; None if answered in a batch
    outlier_runs: list[Count] | None = None  #: indices in `runs` of outliers; None if fewer than 3 runs
    #: samples that were answered together with it, itself included; None if measured
    accuracy_batch_size: Count | None = None
    #: most that were allowed together then: `--accuracy_batch_size`, or a `batch_size` above 1, less where memory had
    #: run out; None if measured
    accuracy_batch_limit: Count | None = None
    #: runs that were discarded and measured again (`--max_repeats`), which are in no statistic; None if answered in a
    #: batch
    num_discarded_runs: Count | None = None
    #: what disturbed the runs that are kept, after the last repeat allowed: reasons of throttling, `other load`;
    #: `[]` for nothing; None if answered in a batch
    disturbances: list[str] | None = None
    runs: list[RunTimes]  #: every measured run, in order, `[]` where answered in a batch

    def __repr__(self) -> str:
        words = shown(f"{self.sample_id}: {self.metadata.question!r} -> {self.pred!r}")
        return f"SampleResult({words}, accuracy {self.accuracy}, T_total {self.T_total} ms)"

    __str__ = __repr__

    @property
    def run_totals(self) -> tuple[float, ...]:
        """`T_total` of every measured run in ms, in order: what a request may take; () where answered in a batch.

        Run r of a sample at two settings is of one round, where they were measured in rounds.
        """
        return tuple(run.T_total for run in self.runs)

    @property
    def mean_total(self) -> float | None:
        """Mean of `run_totals`; `T_total_mean` is its mean over samples. None where answered in a batch."""
        return mean_of(self.run_totals)

    @property
    def may_have_picture(self) -> bool:
        """Whether the question has a picture, also where its digest is not known."""
        return self.picture_sha256 is not None or self.data_sha256 is None or self.T_vision_total is not None

    @property
    def request_flops(self) -> float | None:
        """FLOPs of the whole request; None for an architecture without formulas.

        A request without a picture has no vision stage, and one of a single output token no decode step.
        """
        if self.prefill_flops is None:
            return None
        steps = 0.0 if self.decode_flops_per_token is None else self.decode_flops_per_token * (self.output_tokens - 1)
        return float(self.prefill_flops) + float(self.vision_flops or 0) + float(steps)

    @property
    def round_places(self) -> tuple[int, ...] | None:
        """`place_in_round` of every run; None where the sample was measured outside rounds."""
        places = [run.place_in_round for run in self.runs]
        return tuple(place for place in places if place is not None) if places and None not in places else None


# Every quantity of a sample by its key.
QUANTITIES = quantities_of(SampleResult)
# The same by their names in memory.
QUANTITIES_BY_NAME = {quantity.name: quantity for quantity in QUANTITIES.values()}


def is_same_question(one: SampleResult, other: SampleResult) -> bool:
    """Whether two samples have the same words, answers and picture, that by its content where both results have it."""
    words = [(each.metadata.question, each.metadata.image_id, each.metadata.answers) for each in (one, other)]
    return words[0] == words[1] and len({one.picture_sha256, other.picture_sha256} - {None}) < 2


class FailedSample(Record):
    """A sample that could not be read or run; excluded from the means, and counted."""

    sample_id: Count  #: position in the task's split
    error: Text  #: class of the error
    reason: Text  #: its message


def failed_sample(sample_id: int, error: SampleError, results_dir: Path | None = None) -> FailedSample:
    """The record of a sample that ended in this error; of a library's error, the traceback is saved.

    Args:
        results_dir: folder of the results; None saves no traceback.

    Raises:
        ResultsNotSaved: the disk does not take the traceback.
    """
    kind, more = type(error).__name__, ""
    if isinstance(error, LibraryFault):
        kind = error.kind
        more = "" if results_dir is None else saved_traceback(error.trace, kind, results_dir)
    return FailedSample(sample_id=sample_id, error=kind, reason=f"{error}{more}")
