"""The lines that a terminal shows of scores, gains and predictions."""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import check_within
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, algorithm_named
from experiments.performance_prediction.algorithms.support import FALLBACK
from experiments.performance_prediction.networks.registry import model_named
from experiments.performance_prediction.prediction.figures import figure_folders, save_figures
from experiments.performance_prediction.prediction.measurements import Measurements, agreement_lines, read_measurements
from experiments.performance_prediction.prediction.mix import MeasuredGain, best_mix, counts_of, measured_gains
from experiments.performance_prediction.prediction.network_predictor import (
    DevicePredictor,
    PredictedInference,
    fit_device,
)
from experiments.performance_prediction.prediction.predictor_file import FittedDevice, load_fitted, save_fitted
from experiments.performance_prediction.prediction.validation import (
    ALL,
    DEVICE,
    ENERGY,
    INNER_SIZES,
    LAYER,
    LEVELS,
    METHODS,
    MODEL,
    WHOLE,
    FoldResult,
    ScoreRow,
    folds,
    score_of,
    score_rows,
    validate,
)
from experiments.performance_prediction.profiling.config import MOST_IMAGES, MOST_PIXELS

NO_ERROR = "not validated"


def fold_lines(results: Sequence[FoldResult]) -> list[str]:
    """Lines with what each fold left out, and how well the support was predicted."""
    lines = []
    for each in results:
        layers = sum(len(one.layers) for one in each.fold.test.inferences)
        lines.append(
            f"{each.fold.kind} left out: {each.fold.name}; {counted(len(each.fold.test.inferences), 'inference')}, "
            f"{counted(layers, 'layer')}, {each.layers_known:.0%} of them of a shape known from another size, "
            f"{each.layers_covered:.0%} "
            f"within their interval of 95 %, {each.support_wrong} granted or refused other than expected"
        )
    return lines


def score_lines(rows: Sequence[ScoreRow]) -> list[str]:
    """A table for each kind of fold and level: mean error and hits within 10 %, of this model and the plain ones."""
    lines: list[str] = []
    for kind in dict.fromkeys(row.fold_kind for row in rows):
        for level in LEVELS:
            of_level = [row for row in rows if row.fold_kind == kind and row.level == level]
            if of_level:
                lines += ["", f"{kind} left out · {level}: mean error (MAPE), and fraction within 10 %"]
                lines.append(f"  {'':24}{'n':>6}" + "".join(f"{method:>22}" for method in METHODS))
                # Algorithms first, then models left out, then everything.
                keys = dict.fromkeys((row.fold, row.algorithm) for row in of_level)
                keys.pop((ALL, ALL), None)
                lines += [_score_line(of_level, *key) for key in (*keys, (ALL, ALL))]
    return lines


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
            f"{each.guess_s / each.mix_s - 1:>8.1%}{expected:>10.1%}{best:>9.1%}  "
            f"{each.changed} of {each.layers}{refused}"
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
        name = each.requested or "best mix"
        cells = [
            _with_error(fitted, kind, level, each.requested or ALL, value)
            for level, value in ((DEVICE, 1e3 * each.device_s), (WHOLE, 1e3 * each.whole_s), (ENERGY, each.energy_j))
        ]
        fell_back = [layer for layer in each.layers if layer.runs != layer.requested]
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
    least, most = min(fitted.input_sizes), max(fitted.input_sizes)
    beyond = sorted({each.input_size for each in predictions if not least <= each.input_size <= most})
    if beyond:
        sizes = ", ".join(map(str, beyond))
        notes.append(f"size {sizes} is outside the measured {least} to {most} pixels: a guess beyond the data")
    if first.batch_size not in fitted.batch_sizes:
        measured = ", ".join(map(str, fitted.batch_sizes))
        notes.append(f"batch size {first.batch_size} was not measured ({measured} was): a guess beyond the data")
    notes += dict.fromkeys(f"no energy: {each.energy_reason}" for each in predictions if each.energy_reason is not None)
    if fitted.predictor.energy is not None:
        notes.append(f"energy was fitted to {fitted.predictor.energy.basis}")
    return notes


def mix_lines(guess: PredictedInference, mix: PredictedInference) -> list[str]:
    """Lines with a mix and its expected gain."""
    gain = guess.convolutions_s / mix.convolutions_s - 1
    return [
        f"  best mix at {mix.input_size}: {counts_of([layer.runs for layer in mix.layers])}; convolutions "
        f"{1e3 * mix.convolutions_s:.3f} ms, {1e3 * guess.convolutions_s:.3f} ms with guess: {gain:.1%} expected"
    ]


