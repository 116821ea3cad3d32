"""Engines and graphs answer as the model's own `generate()`, alone and in batches, and the results say what ran."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from experiment_core_utils.b_model_loader import load_model_tokenizer
from experiment_core_utils.c_prompt_processing import tokenise_prompts
from experiment_core_utils.config.text import TextConfig, validated
from experiment_core_utils.e_inference import run_gen_inference
from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.g_metrics_inference import combine_inference_metrics
from experiment_core_utils.measuring.execution import settle_way
from experiment_core_utils.measuring.text_generator import TextGenerator
from experiment_core_utils.measuring.text_shard import OwnPrompts, TextShard
from experiment_core_utils.models import text_model
from experiment_core_utils.models.common.preferences import NO_PREFERENCES
from experiment_core_utils.models.common.text_generation import generation_values, text_ends
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.text_model import staged_language_model
from experiment_core_utils.primitives.errors import ConfigurationError, GenerationFailed
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.text import InferenceResults
from tests.models.tiny_checkpoints import family_named, write_checkpoint
from tests.tiny_models.tiny_text_model import ScriptedTextModel, tiny_text_model, tiny_tokenizer

NEW_TOKENS = 9
ALONE, TOGETHER = {"batch_size___fixed_batching": 1}, {"batch_size___fixed_batching": 3}
UNEQUAL = {"adaptive_batching": True, "adaptive_max_tokens": 24}
PROMPTS = ("What is left of it?", "a", "abc abc abc ", "Is it raining in the street?", "b c")
Loaded = tuple[str, Any, Any]


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


FAMILIES: dict[str, Any] = {
    "llama": "llama",
    "olmoe": "olmoe",
    "windows": family_named("MistralConfig", sliding_window=8),
    "dense_first": family_named(
        "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0]
    ),
}


@pytest.fixture(scope="module", params=[*FAMILIES, "embedded"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The name, the model in float32 and the tokenizer."""
    folder = str(EMBEDDED_MODEL)
    if request.param != "embedded":
        folder = str(write_checkpoint(FAMILIES[request.param], tmp_path_factory.mktemp(request.param)))
    values = {"model_name": folder, "device": "cpu", "fp_precision": "float32"}
    return folder, *load_model_tokenizer(values)


def config_of(name: str, **values: Any) -> TextConfig:
    defaults = {"batching_options": ALONE, "max_output_tokens": NEW_TOKENS, "device": "cpu"}
    return validated({"model_name": name, **defaults, **values})


def run(loaded: Loaded, accelerator: Accelerator, **values: Any) -> InferenceResults:
    name, model, tokenizer = loaded
    return run_gen_inference(
        model, tokenizer, tokenise_prompts(PROMPTS, tokenizer), config_of(name, **values), accelerator
    )


def judged(model: Any, tokenizer: Any, **values: Any) -> list[list[int]]:
    """What the model's own `generate()` answers to each prompt."""
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS}
        found.append(model.generate(**given, do_sample=False, **values)[0, ids.shape[1] :].tolist())
    return found


def tokens_of(results: InferenceResults) -> list[list[int]]:
    return [query["output_token_ids"] for query in results["queries"]]


@pytest.mark.parametrize("batching", [ALONE, TOGETHER, UNEQUAL], ids=["alone", "together", "unequal"])
def test_engines_answer_as_generate_and_leave_the_model_as_it_was(
    loaded: Loaded, batching: Mapping[str, Any], accelerator: Accelerator
) -> None:
    _, model, tokenizer = loaded
    own = model.generation_config
    values = own.to_dict()
    expected = judged(model, tokenizer)
    results = run(loaded, accelerator, batching_options=batching)
    assert tokens_of(results) == expected
    assert combine_inference_metrics(results)["execution"] == "cpu"
    sizes = [len(batch["prompt_indices"]) for batch in results["batches"]]
    assert sizes == {1: [1] * 5, 3: [3, 2]}.get(batching.get("batch_size___fixed_batching", 0), sizes)
    assert batching is not UNEQUAL or len(set(sizes)) > 1
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    assert len(set(lengths)) > 3
    for batch in results["batches"]:
        steps = max(len(expected[place]) for place in batch["prompt_indices"])
        assert batch["ttft_s"] is not None and len(batch["inter_token_s"]) == steps - 1
        assert batch["ttft_s"] + sum(batch["inter_token_s"]) == pytest.approx(batch["inference_time_s"])
        assert batch["computed_output_tokens"] == steps * len(batch["prompt_indices"])
        # Prompts are prefilled one by one, without padding.
        assert batch["padded_input_tokens"] == sum(lengths[place] for place in batch["prompt_indices"])
    # Experiments share a loaded model.
    assert model.generation_config is own and own.to_dict() == values


# By transformers' own `generate()`, in batches.
DRAWN_GREEDILY = {"decoding_mode": "top_k", "decoder_top_k": 1}


