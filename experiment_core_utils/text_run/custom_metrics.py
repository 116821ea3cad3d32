"""Custom metrics: a user's functions over the records of a text run."""

import copy
import importlib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiment_core_utils.primitives.csv_tables import raw_cell
from experiment_core_utils.primitives.errors import ConfigurationError, first_line
from experiment_core_utils.records.text import CustomMetricsReport, InferenceResults

Column = float | int | str | bool | None


@dataclass(frozen=True)
class CustomMetric:
    """A user's metric: `compute(results, metrics)` gets two dicts and returns a mapping of columns to values."""

    name: str  #: as given, `package.module:function`
    compute: Callable[[dict[str, Any], dict[str, Any]], Any]

    @property
    def function(self) -> str:
        """The last part of its name, under which its columns are."""
        return self.name.rpartition(":")[2]


def find_custom_metrics(names: Sequence[str]) -> tuple[CustomMetric, ...]:
    """Import the functions, before anything is loaded or run.

    Args:
        names: `package.module:function` each.

    Raises:
        ConfigurationError: a module cannot be imported, has no such function, or two functions have the same name.
    """
    metrics = tuple(CustomMetric(name, _function_named(name)) for name in dict.fromkeys(names))
    functions = [metric.function for metric in metrics]
    twice = sorted({function for function in functions if functions.count(function) > 1})
    if twice:
        raise ConfigurationError(
            f"custom_metrics has two functions named {', '.join(twice)}, whose columns would be the same; rename one"
        )
    return metrics


def run_custom_metrics(
    metrics: Sequence[CustomMetric], results: InferenceResults, summary: Mapping[str, Any]
) -> CustomMetricsReport:
    """The columns of each metric; one that raises or returns something else is reported and costs nothing else.

    Each gets its own copies, so that none can change the run's records.

    Args:
        results: pooled over processes.
        summary: the `inference_metrics` of the experiment.
    """
    report = CustomMetricsReport(columns={}, failures=[])
    for metric in metrics:
        try:
            returned = metric.compute(copy.deepcopy(dict(results)), copy.deepcopy(dict(summary)))
            report["columns"][metric.function] = _checked_columns(returned)
        # A user's code may raise anything, sys.exit() included, and the run that it looks at is finished and paid for.
        except (Exception, SystemExit) as error:
            failure = {"name": metric.name, "error": type(error).__name__, "message": first_line(error)}
            report["failures"].append(failure)
    return report


def _function_named(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    try:
        found = vars(importlib.import_module(module_name)).get(function_name)
    # Importing runs a user's code, see above.
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"custom_metrics: {name} cannot be imported ({type(error).__name__}: {first_line(error)}); its folder must "
            "be on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"custom_metrics: {module_name} has no function {function_name}")
    function: Callable[..., Any] = found
    return function


def _checked_columns(returned: Any) -> dict[str, Column]:
    """Plain Python values; raises TypeError, ValueError or ResultsError for what cannot be a column."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"it returned {type(returned).__name__}; return a mapping of column names to values")
    for name in returned:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{name!r} is not a column name; use text")
        raw_cell(name, "a column name")
    return {name: _plain(name, value) for name, value in returned.items()}


def _plain(name: str, value: Any) -> Column:
    if isinstance(value, np.bool_):
        return bool(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        raw_cell(value, f"column {name}")
        return value
    if isinstance(value, numbers.Integral):
        if abs(int(value)) >= 2**63:
            raise ValueError(f"column {name} is a whole number beyond 64 bits; give a float")
        return int(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(f"column {name} is of type {type(value).__name__}; give a number, text, True, False or None")
    if not math.isfinite(value):
        raise ValueError(f"column {name} is {value}; give None where there is no value")
    return float(value)
