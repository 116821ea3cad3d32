"""In: scores, gains and predictions; out: what a terminal shows of them. Pure."""

from collections.abc import Sequence

from experiments.performance_prediction.best_mix import MeasuredGain, counts_of
from experiments.performance_prediction.device_predictor import PredictedInference
from experiments.performance_prediction.prediction_file import FittedDevice
from experiments.performance_prediction.prediction_folds import INNER_SIZES, MODEL
from experiments.performance_prediction.prediction_scores import ALL, LEVELS, METHODS, ScoreRow, score_of
from experiments.performance_prediction.prediction_validation import DEVICE, ENERGY, LAYER, WHOLE, FoldResult

NO_ERROR = "not validated"


def fold_lines(results: Sequence[FoldResult]) -> list[str]:
    """What each fold left out, and how well it knew beforehand what is granted."""
    lines = []
    for each in results:
        layers = sum(len(one.layers) for one in each.fold.test.inferences)
        lines.append(
            f"{each.fold.kind} left out: {each.fold.name}; {len(each.fold.test.inferences)} inferences, {layers} "
            f"layers, {each.layers_known:.0%} of them of a shape known from another size, {each.layers_covered:.0%} "
            f"within their interval of 95 %, {each.support_wrong} granted or refused other than expected"
        )
    return lines


def score_lines(rows: Sequence[ScoreRow]) -> list[str]:
    """A table for each kind of fold and level: mean error and hits within 10 %, this model and the plain ones."""
    lines: list[str] = []
    for kind in dict.fromkeys(row.fold_kind for row in rows):
        for level in LEVELS:
            of_level = [row for row in rows if row.fold_kind == kind and row.level == level]
            if of_level:
                lines += ["", f"{kind} left out · {level}: mean error (MAPE), and fraction within 10 %"]
                lines.append(f"  {'':24}{'n':>6}" + "".join(f"{method:>22}" for method in METHODS))
                lines += [_score_line(of_level, *key) for key in _keys(of_level)]
    return lines


def _keys(rows: Sequence[ScoreRow]) -> list[tuple[str, str]]:
    """Fold and algorithm: algorithms first, then models left out, then everything."""
    keys = list(dict.fromkeys((row.fold, row.algorithm) for row in rows))
    return [key for key in keys if key != (ALL, ALL)] + [(ALL, ALL)]


def _score_line(rows: Sequence[ScoreRow], fold: str, algorithm: str) -> str:
    found = {row.method: row for row in rows if (row.fold, row.algorithm) == (fold, algorithm)}
    count = max(row.n for row in found.values())
    cells = [f"{found[name].mape:.1%} {found[name].hit_rate:4.0%}" if name in found else "-" for name in METHODS]
    label = ALL if (fold, algorithm) == (ALL, ALL) else algorithm if fold == ALL else f"without {fold}"
    return f"  {label:24}{count:>6}" + "".join(f"{cell:>22}" for cell in cells)


def gain_lines(gains: Sequence[MeasuredGain]) -> list[str]:
    """A line for each network and size."""
    if not gains:
        return []
    lines = ["", "best mix, chosen without having seen the size: convolutions in ms, measured"]
    lines.append(f"  {'':20}{'guess':>9}{'mix':>9}{'gain':>8}{'expected':>10}{'at best':>9}  layers changed")
    for each in gains:
        expected, best = each.predicted_guess_s / each.predicted_mix_s - 1, each.guess_s / each.best_s - 1
        refused = f", {each.refused} refused" if each.refused else ""
        lines.append(
            f"  {each.model:14}{each.input_size:>6}{1e3 * each.guess_s:>9.3f}{1e3 * each.mix_s:>9.3f}"
            f"{each.speedup - 1:>8.1%}{expected:>10.1%}{best:>9.1%}  {each.changed} of {each.layers}{refused}"
        )
    return lines