@pytest.mark.parametrize("batching", [ALONE, TOGETHER], ids=["alone", "together"])
def test_engines_end_answers_as_generate(
    loaded: Loaded, batching: Mapping[str, Any], accelerator: Accelerator
) -> None:
    _, model, tokenizer = loaded
    endless = judged(model, tokenizer, eos_token_id=None)
    ignoring = run(loaded, accelerator, ignore_eos=True, batching_options=batching)
    assert {query["output_tokens"] for query in ignoring["queries"]} == {NEW_TOKENS}
    assert ignoring["output_tokens"].tolist() == endless
    texts = ignoring["output_text"]
    assert texts is not None
    # A character that is in the midst of an answer, and no half of one.
    stop = next(
        character for text in texts for character in text[1:-1] if character.isascii() and character.isprintable()
    )
    stopped = run(loaded, accelerator, stop=[stop], batching_options=batching)
    by_generate = run(loaded, accelerator, stop=[stop], batching_options=batching, decoder_config=DRAWN_GREEDILY)
    assert tokens_of(stopped) == tokens_of(by_generate)
    assert stopped["output_text"] == by_generate["output_text"]
    # Nothing is computed after the end of the last answer.
    for batch in stopped["batches"]:
        longest = max(stopped["queries"][place]["output_tokens"] for place in batch["prompt_indices"])
        assert batch["computed_output_tokens"] == longest * len(batch["prompt_indices"])
    assert stopped["total_output_tokens"] < run(loaded, accelerator)["total_output_tokens"]
    assert (stopped["decoding"]["execution"], by_generate["decoding"]["execution"]) == ("cpu", "eager")


def test_an_end_of_sequence_ends_its_own_answer_alone(loaded: Loaded, accelerator: Accelerator) -> None:
    """The third token of the first answer that has one ends answers; an ended one goes on unseen while others run."""
    _, model, tokenizer = loaded
    own = model.generation_config
    end = next(answer[2] for answer in judged(model, tokenizer) if len(answer) > 2)
    try:
        model.generation_config = copy.copy(own)
        model.generation_config.eos_token_id = [end, tokenizer.eos_token_id]
        expected = judged(model, tokenizer)
        results = run(loaded, accelerator, batching_options=TOGETHER)
    finally:
        model.generation_config = own
    assert tokens_of(results) == expected and results["decoding"]["execution"] == "cpu"
    assert len({len(answer) for answer in expected}) > 1


@pytest.mark.parametrize("preferred", [{"repetition_penalty": 3.0}, {"min_new_tokens": 5}])
def test_preferences_go_through_generate_and_are_still_there_afterwards(
    accelerator: Accelerator, preferred: Mapping[str, Any]
) -> None:
    model, tokenizer = tiny_text_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, judged(model, tokenizer)[0][2]]
    model.generation_config.update(**preferred)
    for batching in (ALONE, TOGETHER):
        results = run(("tiny", model, tokenizer), accelerator, batching_options=batching)
        assert tokens_of(results) == judged(model, tokenizer)
        assert results["decoding"]["execution"] == "eager"
        assert next(iter(preferred)) in results["decoding"]["execution_reason"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"decoder_config": {"decoding_mode": "top_k", "decoder_top_k": 2}}, "decoding_mode top_k draws"),
        ({"mixed_precision": "bf16"}, "mixed_precision bf16"),
        ({"attn_implementation": "eager"}, "attn_implementation"),
    ],
)
def test_what_goes_through_generate_says_why(values: Mapping[str, Any], reason: str) -> None:
    found = staged_language_model(config_of("tiny", **values), tiny_text_model(), tiny_tokenizer())
    assert found[0] is None and reason in str(found[1])


def test_stop_texts_of_prompts_inside_and_outside_thinking_are_left_to_generate(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    """In the thought that the second prompt opens, a stop text ends no answer: rows of a batch end differently."""
    family = replace(family_named("LlamaConfig"), specials={"opening": "<think>", "closing": "</think>"})
    folder = str(write_checkpoint(family, tmp_path))
    loaded = folder, *load_model_tokenizer({"model_name": folder, "device": "cpu", "fp_precision": "float32"})
    prompts = tokenise_prompts(("Why?", "Why is it so?<think>"), loaded[2])
    for batching, execution in ((ALONE, "cpu"), (TOGETHER, "eager")):
        config = config_of(folder, stop=["e"], batching_options=batching)
        results = run_gen_inference(*loaded[1:], prompts, config, accelerator)
        assert results["decoding"]["execution"] == execution
    assert "end inside thinking, where a stop text ends no answer" in results["decoding"]["execution_reason"]


def test_a_model_of_another_library_goes_through_generate() -> None:
    found = staged_language_model(config_of("x"), ScriptedTextModel({}), tiny_tokenizer())
    assert found == (None, "ScriptedTextModel is not a causal language model of transformers")


def settled_shard(
    staged: Callable[[Any], TransformersModel], model: Any, accelerator: Accelerator, **values: Any
) -> TextShard:
    config, tokenizer = config_of("tiny", **values), tiny_tokenizer()
    ends = text_ends(config, model, tokenizer, NO_PREFERENCES)[0]
    values = generation_values(config, model, tokenizer)
    generator = TextGenerator(model, values, config.random_seed, ends, staged=staged(model))
    tokenised = tokenise_prompts(PROMPTS, tokenizer)
    places = tuple(range(len(PROMPTS)))
    own = OwnPrompts(places, tokenised["input_ids"], tokenised["attention_mask"], names=[10 * each for each in places])
    shard = TextShard(generator, own, config, 0, 1)
    settle_way(generator.staged, shard.stages_refusal, "prompts", accelerator)
    return shard


class _NoGraphs(Reruns):
    def capture(self, work: Any, constants: Any = ()) -> Any:
        raise ConfigurationError("nothing can be captured here")


def captured_by(monkeypatch: pytest.MonkeyPatch, capturer: type[Reruns]) -> Callable[[Any], TransformersModel]:
    """As `staged_language_model` on a GPU, with this capturer in place of CUDA graphs."""

    def staged(model: Any) -> TransformersModel:
        class OnGpu(TransformersModel):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given, capturer())

        monkeypatch.setattr(text_model, "TransformersModel", OnGpu)
        found, reason = staged_language_model(config_of("tiny"), model, tiny_tokenizer())
        assert found is not None, reason
        return found

    return staged


