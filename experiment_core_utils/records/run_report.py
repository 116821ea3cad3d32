"""What a run leaves behind."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.primitives.errors import EXIT_CODE_FAILED_SAMPLES
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.records.settings import SettingFailure


@dataclass(frozen=True)
class RunReport:
    """What a run leaves behind."""

    experiment_id: str | None  #: None where every setting was done already
    is_main_process: bool
    #: contents of the settings' files, in the order of the plan; settings that failed are not among them
    results: tuple[SettingResult, ...]
    failed: Mapping[str, SettingFailure]  #: settings that could not be run
    #: given values of knobs that are in no setting, a sentence each
    left_out: tuple[str, ...]
    output_dir: Path
    #: the table of all settings, with those of this fingerprint that earlier runs left in the folder; None where every
    #: setting failed, and on processes other than the main one
    csv_path: Path | None

    @property
    def exit_code(self) -> int:
        """0: all measured; 1: settings failed; 3: all settings have results, but samples of them failed.

        Known to the main process only; the others give 0, or launchers would end the run because of them.
        """
        if not self.is_main_process:
            return 0
        if self.failed:
            return 1
        return EXIT_CODE_FAILED_SAMPLES if any(result.failed_samples for result in self.results) else 0