def prediction_lines(fitted: FittedDevice, predictions: Sequence[PredictedInference]) -> list[str]:
    """A line for each prediction, with the validation's error beside it."""
    if not predictions:
        return []
    kind = INNER_SIZES if predictions[0].model in fitted.models else MODEL
    lines = [
        f"{predictions[0].model} on {fitted.predictor.device}, {fitted.predictor.precision}, batch "
        f"{predictions[0].batch_size}; ± is the mean error of the validation with {kind} left out",
        f"  {'size':>5}  {'algorithm':22}{'device, ms':>20}{'with host, ms':>20}{'energy, J':>18}  fell back",
    ]
    for each in predictions:
        name = each.asked or "best mix"
        cells = [
            _with_error(fitted, kind, level, each.asked or ALL, value)
            for level, value in ((DEVICE, 1e3 * each.device_s), (WHOLE, 1e3 * each.whole_s), (ENERGY, each.energy_j))
        ]
        fell_back = [layer for layer in each.layers if layer.runs != layer.asked]
        lines.append(
            f"  {each.input_size:>5}  {name:22}{cells[0]:>20}{cells[1]:>20}{cells[2]:>18}  "
            f"{len(fell_back)} of {len(each.layers)}"
        )
    lines += [f"  {line}" for line in _notes(fitted, predictions)]
    return lines


def _with_error(fitted: FittedDevice, kind: str, level: str, algorithm: str, value: float | None) -> str:
    if value is None:
        return "-"
    found = score_of(fitted.scores, kind, level, algorithm) or score_of(fitted.scores, kind, level)
    return f"{value:.3f} " + (NO_ERROR if found is None else f"± {found.mape:.1%}")


def _notes(fitted: FittedDevice, predictions: Sequence[PredictedInference]) -> list[str]:
    notes = []
    first = predictions[0]
    beyond = sorted({each.input_size for each in predictions if not _within(each.input_size, fitted.input_sizes)})
    if beyond:
        notes.append(
            f"size {', '.join(map(str, beyond))} is outside the measured {min(fitted.input_sizes)} to "
            f"{max(fitted.input_sizes)} pixels: a guess beyond the data"
        )
    if first.batch_size not in fitted.batch_sizes:
        measured = ", ".join(map(str, fitted.batch_sizes))
        notes.append(f"batch size {first.batch_size} was not measured ({measured} was): a guess beyond the data")
    reasons = dict.fromkeys(each.energy_reason for each in predictions if each.energy_reason is not None)
    notes += [f"no energy: {reason}" for reason in reasons]
    if fitted.predictor.energy is not None:
        notes.append(f"energy was fitted to {fitted.predictor.energy.basis}")
    return notes


def _within(size: int, sizes: Sequence[int]) -> bool:
    return min(sizes) <= size <= max(sizes)


def mix_lines(guess: PredictedInference, mix: PredictedInference) -> list[str]:
    """What a mix is and is expected to gain."""
    gain = guess.convolutions_s / mix.convolutions_s - 1
    return [
        f"  best mix at {mix.input_size}: {counts_of([layer.runs for layer in mix.layers])}; convolutions "
        f"{1e3 * mix.convolutions_s:.3f} ms, {1e3 * guess.convolutions_s:.3f} ms with guess: {gain:.1%} expected"
    ]


def layer_lines(predicted: PredictedInference) -> list[str]:
    """A line for each layer, with the model's own interval of 95 %."""
    head = f"  {predicted.asked or 'best mix'} at {predicted.input_size}"
    lines = [f"{head}: {'layer':40}{'runs':>24}{LAYER + ', ms':>12}{'95 % interval':>20}{'energy, J':>12}  support"]
    for each in predicted.layers:
        latency = each.latency
        joules = "-" if each.energy_j is None else f"{each.energy_j:.4f}"
        interval = f"{1e3 * latency.low:.4f} – {1e3 * latency.high:.4f}"
        lines.append(
            f"  {each.layer:50}{each.runs:>24}{1e3 * latency.seconds:>12.4f}{interval:>20}{joules:>12}  "
            f"{each.support.basis}"
        )
    return lines
