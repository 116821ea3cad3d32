"""The choice of active blocks for each block count, from a file of scores or of block sets.

What a file says is validated here; whether it fits the model, when the blocks are chosen.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from experiment_core_utils.primitives.files import is_gguf, read_json, shortened

# A model folder may contain scores of its own, which count where no flag says otherwise.
OWN_SCORES_FILE = "block_importance.json"
NO_SCORES = "none"
# Of a block or a number of blocks.
_MOST_DIGITS = 9


class ScoredQuestions(BaseModel):
    """The questions of one task that scores or sets were made of, as their provenance has them."""

    model_config = ConfigDict(frozen=True, strict=True)

    split: str
    source: dict[str, Any]  #: as of the task: where its samples come from
    scored_ids: tuple[int, ...]  #: places in the split
    scored_sha256: tuple[str, ...] | None  #: content of the samples; None for a generated task, whose ids say it


@dataclass(frozen=True)
class BlockChoice:
    """How the blocks of a setting are chosen: scores, sets, or neither, which takes the first blocks."""

    scores: Mapping[int, float] | None = None  #: importance by block
    sets: Mapping[int, tuple[int, ...]] | None = None  #: the blocks by their number
    file: Path | None = None  #: where either was read
    #: what the file was made of, by task; None where that is not known
    questions: Mapping[str, ScoredQuestions] | None = None

    @property
    def is_made(self) -> bool:
        """Whether there are scores or sets."""
        return self.scores is not None or self.sets is not None

    def blocks(self, count: int, total: int) -> tuple[int, ...]:
        """The `count` of `total` blocks that run.

        Raises:
            ImpossibleCombination: `count` outside 1..total, or sets that lack this number.
            ConfigurationError: scores or sets that do not fit the model's blocks.
        """
        if self.sets is None or count == total:
            return select_active_blocks(count, total, self.scores)
        select_active_blocks(count, total)
        if count not in self.sets:
            counts = ", ".join(map(str, sorted(self.sets)))
            raise ImpossibleCombination(f"--block_sets_file has no set of {count} blocks; it has sets of {counts}")
        last = self.sets[count][-1]
        if last >= total:
            raise ConfigurationError(
                f"--block_sets_file names block {last}, the model has blocks 0 to {total - 1}; give its own sets"
            )
        return self.sets[count]


def select_active_blocks(count: int, total: int, importance: Mapping[int, float] | None = None) -> tuple[int, ...]:
    """Which `count` of `total` blocks run.

    Block 0 always runs. The others are taken by descending importance, equal scores in favour of the earlier block;
    without scores the first `count` run.

    Raises:
        ImpossibleCombination: `count` outside 1..total.
        ConfigurationError: scores that leave out a block or name one that is not there.
    """
    if not 1 <= count <= total:
        raise ImpossibleCombination(f"{count} active blocks are not possible; the model has {total}, give 1 to {total}")
    if importance is None:
        return tuple(range(count))
    unknown = sorted(block for block in importance if block >= total)
    if unknown:
        raise ConfigurationError(
            f"the importance scores name blocks {unknown}, the model has blocks 0 to {total - 1}; give its own scores"
        )
    missing = [block for block in range(1, total) if block not in importance]
    if missing:
        raise ConfigurationError(
            f"the importance scores leave out blocks {missing}; give a score for each block from 1 to {total - 1}"
        )
    ranked = sorted(range(1, total), key=lambda block: (-importance[block], block))
    return tuple(sorted((0, *ranked[: count - 1])))


def choice_by_scores(path: Path, flag: str = "--importance_scores_file") -> BlockChoice:
    """The choice by a file of scores, with its questions; arguments and errors as of `read_importance`."""
    scores = read_importance(path, flag)
    return BlockChoice(scores=scores, file=path, questions=_questions_of(path, "blocks", scores, _BLOCKS))


def own_scores_in(folder: Path | None) -> BlockChoice:
    """The choice by the scores in a model's folder, or beside its file; neither where there are none, or no folder.

    Raises:
        ConfigurationError: they cannot be read.
    """
    if folder is None:
        return BlockChoice()
    own = (folder.parent if is_gguf(folder) else folder) / OWN_SCORES_FILE
    return choice_by_scores(own, flag="") if own.is_file() else BlockChoice()


def choice_by_sets(path: Path) -> BlockChoice:
    """The choice by a file of sets, with its questions; errors as of `read_block_sets`."""
    sets = read_block_sets(path)
    return BlockChoice(sets=sets, file=path, questions=_questions_of(path, "sets", sets, _SETS))


def provenance_path(path: Path) -> Path:
    """Where the provenance of a file of scores or of sets lies: `scores.json` -> `scores.provenance.json`."""
    return path.with_name(f"{path.stem}.provenance.json")


class _Scored(BaseModel):
    score: float


_BLOCKS: TypeAdapter[Any] = TypeAdapter(dict[int, _Scored])
_SETS: TypeAdapter[Any] = TypeAdapter(dict[int, tuple[int, ...]])
_QUESTIONS = TypeAdapter(dict[str, ScoredQuestions])


def _questions_of(
    path: Path, key: str, chosen: Mapping[int, Any], form: TypeAdapter[Any]
) -> Mapping[str, ScoredQuestions] | None:
    """The questions that the provenance beside a file names; None where there is none, one of another file of the same
    name, or one from before questions were recorded.

    Args:
        key: under which the provenance has what the file contains, in the form `form`.

    Raises:
        ConfigurationError: the provenance cannot be read.
    """
    beside = provenance_path(path)
    if not beside.is_file():
        return None
    content = read_json(beside, hint="move it away, or score the blocks again")
    try:
        recorded = {block: getattr(each, "score", each) for block, each in form.validate_python(content[key]).items()}
        questions = _QUESTIONS.validate_json(json.dumps(content["tasks"]))
    except (KeyError, TypeError, ValidationError):
        return None
    return questions if recorded == chosen else None


def read_importance(path: Path, flag: str = "--importance_scores_file") -> Mapping[int, float]:
    """Scores by block from a JSON object {"0": 0.56, ...}; which blocks must be there is checked with the model.

    Args:
        flag: that named the file, for messages; empty for the model's own file.

    Raises:
        ConfigurationError: the file cannot be read, or contains something else.
    """
    hint = 'give a JSON object of block -> score such as {"1": 0.56, "2": 0.31}'
    content = _json_object(path, flag, "scores", hint)
    named = f"{flag} {path}".lstrip()
    scores = {}
    for block, score in content.items():
        if not _is_count(block) or not _is_score(score):
            raise ConfigurationError(f"{named}: {shortened(block)}: {shortened(score)} is not a score; {hint}")
        if int(block) in scores:
            raise ConfigurationError(f"{named} names block {int(block)} twice; keep one score")
        scores[int(block)] = float(score)
    return scores


def read_block_sets(path: Path) -> Mapping[int, tuple[int, ...]]:
    """Blocks by their number from a JSON object {"3": [0, 1, 3], ...}; block 0 must be in each set.

    Raises:
        ConfigurationError: the file cannot be read, or contains something else.
    """
    hint = 'give a JSON object of number -> ascending blocks, block 0 among them, such as {"3": [0, 1, 3]}'
    content = _json_object(path, "--block_sets_file", "sets", hint)
    sets: dict[int, tuple[int, ...]] = {}
    for count, blocks in content.items():
        if not _is_count(count) or not _is_set(blocks) or len(blocks) != int(count):
            raise ConfigurationError(
                f"--block_sets_file {path}: {shortened(count)}: {shortened(blocks)} is not a set of blocks; {hint}"
            )
        if int(count) in sets:
            raise ConfigurationError(f"--block_sets_file {path} has two sets of {int(count)} blocks; keep one")
        sets[int(count)] = tuple(blocks)
    return sets


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MOST_DIGITS


def _is_score(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # Whole numbers of JSON may be too large for a float.
    return abs(value) <= sys.float_info.max


def _is_set(blocks: Any) -> bool:
    if not isinstance(blocks, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in blocks):
        return False
    return bool(blocks) and blocks[0] == 0 and blocks == sorted(set(blocks))


def _json_object(path: Path, flag: str, what: str, hint: str) -> Mapping[str, Any]:
    content = read_json(path, flag, hint)
    if not isinstance(content, dict) or not content:
        raise ConfigurationError(f"{flag} {path} contains no {what}; {hint}".lstrip())
    return content
