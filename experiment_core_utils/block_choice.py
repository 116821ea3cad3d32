"""In: the flags and the model's folder; out: by what the blocks of a setting are chosen."""

from pathlib import Path

from experiment_core_utils.primitives.block_choice import OWN_SCORES_FILE, BlockChoice, read_importance
from experiment_core_utils.primitives.config import ProfilingConfig


def block_choice_of(config: ProfilingConfig, folder: Path) -> BlockChoice:
    """What the flags name; else the scores in the model's folder, which random weights have no use for; else neither.

    Raises:
        ConfigurationError: the scores in the folder cannot be read.
    """
    if config.block_sets is not None:
        return BlockChoice(sets=config.block_sets, file=config.block_sets_file)
    if config.importance_scores is not None:
        return BlockChoice(scores=config.importance_scores, file=config.importance_scores_file)
    own = folder / OWN_SCORES_FILE
    if config.use_own_scores and not config.random_weights and own.is_file():
        return BlockChoice(scores=read_importance(own), file=own)
    return BlockChoice()
