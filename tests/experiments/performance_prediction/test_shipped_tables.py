"""In the tables of convolutions that are kept, no larger input is surely faster than a smaller one."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import t as student

from experiment_core_utils.primitives.csv_tables import read_table_file
from experiment_core_utils.primitives.files import REPOSITORY

PROFILES = REPOSITORY / "tests" / "data" / "convolution_profiles"
LEVEL = 0.05
_DEGREE = 2


def called_faster(tables: dict[str, np.ndarray]) -> list[tuple[str, int, int]]:
    """The pairs of sizes, the larger of which is called faster, of tables [S, 2] of sizes and times.

    Sizes are measured one after the other, so inferences of one size say nothing of how another one differs: the
    variance is that of sizes around a smooth curve (log time, quadratic in log size) in all tables. One-sided, at 5 %
    for all pairs together (Bonferroni).
    """
    residuals, freedom, pairs = [], 0, []
    for name, table in tables.items():
        logs = np.log(table[np.argsort(table[:, 0])])
        residuals.append(logs[:, 1] - np.polyval(np.polyfit(*logs.T, _DEGREE), logs[:, 0]))
        freedom += len(logs) - _DEGREE - 1
        pairs += [(name, one, other, one[1] - other[1]) for one, other in combinations(logs, 2)]
    deviation = (2 * float(np.square(np.concatenate(residuals)).sum()) / freedom) ** 0.5
    least = deviation * student.ppf(1 - LEVEL / len(pairs), freedom)
    return [(name, round(np.exp(one[0])), round(np.exp(other[0]))) for name, one, other, gap in pairs if gap > least]


def test_more_work_is_called_faster_where_it_is() -> None:
    sizes = np.arange(200.0, 480.0, 40.0)
    noise = np.array([1.0, 1.01, 0.99, 1.01, 0.99, 1.0, 1.0])
    rising = np.stack([sizes, sizes**2 * noise], axis=1)
    assert called_faster({"a": rising, "b": rising}) == []
    falling = np.stack([sizes, noise / sizes], axis=1)
    # 1 % of noise, of which a seventh of the fall (200 to 240) is many times.
    assert ("b", 200, 240) in called_faster({"a": rising, "b": falling})


@pytest.mark.parametrize("column", ["mean", "layer_pass_mean_ms"])
def test_no_larger_input_is_surely_faster(column: str) -> None:
    tables = {
        path.stem: np.array([[row["input_size"], row[column]] for row in read_table_file(path)], dtype=float)
        for path in PROFILES.rglob("*_overall.csv")
    }
    assert len(tables) == 5 and called_faster(tables) == []
