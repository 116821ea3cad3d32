"""The latency estimator: a model of each stage's time that predicts requests at settings, saved as a JSON file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import to_json

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.caveats import sentences
from experiment_core_utils.records.result_files import field_fault, read_object_of_kind
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.latency.features import (
    KNOBS,
    STAGES,
    RequestColumns,
    RequestSetting,
    TimedSamples,
    lacked_knobs,
    requests_of,
    unknown_knobs,
)
from experiments.analyses.latency.settings_left_out import FOLDS, ratios_left_out
from experiments.analyses.latency.stage_regression import (
    PREDICTED,
    STORED,
    StageModel,
    after_vision,
    fit_stages,
    stage_times,
)
from experiments.fitting.intervals import conformal_ratios
from experiments.fitting.regression import LEAST_SPAN

SCHEMA_VERSION = 1
KIND = "latency_estimator"
LEVEL = 0.9
MIN_SETTINGS = FOLDS
MIN_SAMPLES = 24
# Prompts this much shorter or longer than those measured still count as inside.
PROMPT_SLACK = 0.1


@dataclass(frozen=True)
class Prediction:
    """Predicted times of S requests, in milliseconds."""

    #: name of PREDICTED -> [S]; `T_LLM_decode` and `T_total` are NaN where the output length is not known
    times: Mapping[str, np.ndarray]
    low: Mapping[str, np.ndarray]  #: lower end of the interval for one request, same keys
    high: Mapping[str, np.ndarray]  #: its upper end
    unseen_knobs: np.ndarray  #: [S], whether a knob is outside the values that were measured
    extrapolated: np.ndarray  #: [S], that, or a prompt that is far from those measured


def _with(*names: str) -> AfterValidator:
    def check(value: Mapping[str, Any]) -> Mapping[str, Any]:
        missing = [name for name in names if name not in value]
        if missing:
            raise ValueError(f"it lacks {missing[0]}")
        return value

    return AfterValidator(check)


@with_config(STORED)
@dataclass(frozen=True)
class FittedStages:
    """The stages' models that `fit` found; in the file beside the level of the intervals."""

    level: Annotated[float, Field(gt=0, lt=1)]  #: fraction of requests that the intervals contain
    #: name of STAGES -> model; without `T_vision_total` where no sample had a picture
    stages: Annotated[Mapping[str, StageModel], _with(*STAGES[1:])]
    #: name of PREDICTED -> (low, high), the bounds of measured / predicted, for the interval
    ratios: Annotated[Mapping[str, tuple[float, float]], _with(*PREDICTED)]
    #: column of Requests, or `prompt_tokens` -> (smallest, largest) measured
    ranges: Annotated[Mapping[str, tuple[float, float]], _with(*KNOBS, "prompt_tokens")]
    expected_output: Mapping[str, Annotated[float, Field(ge=1)]]  #: task -> mean output tokens
    num_samples: int
    num_settings: int
    caveats: tuple[str, ...]  #: sentences of what the samples could not show
    #: task -> 90th percentile of the same; empty in files from before it was stored
    output_p90: Mapping[str, Annotated[float, Field(ge=1)]] = field(default_factory=dict)
    caveat_records: tuple[AnalysisCaveat, ...] = ()  #: those of `caveats`; empty in files from before they were stored


_STORED = TypeAdapter(FittedStages)


