"""The three stages of a MolmoE model run by its modules, with a cache that grows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.greedy import BatchAnswers, BatchFollower
from experiment_core_utils.models.common.decode_kernels import DecodeKernels, ExecutedExperts
from experiment_core_utils.models.hf.batch import merge_requests
from experiment_core_utils.models.hf.knobs.patches import hooks_removed
from experiment_core_utils.models.hf.knobs.routers import Counted
from experiment_core_utils.models.molmoe.modeling_molmoe import (
    DecodeState,
    MolmoeForConditionalGeneration,
    MolmoeImageFeatures,
)
from experiment_core_utils.models.molmoe.visual_token_keep import PlacedTokens
from experiment_core_utils.primitives.device import Marks, NoMarks
from experiment_core_utils.primitives.finite_logits import checked_tokens, refuse_not_finite
from experiment_core_utils.records.requests import FollowedAnswer, KnobProof, StageName, TimedBatch

DROPPED = -100


def _placed_features(
    prompts: Sequence[tuple[torch.Tensor, MolmoeImageFeatures | None]], length: int
) -> MolmoeImageFeatures | None:
    """The features of ids [1, T], each picture's encoded alone, at places shifted by the padding; None without any."""
    encoded = {
        row: (features, length - ids.shape[1]) for row, (ids, features) in enumerate(prompts) if features is not None
    }
    if not encoded:
        return None
    like = next(iter(encoded.values()))[0].pooler_output
    most = max(features.pooler_output.shape[1] for features, _ in encoded.values())
    pooled = like.new_zeros(len(prompts), most, like.shape[2])
    places = torch.full((len(prompts), most), DROPPED, dtype=torch.long, device=like.device)
    for row, (features, shift) in encoded.items():
        count = features.pooler_output.shape[1]
        pooled[row, :count] = features.pooler_output[0]
        own = features.image_input_idx[0]
        places[row, :count] = torch.where(own < 0, DROPPED, own + shift)
    return MolmoeImageFeatures(pooler_output=pooled, image_input_idx=places)


