"""The caveats of E2 and E3: what weakens their figures, beside the caveats of the results that they read."""

from collections.abc import Mapping
from typing import ClassVar

from experiment_core_utils.records.caveats import MOST_FAILED, Caveat, CaveatKind


class AnalysisCaveat(Caveat):
    """A caveat of an analysis, with the kinds that results have too."""

    KINDS: ClassVar[Mapping[str, CaveatKind]] = {
        **Caveat.KINDS,
        "samples_failed": CaveatKind(
            "warning",
            "failed samples: {num_failed} of {num_samples}".format_map,
            "repair them, or leave them out by --ids, and delete the result to measure it again",
            voids=lambda found: found["num_failed"] > MOST_FAILED * found["num_samples"],
        ),
        "unfinished": CaveatKind(
            "warning",
            "unfinished: {num_left} of {num_settings} settings of the run in {folder} have no result".format_map,
            "run the same command again to resume",
            voids=lambda found: True,
        ),
        "mixed_executions": CaveatKind("warning", "{reason}".format_map, voids=lambda found: True),
        "random_weights": CaveatKind(
            "warning",
            lambda found: "the weights are random: do not use accuracy or fronts",
            "times and operations are valid",
        ),
        "sweeps_one_after_the_other": CaveatKind(
            "note",
            lambda found: "sweeps ran one after the other: a latency may differ between them because the machine did",
        ),
        "protocols_differ": CaveatKind(
            "warning",
            lambda found: (
                f"sweeps of protocol versions {' and '.join(map(str, found['versions']))}: those of version 1 measured "
                "one setting after another"
            ),
            "do not compare latencies across them",
        ),
        "blocked_order": CaveatKind(
            "note",
            lambda found: (
                f"{found['task']}: settings were measured one after another, and what else changed a setting's times "
                f"is {100 * found['fraction']:.1f} % (standard deviation)"
            ),
            "verdicts on latencies contain it; measure in rounds (--order rounds) for finer ones",
        ),
        "blocked_order_unknown": CaveatKind(
            "warning",
            "{task}: settings were measured one after another, and nothing shows how much the machine changed "
            "meanwhile".format_map,
            "no verdict on latencies; measure in rounds (--order rounds)",
        ),
        "few_draws": CaveatKind(
            "note",
            "{task}: {num_settings} settings are more than {most}, so intervals are based on {num_draws} draws and no "
            "effects are computed".format_map,
        ),
        "many_values": CaveatKind(
            "note",
            "{task}: {knob} has {num_values} values; a knob is held at each of them only up to {most}".format_map,
        ),
        "few_for_percentile": CaveatKind(
            "warning",
            "{task}: {cost} is based on {num_samples} samples, so on the longest one or two of them".format_map,
        ),
        "no_verdict": CaveatKind("warning", "{task}: no verdict: the {reason}".format_map),
        "few_pictures": CaveatKind(
            "warning",
            "{task}: to establish one of {num_settings} settings by {cost} takes {least} pictures; there are "
            "{num_pictures}".format_map,
        ),
        "samples_left_out": CaveatKind(
            "note", "{task}, {cost}: {num_samples} samples that some settings lack are left out".format_map
        ),
        "settings_left_out": CaveatKind("note", "{task}, {cost}: {num_settings} settings are left out".format_map),
        "one_value": CaveatKind(
            "warning",
            "{name} had one value ({value:g}): its effect is not known, other values are extrapolated".format_map,
        ),
        "unknown_knob": CaveatKind(
            "warning",
            "{name} had {num_values} values, and the estimator has no term for it: it predicts what they have in "
            "common".format_map,
            "fit it on results of one value",
        ),
        "one_length": CaveatKind(
            "note",
            "every answer had {num_tokens:g} output tokens: the expected length is that of the limit".format_map,
        ),
        "recalibrated": CaveatKind(
            "note",
            "recalibrated by {method} with {num_samples} samples".format_map,
            "its intervals have the ratios of the device before",
        ),
        "part_of_settings": CaveatKind(
            "note",
            lambda found: (
                f"fitted to and validated on {found['num_fitted']} of {found['num_settings']} settings, drawn at "
                f"random; {found['num_settings'] - found['num_fitted']} left out"
            ),
        ),
    }
