"""In: what predict.py is requested; out: a fitted file with its validation, or predictions, printed."""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import check_within
from experiments.performance_prediction.algorithm_support import FALLBACK
from experiments.performance_prediction.best_mix import best_mix, measured_gains
from experiments.performance_prediction.cnn_models.registry import model_named
from experiments.performance_prediction.convolution import AlgorithmName, algorithm_named
from experiments.performance_prediction.device_predictor import DevicePredictor, fit_device
from experiments.performance_prediction.input_sizes import MOST_IMAGES, MOST_PIXELS
from experiments.performance_prediction.prediction_file import FittedDevice, load_fitted, save_fitted
from experiments.performance_prediction.prediction_folds import MODEL, folds
from experiments.performance_prediction.prediction_plots import save_figures
from experiments.performance_prediction.prediction_report import (
    fold_lines,
    gain_lines,
    layer_lines,
    mix_lines,
    prediction_lines,
    score_lines,
)
from experiments.performance_prediction.prediction_scores import score_rows
from experiments.performance_prediction.prediction_tables import Measurements, read_measurements
from experiments.performance_prediction.prediction_validation import FoldResult, validate
from experiments.performance_prediction.table_agreement import agreement_lines


def fit(results: Sequence[Path], output: Path, held_out_sizes: Sequence[int], figures: Path | None) -> None:
    """Fits each device of the tables, prints its validation, writes the file.

    Raises:
        ConfigurationError: a held-out size that was not measured.
        ResultsError: tables that are none, or too few.
        ResultsNotSaved: the disk does not take the file.
    """
    measured = read_measurements(results)
    fitted = [_fit_device(measured.of_device(device), held_out_sizes, figures) for device in measured.devices]
    save_fitted(fitted, output)
    print(f"\n{output} written")


def _fit_device(measured: Measurements, held_out_sizes: Sequence[int], figures: Path | None) -> FittedDevice:
    predictor = fit_device(measured)
    print(f"{predictor.device}: {len(measured.inferences)} inferences, {len(measured.energies)} with energy")
    if predictor.energy_reason is not None:
        print(f"no energy: {predictor.energy_reason}")
    for line in agreement_lines(layer for each in measured.inferences for layer in each.layers):
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
    return FittedDevice(
        predictor,
        tuple(dict.fromkeys(each.model for each in measured.inferences)),
        tuple(sorted({each.input_size for each in measured.inferences})),
        tuple(sorted({each.batch_size for each in measured.inferences})),
        tuple(rows),
    )


def predict(
    file: Path,
    model: str,
    input_sizes: Sequence[int],
    algorithms: Sequence[str],
    device: str | None,
    batch_size: int,
    with_layers: bool,
) -> None:
    """Prints a line for each size and algorithm, and the best mix where all are requested.

    Raises:
        ConfigurationError: a network, algorithm, device or size that is not there.
        ResultsError: a file that is not one of `fit`.
    """
    smallest = model_named(model).smallest_input
    check_within("--batch-size", batch_size, 1, MOST_IMAGES)
    for size in input_sizes:
        check_within(f"--input-size of {model}", size, smallest, MOST_PIXELS)
    fitted = load_fitted(file, device)
    requested = _asked(fitted.predictor, algorithms)
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


def _asked(predictor: DevicePredictor, names: Sequence[str]) -> tuple[AlgorithmName, ...]:
    if list(names) == ["all"]:
        return predictor.algorithms
    requested = tuple(dict.fromkeys(map(algorithm_named, names)))
    for each in requested:
        if each not in predictor.algorithms:
            raise ConfigurationError(
                f"{each} was not fitted for {predictor.device}; there are: {', '.join(predictor.algorithms)}"
            )
    return requested
