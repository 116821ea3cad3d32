"""The published place of `get_metric_for_dataset`, which belongs to the registry of tasks."""

from experiment_core_utils.tasks.registry import get_metric_for_dataset

__all__ = ["get_metric_for_dataset"]