class LatencyEstimator:
    """Predicts the stage times of a request from its tokens and the knobs.

    The model is a line of `STAGE_TERMS` for each stage: no time is negative, and none falls when a knob or a length
    goes up. The interval is split-conformal on ratios: between its ends is the fraction `level` of measured / predicted
    of samples whose setting was left out of the fit, so it is for one request at a setting that need not have been
    measured.
    """

    def __init__(self, level: float = LEVEL) -> None:
        if not 0.0 < level < 1.0:
            raise ConfigurationError(
                f"a level of {level:g} is not possible; give a fraction between 0 and 1, such as 0.9"
            )
        self.level = level
        self._fitted: FittedStages | None = None

    @property
    def fitted(self) -> FittedStages:
        """The fitted stages; raises ConfigurationError before `fit` or `load`."""
        if self._fitted is None:
            raise ConfigurationError("this estimator has no model yet; call fit or load first")
        return self._fitted

    def fit(self, samples: TimedSamples) -> Self:
        """Fit each stage on all samples, and the intervals on settings left out.

        Raises:
            ResultsError: fewer than MIN_SETTINGS settings or MIN_SAMPLES samples, or none with two output tokens.
        """
        settings = len(np.unique(samples.knobs))
        if settings < MIN_SETTINGS or len(samples) < MIN_SAMPLES:
            raise ResultsError(
                f"{counted(settings, 'setting')} with {counted(len(samples), 'sample')} are too few for a latency "
                f"model; profile at least {MIN_SETTINGS + 1} settings and {MIN_SAMPLES} samples, so that one can be "
                "left out"
            )
        if np.isnan(samples.times["T_decode_per_token"]).all():
            raise ResultsError("no sample has two output tokens, so decode is not known; profile with longer answers")
        return self.fit_part(samples)

    def fit_part(self, samples: TimedSamples) -> Self:
        """The same on what a fold leaves of enough samples: MIN_SETTINGS settings with any number of samples."""
        ratios = ratios_left_out(samples)
        caveats = caveats_of(samples)
        self._fitted = FittedStages(
            level=self.level,
            stages=fit_stages(samples),
            ratios={name: conformal_ratios(ratios[name], self.level) for name in PREDICTED},
            ranges=ranges_of(samples.requests),
            expected_output=expected_output_tokens(samples),
            output_p90=expected_output_tokens(samples, 90.0),
            num_samples=len(samples),
            num_settings=len(np.unique(samples.knobs)),
            caveats=tuple(sentences(caveats)),
            caveat_records=tuple(caveats),
        )
        return self

    def predict(self, requests: RequestColumns | Sequence[RequestSetting]) -> Prediction:
        """Predicted times with intervals; raises ConfigurationError for pictures where the samples had none."""
        columns = requests if isinstance(requests, RequestColumns) else requests_of(requests)
        fitted = self.fitted
        times = stage_times(fitted.stages, columns)
        low = {name: column * fitted.ratios[name][0] for name, column in times.items()}
        high = {name: column * fitted.ratios[name][1] for name, column in times.items()}
        unseen = np.zeros(len(columns), dtype=bool)
        for name in KNOBS:
            smallest, largest = fitted.ranges[name]
            column = getattr(columns, name)
            unseen |= (column < smallest) | (column > largest)
        shortest, longest = fitted.ranges["prompt_tokens"]
        prompt = columns.prompt_tokens
        far = (prompt < shortest * (1 - PROMPT_SLACK)) | (prompt > longest * (1 + PROMPT_SLACK))
        return Prediction(times, low, high, unseen, unseen | far)

    def predict_after_vision(
        self, requests: RequestColumns | Sequence[RequestSetting], vision_ms: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Times [S] as `after_vision` has them, for requests whose vision took `vision_ms` [S]; raises as `predict`."""
        return after_vision(self.predict(requests).times, vision_ms)

    def with_stages(self, stages: Mapping[str, StageModel], caveat: AnalysisCaveat) -> "LatencyEstimator":
        """The same estimator with other models of the stages, as a recalibration makes them."""
        other = LatencyEstimator(self.level)
        caveats, records = (*self.fitted.caveats, caveat.sentence), (*self.fitted.caveat_records, caveat)
        other._fitted = replace(self.fitted, stages=stages, caveats=caveats, caveat_records=records)
        return other

    def content(self) -> dict[str, Any]:
        """The estimator as one JSON object, see docs/core_exp/e3_latency_estimator.md."""
        return {"schema_version": SCHEMA_VERSION, "kind": KIND, **_STORED.dump_python(self.fitted)}

    def save(self, path: Path) -> None:
        """Write the content to a file."""
        write_json_atomically(self.content(), path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The estimator that `save` wrote; raises ResultsError for any other file."""
        advice = "fit it again with e3_latency_estimator.py"
        content = read_object_of_kind(path, KIND, SCHEMA_VERSION, advice)
        try:
            stored = _STORED.validate_json(to_json(content), strict=True)
        except ValidationError as error:
            raise ResultsError(f"{path} {field_fault(error)}; {advice}") from error
        estimator = cls(stored.level)
        estimator._fitted = stored
        return estimator


def ranges_of(requests: RequestColumns) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each knob and of the prompt's tokens."""
    columns = {name: getattr(requests, name) for name in KNOBS} | {"prompt_tokens": requests.prompt_tokens}
    return {name: (float(column.min()), float(column.max())) for name, column in columns.items()}


def caveats_of(samples: TimedSamples) -> list[AnalysisCaveat]:
    """Caveats of what these samples cannot show."""
    ranges = ranges_of(samples.requests)
    found = [
        AnalysisCaveat.of("one_value", name=name, value=smallest)
        for name, (smallest, largest) in ranges.items()
        if smallest == largest and name not in lacked_knobs(samples)
    ]
    # A knob's values are far apart by what they do; lengths are whatever the samples had.
    shortest, longest = ranges["prompt_tokens"]
    if shortest < longest < LEAST_SPAN * shortest:
        found.append(AnalysisCaveat.of("short_span", name="prompt_tokens", smallest=shortest, largest=longest))
    found += [
        AnalysisCaveat.of("unknown_knob", name=title, num_values=count)
        for title, count in unknown_knobs(samples).items()
    ]
    lengths = samples.requests.output_tokens
    if lengths.min() == lengths.max():
        found.append(AnalysisCaveat.of("one_length", num_tokens=float(lengths[0])))
    return found


def expected_output_tokens(samples: TimedSamples, percent: float | None = None) -> dict[str, float]:
    """Mean output tokens of each task over its samples, or a percentile, for requests that have no answer yet."""
    lengths = {str(task): samples.requests.output_tokens[samples.tasks == task] for task in np.unique(samples.tasks)}
    return {
        task: float(own.mean() if percent is None else np.percentile(own, percent)) for task, own in lengths.items()
    }
