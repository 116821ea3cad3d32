"""What the experiments of a text run share: the folder, the model in memory, and what is said of each."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.b_model_loader import load_model_tokenizer
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    GenerationFailed,
    SettingError,
    UnforeseenError,
    traceback_of,
)
from experiment_core_utils.primitives.files import remove_leftovers
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.caveats import Caveat
from experiment_core_utils.records.journal import only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER
from experiment_core_utils.records.result_files import saved_traceback
from experiment_core_utils.saved_results.result_caveats import ANSWER_CAVEATS
from experiment_core_utils.text_run.experiment import RAW
from experiment_core_utils.text_run.plan import TextPlan


@dataclass(frozen=True)
class TextReport:
    """What became of a grid."""

    is_main_process: bool
    plan: TextPlan
    results: Mapping[str, Mapping[str, Any]]  #: of its combinations, those that an earlier run saved included, by name
    num_measured: int  #: of them by this run
    failed: Mapping[str, str]  #: title -> how it failed
    csv_path: Path | None

    @property
    def exit_code(self) -> int:
        """1 where a combination failed."""
        return 1 if self.failed else 0


@contextmanager
def watched_folder(folder: Path, stop: StopRequest) -> Iterator[None]:
    """In the main process: no other run works in the folder, and one that is removed ends this before the next batch.

    What a run that was killed left half written is gone; its experiment is measured again under another id.
    """
    with only_run_in(folder / PARTS_FOLDER) as lock, stop.watching(lock.refresh):
        for each in (folder, *(folder / RAW).glob("**/")):
            remove_leftovers(each)
        yield


# What decides which model is in memory; experiments that share it share the model.
_OF_THE_MODEL = frozenset(
    {
        "model_name",
        "revision",
        "allow_pickled_weights",
        "trust_remote_code",
        "fp_precision",
        "quantization_config",
        "device_map",
        "attn_implementation",
    }
)


@dataclass
class LastModel:
    """The language model and tokenizer that were loaded last, for text experiments that share them."""

    accelerator: Accelerator
    _key: str | None = None
    _loaded: tuple[Any, Any] | None = None

    def get(self, config: TextConfig) -> tuple[Any, Any]:
        """Model and tokenizer, loaded where those in memory are others; raises what `load_model_tokenizer` does."""
        key = config.model_dump_json(include=set(_OF_THE_MODEL))
        if self._loaded is None or key != self._key:
            self.drop()
            model, tokenizer = load_model_tokenizer(config)
            if config.mixed_precision != "no":
                model = self.accelerator.prepare_model(model, evaluation_mode=True)
            self._key, self._loaded = key, (model, tokenizer)
        return self._loaded

    def drop(self) -> None:
        """Forget the model, so that its memory is free for another."""
        self._key, self._loaded = None, None
        release_cached_memory(self.accelerator.device)


def trace_of(error: SettingError | ConfigurationError, results_dir: Path) -> str:
    """Where the traceback of the library's error behind this one is saved, as the end of a message; "" for none."""
    cause = error.__cause__
    if not isinstance(error, GenerationFailed | UnforeseenError) or cause is None:
        return ""
    return saved_traceback(traceback_of(cause), type(cause).__name__, results_dir)


def result_lines(title: str, name: str, result: Mapping[str, Any]) -> list[str]:
    """`1/2 decoding_mode=greedy: experiment_0001: 240 prompts, 512.3 output tokens/s (eager)`, and caveats of the
    answers.
    """
    metrics = result["inference_metrics"]
    rate = metrics["tokens_per_second"]
    speed = "no output tokens" if rate is None else f"{rate:.1f} output tokens/s"
    caveats = (Caveat.model_validate(each) for each in result["caveat_records"] if each["kind"] in ANSWER_CAVEATS)
    return [
        f"{title}: {name}: {counted(metrics['num_prompts'], 'prompt')}, {speed} ({metrics['execution']})",
        *(f"warning: {each.sentence}" for each in caveats),
    ]
