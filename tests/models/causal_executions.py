"""What runs the stages of each causal family of transformers on a GPU, tried on a tiny model.

    python -m tests.models.causal_executions [FAMILY ...] [--image_text] [--cuda] [--jobs 8] [--table FILE]

Each family has a process of its own, whose row is printed, and put into the table, when it is there. A family is
`described` where own kernels know its decoder, `captured` where a graph of its modules' decode steps, or one for each
length, and of its prefill where that can be captured, gives the tokens of `generate()` in float32 at each of up to four
settings, `eager` otherwise. On a CPU operators are recorded and replayed as a graph does; `--cuda` captures graphs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from experiment_core_utils.engines.cuda_graphs import CudaGraphs, GraphCapturer
from experiment_core_utils.models.hf.decoder_description import fused_decoder
from experiment_core_utils.models.hf.generate import GenerateStages, greedy_config
from experiment_core_utils.models.hf.graphed_prefill import GraphedDecoder
from experiment_core_utils.models.hf.graphed_stages import FixedDecode
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.length_decode import LengthDecode
from experiment_core_utils.models.hf.looped_experts import LoopedExperts
from experiment_core_utils.models.hf.static_cache_decode import FixedCacheDecode
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.causal_families import VOCABULARY, image_text_types, model_types, tiny_config
from tests.models.family_table import made_with, rows_of, table_parser, told
from tests.models.knob_families import enlarge_norms
from tests.models.recorded_replays import RecordedReplays

MOST_PARAMETERS = 2e9
NEW_TOKENS = 5
# Longer than the windows of 8 tokens, then shorter: what the first left behind must not be read.
PROMPTS = (21, 6)


@dataclass(frozen=True)
class Execution:
    """What a family runs by: `described`, `captured`, `eager` or `not built`, and why not by what is before it."""

    family: str
    way: str
    reason: str = ""
    settings: int = 0  #: at which tokens were those of `generate()`
    made_with: str = ""  #: versions and device


def built(model_type: str, device: torch.device, maker: Any = AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in maker.from_config(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ConfigurationError(f"its tiny config has {parameters} parameters, as some of its sizes are not known")
    model: Any = maker.from_config(config, dtype=torch.float32).eval()
    model.generation_config = greedy_config(model)
    model = enlarge_norms(model).to(device)
    # A config that its own modules cannot run is none.
    model.generate(**_prompt(PROMPTS[0], 0, model), max_new_tokens=2)
    return model


def execution_of(model_type: str, device: torch.device, maker: Any = AutoModelForCausalLM) -> Execution:
    by = made_with(device)
    try:
        model = built(model_type, device, maker)
    except Exception as error:
        return Execution(model_type, "not built", told(error), made_with=by)
    try:
        settings = captured_settings(model, FixedCacheDecode)
    except Exception as error:
        return _by_length(model_type, model, told(error), by)
    try:
        fused_decoder(model)
    except ConfigurationError as error:
        reason = str(error).removeprefix("engines do not know its decoder: ")
        return Execution(model_type, "captured", reason, settings, by)
    return Execution(model_type, "described", "", settings, by)


def _by_length(model_type: str, model: Any, reason: str, by: str) -> Execution:
    """The execution where no step fits all lengths, for this reason."""
    try:
        settings = captured_settings(model, LengthDecode)
    except Exception as error:
        reason = f"{reason}; a graph for each length: {told(error)}"
        return Execution(model_type, "eager", reason, made_with=by)
    return Execution(model_type, "captured", f"a graph for each length, because {reason}", settings, by)


@torch.inference_mode()
def captured_settings(model: Any, kind: Callable[..., FixedDecode]) -> int:
    """At how many settings graphs of the modules, in decode steps of this kind, give the tokens of `generate()`; raises
    where at one they do not.
    """
    tried = 0
    for setting in _settings(model):
        with setting:
            stages, prefill = GenerateStages(model), GraphedDecoder(model, _capturer(model))
            decode = kind(model, 96, _capturer(model))
            is_graphed = _can_capture(stages, prefill, _prompt(PROMPTS[0], 0, model))
            for tokens in (*PROMPTS, PROMPTS[0]):
                inputs = _prompt(tokens, seed=tried + tokens, model=model)
                expected = model.generate(**inputs, max_new_tokens=NEW_TOKENS)[0, tokens:].tolist()
                found = _answer(stages, prefill if is_graphed else None, decode, inputs)
                if found[: len(expected)] != expected:
                    raise ConfigurationError(f"a graph gives other tokens than generate() ({found} for {expected})")
        tried += 1
    return tried


def _capturer(model: Any) -> GraphCapturer:
    return LoopedExperts(model, CudaGraphs(model.device) if model.device.type == "cuda" else RecordedReplays())


def _can_capture(stages: GenerateStages, prefill: GraphedDecoder, inputs: Any) -> bool:
    """Whether prefills can be captured; in a run, the modules take over those that cannot."""
    try:
        with prefill.in_place(captures_new=True):
            stages.prefill(inputs, None)
    except ConfigurationError:
        return False
    return True


def _answer(stages: GenerateStages, prefill: GraphedDecoder | None, decode: FixedDecode, inputs: Any) -> list[int]:
    with nullcontext() if prefill is None else prefill.in_place(captures_new=True):
        logits, state = stages.prefill(inputs, None)
    with stages.decoding():
        decode.prepare(state, logits, NEW_TOKENS)
        return [int(decode.checked_token), *(int(decode.step().argmax()) for _ in range(NEW_TOKENS - 1))]


def _prompt(tokens: int, seed: int, model: Any) -> dict[str, torch.Tensor]:
    most = min(VOCABULARY, model.get_input_embeddings().num_embeddings)
    drawn = torch.randint(10, most, (1, tokens), generator=torch.Generator().manual_seed(seed)).to(model.device)
    return {"input_ids": drawn, "attention_mask": torch.ones_like(drawn)}


def _settings(model: Any) -> Iterator[Any]:
    """The model as it is, then with fewer blocks, with fewer experts and with both, where these can be set."""
    yield nullcontext()
    try:
        knobs = DecoderKnobs(model)
    except ConfigurationError:
        return
    every = range(knobs.num_total_blocks)
    left_out = next((index for index in (2, 1, 3, 0) if _can_go(knobs, every, index)), None)
    fewer = [index for index in every if index != left_out]
    top_k = None if knobs.top_k_unsupported_reason is not None else 1
    has_fewer = knobs.blocks_unsupported_reason is None and left_out is not None
    if has_fewer:
        yield knobs.applied(None, fewer)
    if top_k is not None:
        yield knobs.applied(top_k, every)
        if has_fewer:
            yield knobs.applied(top_k, fewer)


def _can_go(knobs: DecoderKnobs, every: range, index: int) -> bool:
    try:
        with knobs.applied(None, [other for other in every if other != index]):
            return True
    except ConfigurationError:
        return False


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--image_text", action="store_true", help="image-text models, with prompts of text alone")
    given = parser.parse_args()
    maker = AutoModelForImageTextToText if given.image_text else AutoModelForCausalLM
    families = given.families or (image_text_types() if given.image_text else model_types())
    rows = rows_of(
        "tests.models.causal_executions", given, families,
        lambda family, device: execution_of(family, device, maker),
        lambda family, why: Execution(family, "eager", why),
    )  # fmt: skip
    if not given.alone:
        ways = Counter(row["way"] for row in rows)
        total = sum(ways.values()) - ways["not built"]
        print(", ".join(f"{way} {number}" for way, number in ways.items()), f"of {total} built")


if __name__ == "__main__":
    main()
