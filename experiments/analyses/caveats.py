"""The caveats of E2 and E3: what weakens their figures, beside the caveats of the results that they read."""

from collections.abc import Mapping
from typing import ClassVar

from experiment_core_utils.primitives.texts import counted
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
        "requests_failed": CaveatKind(
            "warning",
            "failed requests: {num_failed} of {num_samples}".format_map,
            "see their reasons and the server's log, and delete the result to measure it again",
            voids=lambda found: found["num_failed"] > MOST_FAILED * found["num_samples"],
        ),
        "unfinished": CaveatKind(
            "warning",
            lambda found: (
                f"unfinished: {found['num_left']} of {counted(found['num_settings'], 'setting')} of the run in "
                f"{found['folder']} have no result"
            ),
            "run the same command again to resume",
            voids=lambda found: True,
        ),
        "mixed_executions": CaveatKind("warning", "{reason}".format_map, voids=lambda found: True),
        "random_weights": CaveatKind(
            "warning",
            lambda found: "the weights are random: do not use accuracy or fronts",
            "times and operations are valid",
        ),
        "runs_differ": CaveatKind(
            "note",
            lambda found: (
                f"{found['task']}: settings are of several runs, one of each, and a run's speed is taken to vary by "
                f"{100 * found['fraction']:.1f} % (standard deviation)"
            ),
            "verdicts between settings of two runs contain it; several runs of each side, by knobprof compare --run "
            "with --repeats 5, would decide",
        ),
        "blocked_order_unknown": CaveatKind(
            "warning",
            "{task}: settings were measured one after another, and nothing shows how much the machine changed "
            "meanwhile".format_map,
            "no verdict on latencies; measure them again in one run",
        ),
        "control_off": CaveatKind(
            "warning",
            "{task}: something beside the knobs changed times: {control}, where 1 is to be expected".format_map,
            "do not read differences of its size as the knobs'",
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
            lambda found: (
                f"{found['task']}: {found['cost']} is based on {counted(found['num_samples'], 'sample')}, so on the "
                "longest one or two of them"
            ),
        ),
        "no_verdict": CaveatKind("warning", "{task}: no verdict: the {reason}".format_map),
        "few_pictures": CaveatKind(
            "warning",
            "{task}: to establish one of {num_settings} settings by {cost} takes {least} {independent}; there are "
            "{num_pictures}".format_map,
        ),
        "samples_left_out": CaveatKind(
            "note",
            lambda found: (
                f"{found['task']}, {found['cost']}: without {counted(found['num_samples'], 'sample')} that some "
                "settings lack"
            ),
        ),
        "settings_left_out": CaveatKind(
            "note",
            lambda found: f"{found['task']}, {found['cost']}: without {counted(found['num_settings'], 'setting')}",
        ),
        "one_value": CaveatKind(
            "warning",
            "{name} had one value ({value:g}): its effect is not known, other values are extrapolated".format_map,
        ),
        "short_span": CaveatKind(
            "warning",
            "{name} was {smallest:g} to {largest:g}: its effect is not known, other values are extrapolated".format_map,
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
            lambda found: f"recalibrated by {found['method']} with {counted(found['num_samples'], 'sample')}",
            "its intervals have the ratios of the device before",
        ),
        "part_of_settings": CaveatKind(
            "note",
            lambda found: (
                f"fitted to and validated on {found['num_fitted']} of {counted(found['num_settings'], 'setting')}, "
                f"drawn at random; {found['num_settings'] - found['num_fitted']} left out"
            ),
        ),
    }
