"""Caveats as records: what a reader must know before quoting numbers, and the sentence of each kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, model_validator

from experiment_core_utils.primitives.texts import counted

Severity = Literal["warning", "note"]


class CaveatKind(NamedTuple):
    """What all caveats of a kind share."""

    severity: Severity
    what: Callable[[Mapping[str, Any]], str]  #: what happened, from the figures
    advice: str | None = None
    #: whether a run with it is INVALID, from the figures
    voids: Callable[[Mapping[str, Any]], bool] = lambda found: False


# Fractions of disturbed or failed samples above which a run is INVALID.
MOST_DISTURBED, MOST_FAILED = 0.05, 0.01


def _of_runs(found: Mapping[str, Any]) -> str:
    return f"{found['num_runs']} of {counted(found['num_all'], 'run')}"


def _unrepeated(found: Mapping[str, Any]) -> str:
    number = found.get("num_unrepeated")
    return f", {number} of them not repeated" if number else ""


class Caveat(BaseModel):
    """Something that weakens the numbers of a result."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    KINDS: ClassVar[Mapping[str, CaveatKind]]  #: the kinds that are known; `figures` are what their sentences name

    kind: str  #: what it is about, such as `throttled` or `few_samples`
    #: `warning` where the numbers of this result may mislead, `note` where it matters how they were made
    severity: Severity
    figures: dict[str, Any]  #: object of what was found, such as `fraction`; `{}` for none
    advice: str | None  #: what to do about it; None if nothing can be advised

    @classmethod
    def of(cls, kind: str, **figures: Any) -> Self:
        """A caveat of a known kind, with the severity and the advice of its kind."""
        known = cls.KINDS[kind]
        return cls(kind=kind, severity=known.severity, figures=figures, advice=known.advice)

    @model_validator(mode="after")
    def _figures_make_a_sentence(self) -> Self:
        try:
            _ = self.sentence, self.voids
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            missing = f"lack {error}" if isinstance(error, KeyError) else f"do not fit ({error})"
            raise ValueError(f"the figures of a caveat of kind {self.kind!r} {missing}") from error
        return self

    @property
    def sentence(self) -> str:
        """What happened, then what to do. A kind that is not known, of a later version, shows its figures."""
        known = self.KINDS.get(self.kind)
        what = f"{self.kind}: {self.figures}" if known is None else known.what(self.figures)
        return what if self.advice is None else f"{what}; {self.advice}"

    @property
    def extent(self) -> float:
        """Which fraction it is about, to find the worst; 0 for other kinds."""
        fraction = self.figures.get("fraction", self.figures.get("cpu_fraction"))
        return float(fraction) if isinstance(fraction, int | float) else 0.0

    @property
    def voids(self) -> bool:
        """Whether a run with it is INVALID: its times or scores cannot be compared."""
        known = self.KINDS.get(self.kind)
        return known is not None and known.voids(self.figures)


# Those that follow from how answers are read; made anew where answers are scored again.
ANSWER_KINDS = ("answers_unparsed", "answers_empty", "answers_one_token", "answers_unscored", "few_references")

