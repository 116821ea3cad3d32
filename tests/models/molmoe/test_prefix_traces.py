"""Prompts that begin alike, traced by engines and by modules, against a pause behind each block with each row alone."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from experiment_core_utils.engines.cpu.prefill import CpuPrefill
from experiment_core_utils.engines.kv_cache import KVCache, suffix_mask, suffix_positions
from experiment_core_utils.engines.reference.decoder import ReferencePrefill
from experiment_core_utils.engines.runner import EngineStages
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.eager.paused_prefill import begin_prefill
from experiment_core_utils.models.molmoe.engine_model import MolmoeEngineModel
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeImageFeatures
from experiment_core_utils.models.molmoe.prefix_traces import PromptTraces
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config
from tests.engines.cpu_compiler import needs_compiler

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BLOCKS, ROWS = 3, 5


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def model_of(width: int, kv_heads: int) -> MolmoeForConditionalGeneration:
    """Two heads; those of 32 run by compiled kernels where there is a compiler, narrower ones by plain torch."""
    config = tiny_config()
    text = config.text_config
    text.hidden_size, text.num_attention_heads, text.num_key_value_heads = width, 2, kv_heads
    torch.manual_seed(7)
    return MolmoeForConditionalGeneration(config).eval()


class SharedPrefixPrompts:
    """Prompts of 40 shared tokens, among them 30 features, and rows ten times as large as an embedding."""

    def __init__(self, width: int, lengths: tuple[int, ...], device: str = "cpu") -> None:
        draws = torch.Generator().manual_seed(3)

        def ids(length: int) -> torch.Tensor:
            return torch.randint(6, 100, (length,), generator=draws).to(device)

        self.shared = ids(40)[None]
        self.texts = [ids(length) for length in lengths]
        self.rows = (10 * torch.randn(ROWS, width, generator=draws)).to(device)
        features = torch.randn(1, 32, width, generator=draws).to(device)
        places = torch.tensor([[-100, *range(4, 34), -100]], device=device)
        self.features = MolmoeImageFeatures(pooler_output=features, image_input_idx=places)

    def refuse_others(self, model: MolmoeForConditionalGeneration, traces: PromptTraces, close: float) -> None:
        found = traces.trace(self.shared, self.features, self.texts, BLOCKS, self.rows)
        assert len(found) == len(self.texts)
        for traced, text in zip(found, self.texts, strict=True):
            assert traced.last.shape == (BLOCKS, len(self.rows[0])) and traced.appended.shape == (
                BLOCKS,
                *self.rows.shape,
            )
            prompt = torch.cat([self.shared, text[None]], dim=1)
            for pause in range(1, BLOCKS + 1):
                for place, row in enumerate(self.rows):
                    alone = begin_prefill(model, prompt, self.features, pause, row[None, None])
                    expected = torch.cat([alone.states[0, -1:], alone.appended[0]])
                    mine = torch.stack([traced.last[pause - 1], traced.appended[pause - 1, place]])
                    torch.testing.assert_close(mine, expected, rtol=close, atol=close)


@pytest.mark.parametrize("by_engines", [True, False])
@pytest.mark.parametrize(("width", "kv_heads"), [(32, 2), (64, 2), (64, 1)])
def test_every_prompt_is_what_it_is_alone_at_every_pause_with_every_row(
    width: int, kv_heads: int, by_engines: bool
) -> None:
    """The longest text is not the first, and one prompt has no text at all."""
    model = model_of(width, kv_heads)
    stages = EngineStages(MolmoeEngineModel(model)) if by_engines else None
    if stages is not None:
        # What lies in slots that nobody filled is never read.
        stages.reserve(64)
        stages.kv_cache.keys.fill_(torch.nan)
        stages.kv_cache.values.fill_(torch.nan)
    traces = PromptTraces(model, stages)
    for lengths in ((3, 17, 0), (1,)):
        SharedPrefixPrompts(width, lengths).refuse_others(model, traces, 1e-5)
    assert traces.reason is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_modules_run_what_is_shared_once(attention: str) -> None:
    """39 tokens; then the last shared one with each text of 2 and 6 tokens and the 5 rows."""
    model, prompts = model_of(32, 2), SharedPrefixPrompts(32, (2, 6))
    model.set_attn_implementation(attention)
    lengths = lengths_through(model)
    PromptTraces(model, None).trace(prompts.shared, prompts.features, prompts.texts, 1, prompts.rows)
    assert lengths == [39, 1 + 2 + 5, 1 + 6 + 5]
    prompts.refuse_others(model, PromptTraces(model, None), 1e-5)


def test_attention_that_may_take_no_mask_gets_whole_prompts() -> None:
    """Of 42 and 46 tokens; the rows are a batch of one token each."""
    AttentionInterface.register("another", ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register("another", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model, prompts = model_of(32, 2), SharedPrefixPrompts(32, (2, 6))
    model.set_attn_implementation("another")
    lengths = lengths_through(model)
    PromptTraces(model, None).trace(prompts.shared, prompts.features, prompts.texts, 1, prompts.rows)
    assert lengths == [42, 1, 46, 1]
    prompts.refuse_others(model, PromptTraces(model, None), 1e-5)


def lengths_through(model: MolmoeForConditionalGeneration) -> list[int]:
    """Grows by the number of tokens of each call of block 0."""
    lengths: list[int] = []
    model.all_blocks[0].register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    return lengths


@needs_compiler
def test_compiled_blocks_run_where_there_are_some() -> None:
    assert isinstance(EngineStages(MolmoeEngineModel(model_of(64, 1))).engines.prefill, CpuPrefill)


@pytest.mark.parametrize("text", [0, 4])
def test_a_prompt_without_a_picture_may_share_one_token_alone(text: int) -> None:
    model = model_of(32, 2)
    prompts = SharedPrefixPrompts(32, (text,))
    (found,) = PromptTraces(model, EngineStages(MolmoeEngineModel(model))).trace(
        prompts.shared[:, :1], None, prompts.texts, 2, prompts.rows
    )
    prompt = torch.cat([prompts.shared[:, :1], prompts.texts[0][None]], dim=1)
    alone = begin_prefill(model, prompt, None, 2, prompts.rows[None, :1])
    torch.testing.assert_close(found.last[1], alone.states[0, -1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.appended[1, 0], alone.appended[0, 0], rtol=1e-5, atol=1e-5)


def test_where_engines_refuse_modules_run_from_then_on() -> None:
    class Full(EngineStages):
        num_reserved = 0

        def reserve(self, max_seq_len: int) -> None:
            self.num_reserved += 1
            raise ConfigurationError(f"no room for {max_seq_len} slots")

    model = model_of(32, 2)
    stages, prompts = Full(MolmoeEngineModel(model)), SharedPrefixPrompts(32, (2, 6))
    traces = PromptTraces(model, stages)
    for _ in range(2):
        prompts.refuse_others(model, traces, 1e-5)
    # 40 shared tokens, 6 of the longest text, 5 rows.
    assert traces.reason == "no room for 51 slots" and stages.num_reserved == 1


def test_a_row_sees_the_prompt_and_itself_alone() -> None:
    """Two shared tokens, a text of two, two rows."""
    assert suffix_mask(2, 2, 2).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0, 1],
    ]
    assert suffix_positions(2, 2, 2).tolist() == [2, 3, 4, 4]


def test_a_store_without_room_is_refused() -> None:
    decoder = fuse_decoder_weights(model_of(32, 2))
    suffix, text = ReferencePrefill(decoder), torch.randn(3, 32)
    output = "a prompt of 13 tokens and 5 rows do not fit into a KV cache of 17 tokens"
    with pytest.raises(ConfigurationError, match=output):
        suffix.suffix_states(text, torch.randn(5, 32), 10, 1, KVCache.allocate(decoder, 17))
    suffix.suffix_states(text, torch.randn(5, 32), 10, 1, KVCache.allocate(decoder, 18))


@needs_a_gpu
def test_graphed_prefills_leave_what_the_modules_see() -> None:
    """Padding behind the shared tokens lies where texts and rows go."""
    model = model_of(32, 2).to("cuda")
    traces = PromptTraces(model, EngineStages(MolmoeEngineModel(model)))
    for lengths in ((3, 17, 0), (40,), (1,)):
        SharedPrefixPrompts(32, lengths, "cuda").refuse_others(model, traces, 1e-4)
    assert traces.reason is None