def layer_lines(predicted: PredictedInference) -> list[str]:
    """A line for each layer, with its conformal interval of 95 %."""
    head = f"  {predicted.requested or 'best mix'} at {predicted.input_size}"
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


def fit(
    results: Sequence[Path],
    output: Path,
    held_out_sizes: Sequence[int],
    figures: Path | None,
    without_launch_bound: bool,
) -> None:
    """Fit each device of the tables, print its validation, and write the file.

    Args:
        without_launch_bound: leave out the inferences that the timer marked.

    Raises:
        ConfigurationError: a held-out size that was not measured.
        ResultsError: tables that are none, or too few.
        ResultsNotSaved: the disk does not take the file.
    """
    measured = read_measurements(results)
    if marked := [inference for inference in measured.inferences if inference.is_launch_bound]:
        done = "are left out" if without_launch_bound else "are in the fit (--without-launch-bound leaves them out)"
        print(
            f"{len(marked)} of {counted(len(measured.inferences), 'inference')} are launch-bound, so their times on "
            f"the device may contain waits for the host; they {done}"
        )
    if without_launch_bound:
        measured = measured.not_launch_bound
    folders = dict.fromkeys(measured.devices) if figures is None else figure_folders(measured.devices, figures)
    fitted = [_fit_device(measured.of_device(each), held_out_sizes, folder) for each, folder in folders.items()]
    save_fitted(fitted, output)
    print(f"\n{output} written")


def _fit_device(measured: Measurements, held_out_sizes: Sequence[int], figures: Path | None) -> FittedDevice:
    predictor = fit_device(measured)
    sets = len(measured.inferences) - len(measured.networks)
    print(f"{predictor.device}: {counted(len(measured.networks), 'inference')}, {len(measured.energies)} with energy"
          + (f"; {sets} of sets of layers" if sets else ""))  # fmt: skip
    if predictor.energy_reason is not None:
        print(f"no energy: {predictor.energy_reason}")
    for line in agreement_lines(layer for inference in measured.inferences for layer in inference.layers):
        print(line)
    results: list[FoldResult] = []
    for fold in folds(measured, held_out_sizes):
        print(f"validating: {fold.kind} {fold.name} left out", file=sys.stderr, flush=True)
        results.append(validate(fold))
    rows = score_rows(results)
    gains = [
        gain for each in results if each.fold.kind != MODEL for gain in measured_gains(each.predictor, each.fold.test)
    ]
    for line in (*fold_lines(results), *score_lines(rows), *gain_lines(gains)):
        print(line)
    if figures is not None:
        for path in save_figures(measured, predictor, results, figures):
            print(f"{path} drawn")
    models = tuple(dict.fromkeys(network.model for network in measured.networks))
    sizes, batches = (
        tuple(sorted({getattr(each, name) for each in measured.networks})) for name in ("input_size", "batch_size")
    )
    return FittedDevice(predictor, models, sizes, batches, tuple(rows))


def predict(
    file: Path,
    model: str,
    input_sizes: Sequence[int],
    algorithms: Sequence[str],
    device: str | None,
    batch_size: int,
    with_layers: bool,
) -> None:
    """Print a line for each size and algorithm, and the best mix where all are requested.

    Raises:
        ConfigurationError: a network, algorithm, device or size that is not there.
        ResultsError: a file that is not one of `fit`.
    """
    smallest = model_named(model).smallest_input
    check_within("--batch-size", batch_size, 1, MOST_IMAGES)
    for size in input_sizes:
        check_within(f"--input-size of {model}", size, smallest, MOST_PIXELS)
    fitted = load_fitted(file, device)
    requested = _requested(fitted.predictor, algorithms)
    predictions = [
        fitted.predictor.predict(model, each, size, batch_size) for size in input_sizes for each in requested
    ]
    mixes = []
    if list(algorithms) == ["all"] and FALLBACK in fitted.predictor.algorithms:
        mixes = [best_mix(fitted.predictor, model, size, batch_size)[0] for size in input_sizes]
    lines = prediction_lines(fitted, [*predictions, *mixes])
    for mix in mixes:
        lines += mix_lines(fitted.predictor.predict(model, FALLBACK, mix.input_size, batch_size), mix)
    if with_layers:
        for each in (*predictions, *mixes):
            lines += layer_lines(each)
    print("\n".join(lines))


def _requested(predictor: DevicePredictor, names: Sequence[str]) -> tuple[AlgorithmName, ...]:
    if list(names) == ["all"]:
        return predictor.algorithms
    return tuple(dict.fromkeys(map(algorithm_named, names)))
