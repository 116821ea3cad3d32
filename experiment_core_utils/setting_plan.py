"""In: a configuration and a model's limits; out: the settings to measure, judged before any weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiment_core_utils.b_model_loader import ModelSource
from experiment_core_utils.block_choice import block_choice_of
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import KnobLimits, KnobSetting, VisionTarget, own_target
from experiment_core_utils.primitives.strategies import plan_settings


@dataclass(frozen=True)
class AskedValues:
    """The values of each knob that a run is asked for, given or by default."""

    targets: tuple[VisionTarget, ...]
    top_k: tuple[int | None, ...]
    block_counts: tuple[int, ...]


def plan_for(config: ProfilingConfig, source: ModelSource) -> tuple[KnobSetting, ...]:
    """The settings asked for.

    Raises:
        ConfigurationError: more experts or blocks than the model has, a knob that cannot be turned in it, or scores
            or sets of blocks that do not fit it.
    """
    asked = asked_values(config, source)
    return plan_settings(
        config.sampling_strategy,
        asked.targets,
        asked.top_k,
        asked.block_counts,
        source.limits.num_total_blocks,
        block_choice_of(config, source.folder),
        config.num_configs,
        config.seed,
    )


def asked_values(config: ProfilingConfig, source: ModelSource) -> AskedValues:
    """The flags' values; without them three tiers, half and all of the experts, three quarters and all of the blocks.

    A knob that cannot be turned stays at the model's own value.

    Raises:
        ConfigurationError: another value was given for it, or more experts than the model has.
    """
    limits, name = source.limits, source.name
    return AskedValues(_targets(config, limits, name), _top_k(config, limits, name), _blocks(config, limits, name))


def _targets(config: ProfilingConfig, limits: KnobLimits, name: str) -> tuple[VisionTarget, ...]:
    if limits.vision_refusal is None:
        return config.vision_targets
    if config.vision_targets_given:
        raise ConfigurationError(
            f"--tier_list and --vision_tokens_list do nothing for {name}: {limits.vision_refusal}; drop them"
        )
    return (own_target(),)


def _top_k(config: ProfilingConfig, limits: KnobLimits, name: str) -> tuple[int | None, ...]:
    own = limits.default_top_k
    if limits.top_k_refusal is not None:
        foreign = [top_k for top_k in config.top_k_list or () if top_k != own]
        if foreign:
            raise ConfigurationError(f"--top_k_list {foreign[0]} cannot be set in {name}: {limits.top_k_refusal}")
        return (own,)
    assert own is not None and limits.num_experts is not None
    values = config.top_k_list or _unique(max(own // 2, 1), own)
    for top_k in values:
        if top_k > limits.num_experts:
            raise ConfigurationError(
                f"--top_k_list {top_k} is more than the {limits.num_experts} experts of {name}; "
                f"give 1 to {limits.num_experts}"
            )
    return values


def _blocks(config: ProfilingConfig, limits: KnobLimits, name: str) -> tuple[int, ...]:
    total = limits.num_total_blocks
    if limits.blocks_refusal is not None:
        foreign = [count for count in config.num_active_blocks_list or () if count != total]
        if foreign:
            raise ConfigurationError(
                f"--num_active_blocks_list {foreign[0]} cannot be set in {name}: {limits.blocks_refusal}"
            )
        return (total,)
    return config.num_active_blocks_list or _unique(-(-3 * total // 4), total)


def left_out_by(config: ProfilingConfig, source: ModelSource, settings: Sequence[KnobSetting]) -> tuple[str, ...]:
    """What was asked for and is in no setting: other strategies than `full` may leave values out."""
    asked = asked_values(config, source)
    knobs = (
        ("vision targets", [each.label for each in asked.targets], {each.vision.label for each in settings}),
        ("top-k", config.top_k_list or (), {each.top_k for each in settings}),
        ("block counts", config.num_active_blocks_list or (), {each.num_active_blocks for each in settings}),
    )
    missing = [(name, [value for value in given if value not in used]) for name, given, used in knobs]
    return tuple(f"{name} {', '.join(map(str, values))}" for name, values in missing if values)


def _unique(*values: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))