Caveat.KINDS = {
    "data_commit_unknown": CaveatKind(
        "note",
        lambda found: "the commit of the data on the hub is not known",
        "use --dataset_revision COMMIT to make the run repeatable",
    ),
    "random_weights": CaveatKind(
        "note",
        lambda found: "random weights: do not use accuracy, and expect more even routing than in a trained model",
    ),
    "shared_cores": CaveatKind(
        "note",
        "{num_processes} processes share the CPU cores: times are not those of one process alone".format_map,
    ),
    "crowded_cores": CaveatKind(
        "warning",
        "cores: the run's own {num_threads} threads share {num_cores:g} CPU cores and slow each other: times are those "
        "of a shared machine".format_map,
        "use fewer processes, or fewer threads in each (--num_threads)",
    ),
    "offloaded_weights": CaveatKind(
        "warning",
        lambda found: (
            f"offloaded: {found['num_parts']} of {counted(found['num_all'], 'part')} of the model are copied to their "
            "device for each use; times are mostly those of copies"
        ),
        "use more or larger GPUs, or --quantization 4bit, before reading times as the model's",
    ),
    "kernels_missing": CaveatKind(
        "warning",
        lambda found: (
            f"kernels: transformers computes {', '.join(found['functions'])} in plain torch, much slower than by "
            f"{', '.join(found['packages'])}, which is not installed: times are not those of users who have it"
        ),
        "install it (pip install) and run again before reading times as the model's",
    ),
    "no_kernels_on_cpu": CaveatKind(
        "note",
        lambda found: (
            f"kernels: transformers computes {', '.join(found['functions'])} in plain torch, as for every user of a "
            f"CPU; GPUs have kernels for it ({', '.join(found['packages'])})"
        ),
        "do not read these times as those of a GPU",
    ),
    "pictures_not_shown": CaveatKind(
        "warning",
        lambda found: "pictures: a text model answered the questions without their pictures",
        "do not read its accuracy as that of a model that sees them",
    ),
    "server_unseen": CaveatKind(
        "note",
        "server: its stages, crops, blocks, experts, FLOPs and memory are not seen; times include its queue and the "
        "network ({place})".format_map,
        "start it without prefix caching, or repeated runs of a sample skip its prefill",
    ),
    "server_concurrency": CaveatKind(
        "note",
        "server: samples without times were asked {concurrency} at a time: batches of the server may change some "
        "answers".format_map,
    ),
    "open_loop": CaveatKind(
        "note",
        "open loop: requests came at {request_rate:g} a second, and their times count from then; those of neighbours "
        "depend on each other, so that intervals are too narrow where requests wait".format_map,
    ),
    "loads_in_turn": CaveatKind(
        "note",
        "loads: {copies} copies of the model were in memory one at a time; each of {loads} runs of a sample is of "
        "another load, and times are compared by their spread between loads".format_map,
    ),
    "open_loop_short": CaveatKind(
        "warning",
        "open loop: up to {most_under_way} of the {batch} requests of a batch were under way at once: most of them met "
        "a load that was still growing".format_map,
        "lower --request_rate, or raise --num_latency_samples (a batch has at most 256)",
    ),
    "server_behind": CaveatKind(
        "warning",
        "server: it answered {achieved_rate:.3g} of {request_rate:g} requests a second, with up to {most_under_way} "
        "under way: times depend on how many came".format_map,
        "lower --request_rate before reading them",
        # Answers of several lengths alone make up to 20 %, and up to half where the load grew all the time.
        lambda found: found["fraction"] > (0.5 if found["is_short"] else 0.2),
    ),
    "client_late": CaveatKind(
        "warning",
        "client: {num_late} of {num_requests} requests were sent more than 5 ms after they were due, the latest after "
        "{late_max_ms:.0f} ms: their times contain it".format_map,
        "leave the client cores of its own, or lower --request_rate",
    ),
    "server_pieces": CaveatKind(
        "warning",
        lambda found: (
            f"server: several tokens came in one piece in {_of_runs(found)}: the times between them are not known; the "
            "time per token counts the other tokens of the first piece, too, and is too short in short answers"
        ),
        "compare total times",
    ),
    "server_hidden_tokens": CaveatKind(
        "warning",
        lambda found: (
            f"server: {found['num_tokens']} tokens of thinking were not sent in {_of_runs(found)}: they are in the "
            "time to the first token, and not in the time per token"
        ),
        "compare total times",
    ),
    "server_salted": CaveatKind(
        "note",
        "server: it has a prefix cache (a prompt that it has seen takes {ratio:.0%} of the time): timed requests begin "
        "with a salt, whose tokens are counted, and accuracy is of prompts without it".format_map,
    ),
    "server_salt_changes": CaveatKind(
        "warning",
        "server: it has a prefix cache (a prompt that it has seen takes {ratio:.0%} of the time), and the salt before "
        "timed requests changes {num_changed} of {num_asked} answers: times are of computed prompts with other "
        "answers than those that are scored".format_map,
        "start the server without prefix caching before comparing total times",
    ),
    "server_warm": CaveatKind(
        "warning",
        "server: a repeated request has its first token after {ratio:.0%} of the first time: it comes from the "
        "server's prefix cache".format_map,
        "start the server without prefix caching",
    ),
    "server_step": CaveatKind(
        "warning",
        "server: its speed changed in a step: {before_ms:.0f} ms to the first token in the first {num_before} of "
        "{num_all} runs, {after_ms:.0f} ms after them".format_map,
        "do not read means across it; measure again once it is warm and alone",
    ),
    "server_uncounted": CaveatKind(
        "warning",
        lambda found: (
            f"server: it reports no usage in {_of_runs(found)}: their tokens are the pieces of text that came"
        ),
        "do not compare tokens or times per token with those of other servers",
    ),
    "server_miscounted": CaveatKind(
        "warning",
        lambda found: (
            f"server: it counts what cannot be in {_of_runs(found)} (negative numbers, texts, more tokens than were "
            "asked for): these counts are left out"
        ),
        "do not compare tokens or times per token with those of other servers",
    ),
    "server_recut": CaveatKind(
        "warning",
        lambda found: (
            f"server: more pieces than tokens came in {_of_runs(found)}: something between cuts them anew, and times "
            "between tokens are not known"
        ),
        "compare total times",
    ),
    "server_too_long": CaveatKind(
        "warning",
        lambda found: (
            f"server: {_of_runs(found)} have more tokens than were asked for: it does not follow max_tokens, so that "
            "limits of answers do not act"
        ),
        "do not read --answer_limit_list or --max_new_tokens from these results; set the limit in the server",
    ),
    "server_other_model": CaveatKind(
        "warning",
        lambda found: (
            f"server: {_of_runs(found)} were answered by {', '.join(found['names'])}, by its own words, and not by the "
            "model that was asked"
        ),
        "do not read them as those of that model unless it is another name of it",
    ),
    "batched_answers": CaveatKind(
        "note",
        lambda found: (
            f"{found['num_batched']} of {counted(found['num_samples'], 'sample')} are answered in batches: in "
            f"{found['dtype']} some answers may differ"
        ),
        "use --precision float32 for the same answers",
    ),
    "answered_one_by_one": CaveatKind(
        "warning",
        lambda found: (
            f"batches: {found['num_alone']} of {counted(found['num_samples'], 'sample')} were answered one by one, "
            f"because {found['reason']}"
        ),
        "their answers are right; --num_latency_samples saves little time with this model",
    ),
    "answers_cut": CaveatKind(
        "warning",
        lambda found: (
            f"answers: {found['num_cut']} of {found['num_answers']} were cut at the limit of "
            f"{counted(found['limit'], 'token')}"
        ),
        "raise the limit, or where answers run on, as those of base models do, end them by stop texts (--stop)",
    ),
    "answers_ended_at_once": CaveatKind(
        "warning",
        "answers: {num_answers} of {num_prompts} ended at their first token: throughput is that of prefills".format_map,
        "ask in the model's chat template, or set ignore_eos: true to measure answers of max_output_tokens",
    ),
    "decoding_left_out": CaveatKind(
        "warning",
        lambda found: f"decoding: the checkpoint prefers {', '.join(found['names'])}, which this run leaves out",
        "do not compare its accuracy with that of the model's card",
    ),
    "task_decoding_left_out": CaveatKind(
        "warning",
        "decoding: the task requests {names}, and decoding is greedy here".format_map,
        "do not compare its accuracy with figures that were sampled",
    ),
    "first_blocks": CaveatKind(
        "warning",
        lambda found: "blocks: without scores the first ones run, and the last are often not the least important",
        "score them by `knobprof blocks --method activation_change` and give the file as --importance_scores_file",
    ),
    "blocks_chosen_unknown": CaveatKind(
        "warning",
        "blocks: {file} does not say which questions chose them: those measured may be among these".format_map,
        "score the blocks again by `knobprof blocks`, which records them",
    ),
    "knobs_not_seen": CaveatKind(
        "warning",
        lambda found: "knobs: " + "; ".join(f"{name}: {reason}" for name, reason in found["reasons"].items()),
        "look at answers and times for whether it acted",
    ),
    "copy_stages_differ": CaveatKind(
        "warning",
        lambda found: (
            f"execution: this copy's stages ran by {', '.join(found['stages'])}, those of the model as it is by "
            f"{', '.join(found['own_stages'])}: times show this difference, too"
        ),
        "give --execution eager, by which all copies run alike",
    ),
    "batch_stages_differ": CaveatKind(
        "warning",
        lambda found: (
            f"execution: requests together ran by {', '.join(found['stages'])}, a request alone by "
            f"{', '.join(map(str, found['own_stages']))}: times and energy show this difference, too"
        ),
        "give --execution eager, by which both run alike",
    ),
    "answers_unparsed": CaveatKind(
        "warning",
        "answers: {fraction:.0%} could not be read as an answer by {metric}, and count as wrong".format_map,
        "read pred in the CSV of samples; change the prompt, or allow more tokens (--max_new_tokens)",
    ),
    "answers_empty": CaveatKind(
        "warning",
        "answers: {fraction:.0%} have no text".format_map,
        "see the final prompt in --dry_run: its form may not be the model's",
    ),
    "answers_one_token": CaveatKind(
        "warning",
        "answers: {fraction:.0%} are a single token where most reference answers have several words".format_map,
        "see the final prompt in --dry_run: its form may not be the model's",
    ),
    "answers_unscored": CaveatKind(
        "warning",
        "answers: {fraction:.0%} have no score by {metric} and do not enter accuracy".format_map,
        "see metric_details for the task's other metrics and for scoring that failed",
    ),
    "few_references": CaveatKind(
        "note",
        lambda found: (
            f"references: {found['fraction']:.0%} of the answers have too few for {found['metric']} to reach its best: "
            "their scores are the fraction of references that agree"
        ),
    ),
    "few_samples": CaveatKind(
        "warning",
        lambda found: (
            f"only {counted(found['num_samples'], 'sample')} per setting: use --num_samples {found['least']} or more "
            "before comparing accuracy"
        ),
    ),
    "throttled": CaveatKind(
        "warning",
        lambda found: f"throttled: the GPU lowered its clocks ({', '.join(found['reasons'])}) during this setting",
        "cool the GPU or lower its load, and measure the setting again",
        lambda found: True,
    ),
    "runs_discarded": CaveatKind(
        "note",
        lambda found: f"discarded and measured again: {counted(found['num_runs'], 'disturbed run')}; disturbed still: "
        f"{counted(found['num_kept'], 'sample')}{_unrepeated(found)}",
        voids=lambda found: found["num_kept"] > MOST_DISTURBED * found["num_samples"],
    ),
    "foreign_load_cpu": CaveatKind(
        "warning",
        "background load: other processes used {cpu_fraction:.0%} of the CPUs during this setting".format_map,
        "stop them and measure the setting again",
        lambda found: True,
    ),
    "foreign_load_gpu": CaveatKind(
        "warning",
        lambda found: "background load: other processes used the GPU when this setting began",
        "stop them and measure the setting again",
        lambda found: True,
    ),
    "energy_not_measured": CaveatKind("warning", "energy: not measured: {reason}".format_map),
    "server_gpus": CaveatKind(
        "note",
        lambda found: f"energy: of {', '.join(found['gpus'])}, on which the server's processes compute, and no others",
    ),
    "energy_closure_unknown": CaveatKind(
        "warning",
        lambda found: "energy: a stage was not measured: whether the stages add up to the whole is not known",
    ),
    "energy_closure": CaveatKind(
        "warning",
        "energy: the stages and the whole request differ by {fraction:+.1%}".format_map,
        "do not add the energy of stages up",
    ),
    "energy_short_windows": CaveatKind(
        "warning",
        lambda found: f"energy: the windows of {', '.join(found['stages'])} are shorter than {found['least_s']:g} s",
    ),
    "energy_goal_missed": CaveatKind(
        "warning",
        lambda found: (
            "energy: the longest windows leave an error of up to "
            + ", ".join(f"{stage} {error:.1%}" for stage, error in found["errors"].items())
            + f", more than the goal of {found['goal']:.1%}"
        ),
    ),
    "energy_passes_differ": CaveatKind(
        "warning",
        lambda found: (
            "energy: the joules of a request are "
            + ("of a single pass" if found["fraction"] is None else f"known to +-{found['fraction']:.1%}")
            + f" after {counted(found['num_passes'], 'pass')}; the goal was +-{found['goal']:.1%}"
        ),
    ),
    "energy_estimated": CaveatKind("warning", "energy: estimated by {source}, not measured".format_map),
    "energy_without_gpu": CaveatKind("warning", lambda found: "energy: the GPU's own energy is not in it"),
    "simulated_waiting": CaveatKind(
        "note", "the energy of the whole run contains {waiting_s:.3g} s of simulated waiting".format_map
    ),
}

caveat = Caveat.of


def sentences(caveats: Sequence[Caveat]) -> list[str]:
    """The sentence of each caveat, in their order."""
    return [each.sentence for each in caveats]


def caveat_fields(caveats: Sequence[Caveat]) -> dict[str, Any]:
    """What a file says of its caveats: their sentences under `caveats`, the records under `caveat_records`."""
    return {"caveats": sentences(caveats), "caveat_records": [each.model_dump() for each in caveats]}
