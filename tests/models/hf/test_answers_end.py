"""Where answers of tiny checkpoints end, by each way of generating: alone, by graphs, by stages and in batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.c_prompt_processing import tokenise_prompts
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.g_metrics_inference import sample_record
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from tests.engines.test_answer_ends import CHATML
from tests.models.hf.test_batch import sample
from tests.models.tiny_checkpoints import write_checkpoint

LOW = tier_target("low")
STEPS = 12


def loaded(folder: Path, *flags: str) -> StagedModel:
    config = parse_config(["--model_path", str(folder), "--device", "cpu", "--precision", "float32", *flags])
    return find_model(str(folder)).load(config.model, torch.device("cpu"))


def with_turn_end(folder: Path) -> int:
    """A llama that always says `<|im_end|>`, which only its tokenizer and its chat template call an end."""
    write_checkpoint("llama", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_end|>", "<|im_start|>"], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.config.tie_word_embeddings = False
    end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name or "embed_tokens" in name:
                weights.fill_(1)
            elif "o_proj" in name or "down_proj" in name:
                weights.zero_()
            elif "lm_head" in name:
                weights.zero_()
                weights[end].fill_(1)
    model.save_pretrained(folder)
    return end


def test_an_end_of_turn_that_only_the_tokenizer_names_ends_the_answer(tmp_path: Path) -> None:
    end = with_turn_end(tmp_path)
    model = loaded(tmp_path)
    request = model.prepare(sample(0, None), "How many legs?", LOW.crops)
    run = run_staged(model, request.inputs, 64)
    assert (run.token_ids, run.decode_s, run.ended) == ((end,), None, True)
    assert model.decode_text(run.token_ids) == ""
    decoding = model.describe()["decoding"]
    assert decoding["eos_sources"]["tokenizer"] == decoding["eos_sources"]["chat_template"] == [end]
    assert end not in decoding["eos_sources"]["generation_config"]
    model.end_answers_at((), ignore_eos=True)
    ignoring = run_staged(model, request.inputs, 5)
    assert (ignoring.token_ids, ignoring.ended) == ((end,) * 5, True)
    assert model.answer_batch([request.inputs] * 2, 5) == [(end,) * 5] * 2
    model.end_answers_at((), ignore_eos=False)
    assert model.answer_batch([request.inputs] * 2, 5) == [(end,)] * 2


@pytest.mark.parametrize("family", ["llama", "llava"])
def test_no_prompt_ends_in_what_its_tokenizer_appends(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    plain = tokenise_prompts(["ab", "c"], tokenizer)
    marks = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", pair="$A $B", special_tokens=marks)
    tokenizer.save_pretrained(tmp_path)
    inputs = loaded(tmp_path).prepare(sample(0, None), "Why:", LOW.crops).inputs
    assert inputs["input_ids"][0, -1] == tokenizer.encode(":", add_special_tokens=False)[0]
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape
    found = tokenise_prompts(["ab", "c"], AutoTokenizer.from_pretrained(tmp_path))
    assert found["attention_mask"].sum(dim=1).tolist() == [3, 2]
    assert torch.equal(found["input_ids"][0, 1:], plain["input_ids"][0])


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TransformersModel]:
    found: dict[str, Any] = {}
    for name in ("llama", "llava"):
        found[name] = loaded(write_checkpoint(name, tmp_path_factory.mktemp(name)))
    own = found["llama"]
    found["llama graphed"] = TransformersModel(own.name, own.model, own.requests, "graph", Reruns())
    return found


@pytest.fixture(params=["llama", "llava", "llama graphed", "molmoe", "molmoe graph"])
def model(request: pytest.FixtureRequest, families: dict[str, TransformersModel]) -> StagedModel:
    """Without ends but those that a test gives it."""
    if request.param.startswith("molmoe"):
        found = loaded(EMBEDDED_MODEL, "--execution", "graph" if "graph" in request.param else "eager")
    else:
        found = families[request.param]
        families[request.param].model.generation_config.eos_token_id = None
    found.ends = type(found.ends)(text_of=found.ends.text_of)
    blocks = tuple(range(min(found.num_total_blocks, 3)))
    found.apply(Setting.of(vision=LOW, top_k=found.default_top_k, num_active_blocks=RunningBlocks.of(blocks)))
    return found


def test_a_stop_text_ends_every_way_of_generating(model: StagedModel) -> None:
    """The stop text is one that the answer has in its middle, so that the answer ends there."""
    requests = [model.prepare(sample(0, None), words, LOW.crops).inputs for words in ("One", "Two and more")]
    model.warm_up(requests[0], STEPS)
    whole = [run_staged(model, each, STEPS).token_ids for each in requests]
    assert [len(each) for each in whole] == [STEPS, STEPS]
    text_of = model.ends.text_of
    assert text_of is not None
    stop = text_of(whole[0][4:6])
    length = next(number for number in range(1, STEPS + 1) if stop in text_of(whole[0][:number]))
    model.end_answers_at((stop,), ignore_eos=False)
    run = run_staged(model, requests[0], STEPS)
    assert (run.token_ids, run.ended, len(run.inter_token_s)) == (whole[0][:length], True, length - 1)
    assert generate_greedily(model, requests[0], STEPS, NoMarks()).token_ids == run.token_ids
    expected = [tuple(model.ends.up_to_end(each)[0]) for each in whole]
    assert model.answer_batch(requests, STEPS) == expected and expected[0] == run.token_ids
    assert model.decode_text(run.token_ids) == text_of(whole[0]).partition(stop)[0].strip()
    model.end_answers_at((stop,), ignore_eos=True)
    ignoring = run_staged(model, requests[0], STEPS)
    assert (ignoring.token_ids, ignoring.ended) == (whole[0], True)
    assert model.answer_batch(requests, STEPS) == whole
    assert model.decode_text(ignoring.token_ids) == model.decode_text(run.token_ids)


def test_the_record_of_a_sample_says_what_is_thinking(families: dict[str, TransformersModel]) -> None:
    model = families["llama"]
    request = model.prepare(sample(0, None), "One", LOW.crops)
    ids = tuple(model.requests.tokenizer("<think>hm</think>\n\nred", add_special_tokens=False)["input_ids"])
    model.end_answers_at((), ignore_eos=False)
    run = run_staged(model, request.inputs, len(ids))
    made = run.__class__(ids, None, 0.5, 2.0, 2.5, (0.125,) * (len(ids) - 1), True)
    setting = Setting.of(
        vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of(tuple(range(model.num_total_blocks)))
    )
    found = sample_record(model, setting, sample(0, None), request, runs=(made,))
    assert (found.prediction, found.scored_answer) == ("<think>hm</think>\n\nred", "red")
    # A token for each byte: 17 up to the closing tag, the first of them from the prefill.
    assert (found.thinking_tokens, found.thinking_s_of(0)) == (17, 16 * 0.125)
