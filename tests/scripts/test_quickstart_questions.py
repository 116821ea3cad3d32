"""The questions of the quickstart: as many of each type as are said, each about another picture."""

import subprocess
import sys
from collections import Counter

from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA


def test_each_question_is_about_another_picture() -> None:
    command = (sys.executable, str(REPOSITORY / "scripts" / "quickstart_questions.py"))
    ids = [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
    task = ReferenceVQA()
    assert Counter(map(task.question_type, ids)) == {"yes_no": 120, "reading": 110}
    assert len({index // task.questions_per_image for index in ids}) == len(ids) == 230
    # The first yes or no about the first picture that has one.
    yes_no = next(index for index in range(len(task)) if task.question_type(index) == "yes_no")
    assert ids[0] == yes_no