def test_graphs_answer_as_generate(monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator) -> None:
    model = tiny_text_model()
    shard = settled_shard(captured_by(monkeypatch, Reruns), model, accelerator)
    queries, _, windows = shard.run(StopRequest())
    assert shard.generator.execution["execution"] == "graph"
    assert [query["output_token_ids"] for query in queries] == judged(model, tiny_tokenizer())
    assert all(begin < end for begin, end in windows)


@pytest.mark.parametrize(
    ("capturer", "batching", "reason"),
    [
        (_NoGraphs, ALONE, "nothing can be captured here"),
        (Reruns, TOGETHER, "graphs of its modules run one request at a time, and not 3"),
    ],
)
def test_graphs_that_are_refused_are_named_and_generate_runs(
    monkeypatch: pytest.MonkeyPatch,
    accelerator: Accelerator,
    capsys: pytest.CaptureFixture[str],
    capturer: type[Reruns],
    batching: Mapping[str, Any],
    reason: str,
) -> None:
    model = tiny_text_model()
    shard = settled_shard(captured_by(monkeypatch, capturer), model, accelerator, batching_options=batching)
    assert "warning: the modules run all prompts: " in (warning := capsys.readouterr().err) and reason in warning
    queries, *_ = shard.run(StopRequest())
    execution = shard.generator.execution
    assert execution["execution"] == "eager" and reason in str(execution["execution_reason"])
    assert "--execution" not in str(execution["execution_reason"])
    assert [query["output_token_ids"] for query in queries] == judged(model, tiny_tokenizer())


def test_engines_that_answer_batches_wrongly_run_no_prompt(
    monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator
) -> None:
    """The later requests of a batch are given the first one's keys and values."""
    put = KVCache.copy_into_row

    def copied(self: KVCache, row: int, alone: KVCache) -> None:
        put(self, row, alone)
        if row:
            self.keys[:, row] = self.keys[:, 0]
            self.values[:, row] = self.values[:, 0]

    monkeypatch.setattr(KVCache, "copy_into_row", copied)
    model, tokenizer = tiny_text_model(), tiny_tokenizer()
    results = run(("tiny", model, tokenizer), accelerator, batching_options=TOGETHER)
    assert tokens_of(results) == judged(model, tokenizer)
    assert results["decoding"]["execution"] == "eager"
    assert "requests cannot run together: in a batch of" in results["decoding"]["execution_reason"]
    alone = run(("tiny", model, tokenizer), accelerator)
    assert alone["decoding"]["execution"] == "cpu"


@pytest.mark.parametrize("batching", [ALONE, TOGETHER], ids=["alone", "together"])
def test_logits_that_are_not_finite_are_named_by_their_prompt(
    batching: Mapping[str, Any], accelerator: Accelerator
) -> None:
    """The longest prompt is proven first; another one fails when it runs."""
    model, tokenizer = tiny_text_model(), tiny_tokenizer()
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    only_third = next(token for token in ids[2] if token not in {*ids[0], *ids[1], *ids[3]})
    with torch.no_grad():
        model.get_input_embeddings().weight[only_third] = float("nan")
    with pytest.raises(GenerationFailed, match=r"^logits are not finite at prompt 2 \(float32"):
        run(("tiny", model, tokenizer), accelerator, num_warmup_batches=0, batching_options=batching)
    with torch.no_grad():
        model.get_input_embeddings().weight[ids[3][0]] = float("nan")
    with pytest.raises(GenerationFailed, match=r"^logits are not finite at prompt 3 \(float32"):
        run(("tiny", model, tokenizer), accelerator, num_warmup_batches=0, batching_options=batching)
