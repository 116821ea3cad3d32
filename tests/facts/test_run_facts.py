"""The provenance of a run: the model as it was loaded, the task as it was read, the caveats of the whole."""

from dataclasses import replace

import torch
from accelerate import Accelerator

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.facts.run_facts import facts_of_run
from experiment_core_utils.planning.plan import RequestedRun, requested_run
from experiment_core_utils.records.provenance import Model


def requested(*flags: str) -> RequestedRun:
    return requested_run(parse_config(["--tier_list", "low", "high", "--num_samples", "4", "--device", "cpu", *flags]))


def test_model_and_task_stand_under_their_names_and_a_task_keeps_its_own_limit() -> None:
    run = requested("--max_new_tokens", "3")
    entry = facts_of_run(run, Accelerator(cpu=True), torch.device("cpu"), 2, "0007", {"dtype": "float32"})
    assert entry.experiment_id == "0007"
    known = {"name": run.source.name, "revision": run.source.revision, "dtype": "float32"}
    assert entry.model.content() == dict.fromkeys(Model.model_fields) | known
    assert entry.task.content() == {
        "name": "reference_vqa",
        "split": run.task.split,
        "metric": "vqa_score",
        "max_new_tokens": run.task.max_new_tokens,
        "source": dict(run.task.source),
        "prompt_form": dict(run.task.prompt_form),
    }
    assert run.task.max_new_tokens != 3 == entry.experimental_variables.max_new_tokens


def test_caveats_come_from_the_machine_the_batches_and_the_number_of_samples() -> None:
    run = requested("--num_latency_samples", "1")
    device = torch.device("cpu")
    alone = facts_of_run(run, Accelerator(cpu=True), device, 1, "0001", {"dtype": "float32"}).caveats
    assert [each[:24] for each in alone] == ["only 4 samples per setti"]
    shared = facts_of_run(run, Accelerator(cpu=True), device, 2, "0001", {"dtype": "bfloat16"}).caveats
    assert [each[:24] for each in shared] == [
        "2 processes share the CP",
        "3 of 4 samples are answe",
        "only 4 samples per setti",
    ]


def test_few_samples_are_no_caveat_of_one_setting() -> None:
    run = requested()

    def kinds(each: RequestedRun) -> list[str]:
        device = torch.device("cpu")
        made = facts_of_run(each, Accelerator(cpu=True), device, 1, "0001", {"dtype": "float32"})
        return [found.kind for found in made.caveat_records]

    assert len(run.settings) > 1 and kinds(run) == ["few_samples"]
    assert kinds(replace(run, grid=run.grid[:1], beside=None)) == []
