"""The questions of quickstart.sh: ids of `reference_vqa`, each about a picture of its own.

python scripts/quickstart_questions.py
"""

import sys

import checkout  # noqa: F401

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA

# How many of each type. Of the first a small picture and few experts lose hardly any, of the second many.
COUNTS = {"yes_no": 120, "reading": 110}


@reporting_errors
def main() -> int:
    """Print the ids of the first question of a type about each picture that no type before it asks about."""
    task, by_picture = ReferenceVQA(), dict[int, int]()
    for question_type, count in COUNTS.items():
        of_type = [index for index in range(len(task)) if task.question_type(index) == question_type]
        first = {index // task.questions_per_image: index for index in reversed(of_type)}
        left = sorted(picture for picture in first if picture not in by_picture)
        by_picture |= {picture: first[picture] for picture in left[:count]}
    print(*by_picture.values())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
