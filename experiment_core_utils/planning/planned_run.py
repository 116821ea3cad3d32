"""A planned run: its folder is locked and in order, and what is due in it is known to all processes."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from accelerate import Accelerator

from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.knobs.loading import loading_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.planning.fingerprint import agreed_fingerprint
from experiment_core_utils.planning.plan import (
    RequestedRun,
    left_out_by,
    loads_decided,
    refuse_unfilled_batches,
    requested_run,
)
from experiment_core_utils.planning.remarks import knob_lines, resumed_lines, unusable_lines_of, warnings_before
from experiment_core_utils.planning.tidying import (
    check_and_make_folder,
    fill_in_places,
    plan_of,
    run_uid_of,
    settings_of,
    tidy_folder,
)
from experiment_core_utils.primitives.collectives import broadcast_from_main, processes_on_this_machine
from experiment_core_utils.primitives.device import choose_device
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.primitives.texts import without_hidden
from experiment_core_utils.records.journal import LOCK_NAME, only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger, write_plan
from experiment_core_utils.records.locks import MainProcessWatch, RunLock
from experiment_core_utils.records.setting_result import SettingResult

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class PlannedRun:
    """What a run has left to do in its folder."""

    requested: RequestedRun
    ledger: Ledger
    due: tuple[Setting, ...]
    left_out: tuple[str, ...]  #: given values of knobs that are in no setting, a sentence each
    set_aside: Mapping[str, int]  #: finished samples of earlier runs that do not count, by setting
    #: in the main process, what keeps other runs out of the folder; elsewhere what looks after the main process
    lock: RunLock | None
    main_process: MainProcessWatch | None

    def check(self) -> None:
        """Raises WorkerLost or ResultsRefused where the folder or the main process is gone."""
        if self.lock is not None:
            self.lock.refresh()
        elif self.main_process is not None:
            self.main_process.check()

    def begin(self, experiment_id: str | None, accelerator: Accelerator) -> str | None:
        """Write the plan into the folder; returns the run's random identity, None where nothing is due."""
        requested, ledger, due = self.requested, self.ledger, self.due
        folder = requested.config.machine.output_dir
        run_uid = broadcast_from_main(lambda: run_uid_of(requested, ledger, due), accelerator) if due else None
        plan = plan_of(requested, experiment_id, ledger, due, accelerator.num_processes, run_uid)
        broadcast_from_main(lambda: write_plan(plan, folder), accelerator)
        recipe = without_hidden(requested.config.recipe)
        broadcast_from_main(lambda: write_text_atomically(recipe, folder / RECIPE), accelerator)
        for line in resumed_lines(plan, self.set_aside, folder) if accelerator.is_main_process else ():
            print(line, file=sys.stderr, flush=True)
        return run_uid

    def results(self) -> tuple[SettingResult, ...]:
        """All results of the plan, earlier ones included, in its order."""
        return tuple(result for key in self.requested.keys if (result := self.ledger.result(key)) is not None)


def planned_run(
    config: ProfilingConfig, energy: StageMeasurement | None, accelerator: Accelerator, stack: ExitStack
) -> PlannedRun:
    """Find the model, draw the samples, lock the folder until `stack` ends, and put it in order. A collective call.

    Raises:
        ConfigurationError, EnergyRefused, ResultsRefused: what was requested cannot be done here.
    """
    folder = config.machine.output_dir
    requested = requested_run(config)
    refuse_unfilled_batches(requested, accelerator.num_processes)
    here = processes_on_this_machine(accelerator)
    device = choose_device(config.machine.device, accelerator.local_process_index)
    # Free memory may differ between processes: the main one decides.
    reason = broadcast_from_main(lambda: loads_decided(requested, device, here).in_turn_reason, accelerator)
    requested = replace(requested, in_turn_reason=reason)
    check_and_make_folder(requested, energy)
    ledger = Ledger(folder, agreed_fingerprint(requested, accelerator))
    locks: list[RunLock] = []  # of the main process alone
    broadcast_from_main(lambda: locks.append(stack.enter_context(only_run_in(folder / PARTS_FOLDER))), accelerator)
    watch = None if locks else MainProcessWatch(folder / PARTS_FOLDER / LOCK_NAME, config.machine.worker_timeout)
    order = requested.order
    # Those without a result yet.
    keys = broadcast_from_main(lambda: tuple(key for key in order.keys if ledger.result(key) is None), accelerator)
    aside = broadcast_from_main(lambda: tidy_folder(folder, ledger, order.keys, keys), accelerator)
    broadcast_from_main(lambda: fill_in_places(requested, ledger), accelerator)
    due = tuple(settings_of(keys, requested.settings))
    if requested.in_turn_reason is not None:
        due = tuple(sorted(due, key=lambda setting: requested.loadings.index(loading_of(setting))))
    left_out = left_out_by(config, requested.source, requested.grid)
    unusable = broadcast_from_main(lambda: unusable_lines_of(requested, due), accelerator)
    if accelerator.is_main_process:
        for line in [*left_out, *warnings_before(requested, ledger, keys, unusable), *knob_lines(requested)]:
            print(line, file=sys.stderr, flush=True)
    return PlannedRun(requested, ledger, due, left_out, aside, locks[0] if locks else None, watch)
