"""The knob of several checkpoints of a model: what may be given, and what shows that another one answered."""

from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.interface import CannotBeSeen, KnobLimits, KnobRequest
from experiment_core_utils.knobs.loading import config_of_loading, loading_of, variant_of
from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.knobs.variant import VARIANT, VariantFlags
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct

HERE = KnobLimits(4, None, None)
SERVED = KnobLimits(None, None, None, variants=("a", "b"))


def request(limits: KnobLimits, *given: str, random_weights: bool = False) -> KnobRequest:
    return KnobRequest(VariantFlags(variant=given or None), limits, "m", None, random_weights)


def test_the_model_as_it_is_comes_first_and_needs_no_name_in_keys() -> None:
    values = VARIANT.requested(request(HERE, "q4=a=b.gguf", "Q8.0=hub/other"))
    assert (values.values, values.is_given) == (("own", "q4", "Q8.0"), True)
    assert not VARIANT.requested(request(HERE)).is_given
    assert "variant" not in reference_setting(HERE).values and reference_setting(SERVED).level("variant") == "a"
    assert Setting.of(top_k=2, variant="own").key == "topk2"
    setting = Setting.named("topk2_variant-q4_format-bfloat16")
    assert loading_of(setting) == (("variant", "q4"), ("number_format", "bfloat16"))
    assert variant_of(loading_of(setting)) == "q4" and variant_of(()) == "own"
    # Its path is not a field of the configuration that is replaced by its name.
    assert config_of_loading(loading_of(setting)) == {"precision": "bfloat16"}


def test_paths_are_part_of_what_was_requested() -> None:
    flags = VariantFlags(variant=("q4=a=b.gguf",))
    assert flags.variant_paths == {"q4": "a=b.gguf"}
    assert dict(VARIANT.flags_beside_values(flags)) == {"variant": ["q4=a=b.gguf"]}
    assert VARIANT.fingerprint(request(HERE, "q4=a")) == ("q4",) and VARIANT.fingerprint(request(HERE)) == ()


@pytest.mark.parametrize("given", [("q4",), ("=a",), ("own=a",), ("q_4=a",), ("q4=",), ("q4=a", "q4=b")])
def test_a_variant_without_a_name_or_path_of_its_own_is_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="--variant .*; give a name of|--variant gives two checkpoints"):
        parse_config(["--variant", *given])


def test_servers_and_random_weights_have_none() -> None:
    with pytest.raises(ConfigurationError, match="--variant loads checkpoints here, .* --endpoint several NAME=URL"):
        VARIANT.requested(request(SERVED, "q4=a"))
    with pytest.raises(ConfigurationError, match="--random_weights makes all variants one model"):
        VARIANT.requested(request(HERE, "q4=a", random_weights=True))
    with pytest.raises(ConfigurationError, match="own is the model of --model_path; give the server another name"):
        parse_config(["--endpoint", "own=http://localhost:1/v1", "b=http://localhost:2/v1", "--model", "m"])


def test_a_checkpoint_with_the_logits_of_the_model_as_it_is_did_not_act() -> None:
    setting = Setting.of(variant="q4")

    def proven(counted: Any, of: Setting = setting) -> object:
        return VARIANT.prove(SimpleNamespace(counted=counted), of, None)

    assert proven({"loading": {"logits_distance": 1e-7}}) is None
    # Behind a server, and at rest, nothing has to differ.
    assert proven({}) is None and proven({"loading": {"logits_distance": 0.0}}, Setting.of(top_k=1)) is None
    assert isinstance(proven({"loading": {"logits_distance": None}}), CannotBeSeen)
    with pytest.raises(KnobDidNotAct, match="^variant-q4: the checkpoint answers with the logits of the model as it"):
        proven({"loading": {"logits_distance": 0.0}})
