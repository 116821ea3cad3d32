"""The caveats of a controller's evaluation and training."""

from collections.abc import Mapping
from typing import Any, ClassVar

from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.caveats import Caveat, CaveatKind


def _of_requests(found: Mapping[str, Any]) -> str:
    return f"{found['num_seen']} of the {counted(found['num_requests'], 'request')}"


class ControllerCaveat(Caveat):
    """A caveat of a controller. `how` of a training is "trained on" or "started from a training on"."""

    KINDS: ClassVar[Mapping[str, CaveatKind]] = {
        "few_requests": CaveatKind(
            "warning",
            lambda found: f"{counted(found['num_requests'], 'request')}: too few to compare policies",
            "use more samples",
        ),
        "reference_not_measured": CaveatKind(
            "note",
            "budgets are fractions of the time of {setting}, the largest setting: the reference, the model as it is, "
            "was not measured".format_map,
        ),
        "reference_not_chosen": CaveatKind(
            "note",
            "two_stage chooses among tiers: the reference, the model as it is ({setting}), is none of its "
            "choices".format_map,
        ),
        "others_not_chosen": CaveatKind(
            "note",
            "two_stage chooses tier, top-k and blocks alone: {num_others} of the {num_settings} settings, such as "
            "{setting}, are none of its choices".format_map,
        ),
        "lookup_of_the_same": CaveatKind(
            "warning",
            lambda found: f"the lookup was built of {_of_requests(found)} that it is evaluated on",
        ),
        "cider_of_a_part": CaveatKind(
            "note",
            "{task}: CIDEr by the document frequencies of the whole run's references, on a part of its "
            "samples".format_map,
        ),
        "overhead_apart": CaveatKind(
            "note",
            "overhead is the time to choose the knobs on this machine; latencies do not contain it".format_map,
        ),
        "networks_apart": CaveatKind(
            "warning",
            "two_stage: the time of its networks is in no latency, and its first blocks are assumed to have run at "
            "the top-k that is chosen after them".format_map,
            "only --mode live measures both",
        ),
        "prepared_beforehand": CaveatKind(
            "note",
            "requests were prepared at every tier beforehand: latencies contain neither that nor their "
            "transfer".format_map,
        ),
        "shared_warm_up": CaveatKind(
            "note",
            lambda found: (
                f"{counted(found['num_runs'], 'unmeasured run')}, one for each tiling, at the highest knobs; settings "
                "have no warm-up of their own"
            ),
        ),
        "random_weights": CaveatKind(
            "warning", "the model's weights are random, and not those that two_stage was trained with".format_map
        ),
        "sample_left_out": CaveatKind("note", "sample {sample_id} was left out: {reason}".format_map),
        "without_states": CaveatKind(
            "note",
            lambda found: (
                f"{found['num_without']} of {counted(found['num_samples'], 'sample')} have no states: "
                f"{found['reasons']}"
            ),
        ),
        "other_task": CaveatKind(
            "warning", lambda found: f"the grid is of {', '.join(found['tasks'])}, and {found['task']} was measured"
        ),
        "other_split": CaveatKind(
            "warning", "the grid is of the split {split_of_grid} of {task}, and {split} was measured".format_map
        ),
        "trained_on_same_ids": CaveatKind(
            "warning", "two_stage was {how} samples of the same ids as those that it is evaluated on".format_map
        ),
        "trained_on_a_digest": CaveatKind(
            "warning",
            "two_stage was {how} a replay of {task}, of whose samples only a digest is known: it may have seen those "
            "that it is evaluated on".format_map,
        ),
        "trained_on_others": CaveatKind(
            "warning",
            "two_stage was {how} other samples than the calibration ones, and may have seen those that it is evaluated "
            "on".format_map,
        ),
    }
