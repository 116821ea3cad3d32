"""A replication whose variance is given, for tests of verdicts."""

import numpy as np

from experiment_core_utils.primitives.replication import Component, Replication


def with_variance(variance: float, degrees: float, num_settings: int) -> Replication:
    """Of settings each of which was measured in a run of its own, moved by a disturbance of this variance."""
    component = Component("run", 1, variance * np.eye(num_settings), degrees)
    return Replication(("sample", "picture", "run"), "runs", (component,))