class EagerStages:
    """The stages as transformers runs them; they need no warm-up.

    Args:
        placed_tokens: drops image tokens between vision and prefill; None drops none.
    """

    def __init__(self, model: MolmoeForConditionalGeneration, placed_tokens: PlacedTokens | None = None) -> None:
        self._model = model
        self._placed_tokens = placed_tokens or PlacedTokens()
        self._kernels = DecodeKernels(model)

    def encode_image(self, inputs: Mapping[str, Any]) -> MolmoeImageFeatures | None:
        if "pixel_values" not in inputs:
            return None
        return self._model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])

    def prefill(
        self, knobs: EngineKnobs, inputs: Mapping[str, Any], features: MolmoeImageFeatures | None
    ) -> tuple[torch.Tensor, DecodeState]:
        ids, features = self._placed_tokens.shortened(inputs, features)
        return self._model.prefill(ids, features, **knobs.arguments)

    def decoding(self) -> AbstractContextManager[None]:
        return self._kernels.switched()

    def decode_step(self, token: torch.Tensor, state: DecodeState) -> torch.Tensor:
        if self._kernels.needs_switch:
            with self.decoding():
                return self._model.decode_step(token, state)
        return self._model.decode_step(token, state)

    def follow_tokens(self, tokens: torch.Tensor, state: DecodeState) -> torch.Tensor:
        """Logits [k, V] after each of the next tokens [1, k], which are given, in one pass."""
        return self._model.next_logits(tokens, state)[0]

    def rewind(self, state: DecodeState, steps: int) -> None:
        """A negative argument of `crop` means this in every version of transformers."""
        state.past_key_values.crop(-steps)

    @torch.inference_mode()
    def answer_batch(
        self,
        knobs: EngineKnobs,
        requests: Sequence[Mapping[str, Any]],
        max_new_tokens: int,
        ends: AnswerEnds,
        marks: Marks | None = None,
    ) -> TimedBatch:
        """The answers, with a mark at the hand-over, behind all pictures, and behind each step's tokens."""
        marks = NoMarks() if marks is None else marks
        answers: BatchAnswers | None = None
        spans: list[StageName] = []

        def note_pictures() -> None:
            marks.mark()
            spans.append("vision")

        def choose(logits: torch.Tensor) -> torch.Tensor | None:
            nonlocal answers
            tokens = logits.argmax(dim=-1, keepdim=True)
            checked = checked_tokens(tokens, logits)
            spans.append("prefill" if answers is None else "decode")
            if answers is None:
                answers = BatchAnswers(checked, ends)
            else:
                answers.add(checked)
            marks.mark()
            return None if answers.have_ended else tokens

        marks.mark()
        self._run_together(knobs, requests, max_new_tokens, choose, note_pictures)
        assert answers is not None
        return TimedBatch(tuple(answers.token_ids), tuple(spans))

    @torch.inference_mode()
    def follow_batch(
        self, knobs: EngineKnobs, requests: Sequence[Mapping[str, Any]], answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        follower = BatchFollower(answers, requests[0]["input_ids"].device)
        self._run_together(knobs, requests, follower.num_positions, follower.follow)
        return follower.followed

    def _run_together(
        self,
        knobs: EngineKnobs,
        requests: Sequence[Mapping[str, Any]],
        max_new_tokens: int,
        choose: Callable[[torch.Tensor], torch.Tensor | None],
        note_pictures: Callable[[], None] = lambda: None,
    ) -> None:
        """Prefill and decode a batch; `choose` gives tokens [B, 1] after logits [B, V], and None to stop.

        Args:
            note_pictures: called once all pictures are encoded; not where there are none.
        """
        model = self._model
        encoded = [self.encode_image(request) for request in requests]
        if any(features is not None for features in encoded):
            note_pictures()
        prompts = [
            self._placed_tokens.shortened(request, features)
            for request, features in zip(requests, encoded, strict=True)
        ]
        alone = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids, _ in prompts]
        ids, mask = merge_requests(alone, model.config.pad_token_id).values()
        length = ids.shape[1]
        is_padded = not bool(mask.all())
        mask = torch.nn.functional.pad(mask, (0, max_new_tokens), value=1)
        logits, state = model.prefill(
            ids,
            _placed_features(prompts, length),
            attention_mask=mask[:, :length] if is_padded else None,
            **knobs.arguments,
        )
        tokens = choose(logits)
        with self.decoding():
            for step in range(1, max_new_tokens):
                if tokens is None:
                    break
                seen = mask[:, : length + step] if is_padded else None
                tokens = choose(model.decode_step(tokens, state, attention_mask=seen))

    @torch.inference_mode()
    def prove(self, knobs: EngineKnobs, inputs: Mapping[str, Any]) -> KnobProof:
        """Hooks on every router and block of the *full* model count what really runs."""
        features = self.encode_image(inputs)
        ran, ran_decode = ExecutedExperts(self._model), ExecutedExperts(self._model)
        with self._counted() as counted:
            with ran:
                logits, state = self.prefill(knobs, inputs, features)
            experts, blocks, tokens = dict(counted.experts_per_token), tuple(counted.blocks_run), counted.tokens
            counted.clear()
            with ran_decode:
                after = self.decode_step(logits.argmax(dim=-1, keepdim=True), state)
            decode_blocks = tuple(counted.blocks_run)
        refuse_not_finite(logits, after)
        return KnobProof(
            experts_per_token=tuple(experts.get(block) for block in blocks),
            blocks_run=blocks,
            blocks_run_decode=decode_blocks,
            cache_layers=sum(1 for layer in state.past_key_values.layers if layer.get_seq_length() > 0),
            experts_implementation=ran.names,
            experts_implementation_decode=ran_decode.names,
            prefill_tokens=tokens,
            prompt_tokens=inputs["input_ids"].shape[1],
            vision_tokens=self._placed_tokens.num_features(inputs),
        )

    @contextmanager
    def _counted(self) -> Iterator[Counted]:
        counted, handles = Counted(), []
        for index, block in enumerate(self._model.all_blocks):
            handles.append(block.register_forward_hook(counted.block_hook(index, token_axis=1)))
            if self._model.num_experts is not None:
                handles.append(block.mlp.gate.register_forward_hook(_router_hook(counted, index)))
        with hooks_removed(handles):
            yield counted


def _router_hook(counted: Counted, index: int) -> Any:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        counted.experts_per_token[index] = int(output[2].shape[-1])

    return hook
