"""The trainer of the embedded model: batches and a time budget to a trained model, its log and a resumable state.

The experts are computed densely here (two products over all of them, the unused ones weighted 0): the same numbers
as routing, in a form that a GPU runs without waiting for the host. Inference does not do this.
"""

import json
import math
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, PreTrainedTokenizerBase

from experiment_core_utils.models.molmoe.image_processing_molmoe import MolmoeImageProcessor
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens, MolmoeProcessor
from experiments.reference_model.batches import QUESTION_NAMES, BatchSource, TrainingBatch, stage_at
from experiments.reference_model.facts import CONTEXTS, FactTable
from experiments.reference_model.muon import Muon
from experiments.reference_model.packing import IGNORED, slot_block_mask, slot_mask, slot_positions
from experiments.reference_model.recipe import OptimiserRecipe, reference_config
from experiments.reference_model.tags import TagHead, feature_centres

LENGTH_MULTIPLE = 128
LOG_EVERY = 50
READ_EVERY = 10
CROPS_A_CONNECTOR_CALL = 448  # CUDA attention takes fewer than 65,536 windows, and a crop has 144
MOST_DROPPED_BLOCKS = 4
# What a trainer's state is made of.
SAVED_PARTS = ("model", "tag_head", "optimiser", "matrix_optimiser")
SAVED_NUMBERS = ("step", "known_facts", "context_level", "entropy_weight")


@dataclass
class AnswerResult:
    """The results of the decoder; without gradients."""

    loss: torch.Tensor
    exact: torch.Tensor  #: [B, N] which answers are all right
    prefix: torch.Tensor  #: [B, T, H] embedded tokens of each picture, before its questions


@dataclass
class StepResult:
    """The results of one forward pass; without gradients, but for the loss."""

    loss: torch.Tensor  #: to minimise
    tags_loss: torch.Tensor
    tags_right: torch.Tensor  #: fraction of the features on legible text that encode the whole label
    answers: AnswerResult | None  #: None where only the tags are trained


@dataclass
class TrainingClock:
    """Training time spent, over all legs, as a fraction of the whole plan; everything scheduled depends on it."""

    planned_s: float
    spent_s: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """Count from now on; the time since the clock was made (loading, starting workers) is not training."""
        self._since = time.monotonic()

    @property
    def progress(self) -> float:
        """The fraction of the planned training time that is spent, at most 1."""
        return min((self.spent_s + time.monotonic() - self._since) / self.planned_s, 1.0)


def dense_experts(
    block: Any, states: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixture's output [T, H] of states [T, H], and the router's losses [3].

    They are: load balancing (Switch Transformer eq. 4, arXiv 2101.03961); z-loss (ST-MoE eq. 5, arXiv 2202.08906);
    the negative entropy of a token's probabilities in nats.

    `kept` [top-k] scales the chosen experts from the strongest on: zeros at its end leave the weakest out.
    """
    gate, experts = block.gate, block.experts
    logits = nn.functional.linear(states, gate.weight).float()
    probabilities = logits.softmax(dim=-1)
    top = probabilities.topk(gate.top_k, dim=-1)
    values = top.values if kept is None else top.values * kept
    weights = torch.zeros_like(probabilities).scatter(1, top.indices, values)
    count, width = experts.down_proj.shape[0], experts.down_proj.shape[2]
    hidden = nn.functional.linear(states, experts.gate_up_proj.flatten(0, 1)).view(-1, count, 2, width)
    hidden = nn.functional.silu(hidden[:, :, 0]) * hidden[:, :, 1] * weights[..., None].to(hidden.dtype)
    output = hidden.flatten(1) @ experts.down_proj.permute(0, 2, 1).flatten(0, 1).to(hidden.dtype)
    used = (weights > 0).float().mean(dim=0)
    balance = count * (used * probabilities.mean(dim=0)).sum() / gate.top_k
    negative_entropy = (probabilities * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
    return output, torch.stack([balance, logits.logsumexp(dim=-1).pow(2).mean(), negative_entropy])


def decoder_block(
    layer: Any,
    states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: Any,
    kept_experts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of one OLMoE block with dense experts, and the router's losses."""
    attended, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(states), position_embeddings=(cos, sin), attention_mask=mask
    )
    states = states + attended
    flat = layer.post_attention_layernorm(states).flatten(0, 1)
    mixed, router_losses = dense_experts(layer.mlp, flat, kept_experts)
    return states + mixed.view_as(states), router_losses


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """FlexAttention of heads [B, A, L, D] under a mask of `slot_block_mask`, as Transformers calls it: [B, L, A, D]."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    attended = flex_attention(query, key, value, block_mask=attention_mask, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(slot_attention.__name__, slot_attention)


def vision_block(layer: Any, states: torch.Tensor) -> torch.Tensor:
    """The output of one CLIP encoder layer."""
    output = layer(states, attention_mask=None)
    return output[0] if isinstance(output, tuple) else output


def new_model(
    tokenizer: PreTrainedTokenizerBase, device: str
) -> tuple[MolmoeForConditionalGeneration, MolmoeImageProcessor]:
    """An untrained model on the device, and what cuts its pictures."""
    return MolmoeForConditionalGeneration(reference_config(tokenizer)).to(device), MolmoeImageProcessor()


class Trainer:
    """Runs the training recipe.

    Args:
        model: the model in float32; computed in bfloat16 where the device is a GPU.
        processor: cuts the pictures, on the model's device.
        recipe: optimiser settings.
        compile_blocks: compile the blocks with torch.compile.
        head_only_steps: first steps in which the tags' loss trains their head alone: it is new where the model is not.
        facts: a table of price drills for each form, drilled in each step; empty for none.
    """

    def __init__(
        self,
        model: MolmoeForConditionalGeneration,
        processor: MolmoeImageProcessor,
        recipe: OptimiserRecipe,
        compile_blocks: bool,
        head_only_steps: int = 0,
        facts: Sequence[FactTable] = (),
    ) -> None:
        self.model = model
        self.processor = processor
        self.recipe = recipe
        self.device = next(model.parameters()).device
        self.tokens = ImageTokens.from_config(model.config)
        self.tag_head = TagHead(model.config.text_config.hidden_size).to(self.device)
        matrices, others = _split_parameters(model)
        self.matrix_optimiser = Muon(matrices, recipe.matrix_momentum, recipe.matrix_weight_decay)
        self.optimiser = torch.optim.AdamW(
            _decay_groups([*others, *self.tag_head.named_parameters()], recipe.weight_decay),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            fused=True,
        )
        self.step = 0
        self.head_only_steps = head_only_steps
        self.facts = tuple(facts)
        self.known_facts = min(recipe.first_facts, len(facts[0])) if facts else 0
        self.context_level = 0
        self._rng = random.Random(recipe.seed)
        self.entropy_weight = recipe.router_entropy_weight
        top_k = model.default_top_k
        self._kept_experts = torch.ones(top_k + 1, top_k, device=self.device).tril(-1)
        wrap: Callable[[Any], Any] = (
            (lambda block: torch.compile(block, dynamic=True)) if compile_blocks else (lambda block: block)
        )
        # FlexAttention has no backward pass on a CPU, and is slow where it is not compiled.
        self._skips_blocks = compile_blocks and self.device.type == "cuda"
        model.model.language_model.set_attn_implementation(slot_attention.__name__ if self._skips_blocks else "sdpa")
        self._decoder_block = wrap(decoder_block)
        self._vision_block = wrap(vision_block)
        self._connector = wrap(lambda connector, features, masks: connector(features, masks))

    def forward(
        self, batch: TrainingBatch, blocks: Sequence[int] | None = None, experts: int | None = None
    ) -> StepResult:
        """The loss over the answers of one batch, with these blocks and so many experts a token (None means all)."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            features, prefix = self._encode(batch)
            tags_loss, tags_right = self._tags(features, batch)
            slots = batch.slots
            if not slots.widths:
                return StepResult(self.recipe.tags_weight * tags_loss, tags_loss.detach(), tags_right, None)
            places = self._places(batch, prefix)
            ids = self._moved(slots.input_ids)
            ids = torch.cat([self._moved(prefix).expand(ids.shape[0], -1), ids], dim=1)
            ids = nn.functional.pad(ids, (0, -ids.shape[1] % LENGTH_MULTIPLE), value=self.model.config.pad_token_id)
            encoded = MolmoeImageFeatures(pooler_output=features.flatten(1, 2), image_input_idx=places)
            states = self.model.model.embed(ids, encoded).contiguous()
            decoded, router_losses = self._decode(states, prefix.shape[0], slots.widths, blocks, experts)
            answer_loss, exact = self._answers(decoded, batch)
            loss = answer_loss + self._weighted(router_losses) + self.recipe.tags_weight * tags_loss
            answers = AnswerResult(answer_loss.detach(), exact, states[:, : prefix.shape[0]].detach())
            return StepResult(loss, tags_loss.detach(), tags_right, answers)

    def forward_facts(
        self,
        table: FactTable,
        context: int,
        prefix: torch.Tensor,
        blocks: Sequence[int] | None = None,
        experts: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of drilled prices after `context` tokens of the embedded pictures [B, T, H], and the fraction of
        prices that are right.
        """
        context = min(context, prefix.shape[1] - 1)
        ids, answers = table.draw(context, self.known_facts, self.recipe.fact_tokens)
        count, each, width = ids.shape
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            scene = torch.randint(len(prefix), (count, 1), device=self.device)
            places = torch.rand(count, prefix.shape[1] - 1, device=self.device).topk(context).indices.sort().values + 1
            before = torch.cat([prefix[scene, torch.zeros_like(scene)], prefix[scene, places]], dim=1)
            drills = self.model.model.embed(ids.flatten(1), None)
            states = torch.cat([before.to(drills.dtype), drills], dim=1)
            states = nn.functional.pad(states, (0, 0, 0, -states.shape[1] % LENGTH_MULTIPLE))
            states, router_losses = self._decode(states, 1 + context, (width,) * each, blocks, experts)
            found = states.unflatten(1, (each, width))[:, :, -answers.shape[2] :]
            logits = self.model.lm_head(found).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 2), answers.flatten())
            right = (logits.argmax(dim=-1) == answers).all(dim=-1).float().mean()
            return loss + self._weighted(router_losses), right.detach()

    @torch.no_grad()
    def recall(self, prefix: torch.Tensor, context: int, experts: int | None = None, form: int = 0) -> float:
        """The fraction of the drilled prices that are right after so many tokens of embedded pictures [B, T, H]."""
        return float(self.forward_facts(self.facts[form], context, prefix, experts=experts)[1])

    def _weighted(self, router_losses: torch.Tensor) -> torch.Tensor:
        balance, z, negative_entropy = router_losses
        recipe = self.recipe
        return (
            recipe.load_balancing_weight * balance + recipe.router_z_weight * z + self.entropy_weight * negative_entropy
        )

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, non_blocking=True)

    def _encode(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The features of the pictures [B, K, F, H], and the ids (bos and image part) before every slot."""
        pixels = self._moved(batch.images).permute(0, 3, 1, 2).float().div_(255)
        crops, masks = self.processor.cut_crops(pixels, batch.tiling)
        count, per_picture = crops.shape[:2]
        is_twice_the_same = batch.tiling == (1, 1)
        tower = self.model.model.vision_tower
        shown = crops[:, :1] if is_twice_the_same else crops
        states = tower.pre_layernorm(tower.embeddings(shown.flatten(0, 1)))
        kept = {}
        for index, layer in enumerate(tower.layers):
            states = self._vision_block(layer, states)
            kept[index] = states
        stacked = torch.cat([kept[index][:, 1:] for index in tower.feature_blocks], dim=-1)
        if is_twice_the_same:
            stacked = stacked.repeat_interleave(per_picture, dim=0)
        all_masks = masks.repeat(count, 1)
        parts = zip(stacked.split(CROPS_A_CONNECTOR_CALL), all_masks.split(CROPS_A_CONNECTOR_CALL), strict=True)
        features = torch.cat([self._connector(self.model.model.connector, *part) for part in parts])
        layout = self.tokens.layout(self.processor.features_per_side, self.processor.stitched_features(batch.tiling))
        return features.unflatten(0, (count, per_picture)), torch.tensor([self.tokens.bos, *layout])

    def _places(self, batch: TrainingBatch, prefix: torch.Tensor) -> torch.Tensor:
        """The position [B, K * F] of each feature in the prompt, negative where it is dropped."""
        patches = (prefix == self.tokens.patch).nonzero().flatten()
        rows = self.processor.feature_rows(batch.tiling).flatten()
        places = torch.where(rows < 0, rows, patches[rows.clamp(min=0)])
        return self._moved(places).expand(len(batch.images), -1)

    def _decode(
        self,
        states: torch.Tensor,
        before: int,
        widths: Sequence[int],
        blocks: Sequence[int] | None,
        experts: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The decoded states [B, L, H] of slots of these widths after `before` positions, and the router's losses."""
        decoder, total = self.model.model.language_model, states.shape[1]
        cos, sin = decoder.rotary_emb(states, self._moved(slot_positions(before, widths, total))[None])
        mask_of = slot_block_mask if self._skips_blocks else slot_mask
        mask = mask_of(before, widths, total, self.device)
        layers = list(decoder.layers) if blocks is None else [decoder.layers[index] for index in blocks]
        router_losses = states.new_zeros(3, dtype=torch.float32)
        for index, layer in enumerate(layers):
            kept_experts = None
            if self.model.training:
                is_whole = index == 0 or experts is None
                kept_experts = self._kept_experts[self.model.default_top_k if is_whole else experts]
            states, block_losses = self._decoder_block(layer, states, cos, sin, mask, kept_experts)
            router_losses = router_losses + block_losses / len(layers)
        return decoder.norm(states)[:, before : before + sum(widths)], router_losses

    def _answers(self, states: torch.Tensor, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss over the answers, from the slots' decoded states [B, L, H], and which answers [B, N] are right."""
        labels = self._moved(batch.slots.labels)
        weights = self._moved(batch.slots.weights)
        logits = self.model.lm_head(states).float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        wrong = ((logits.argmax(dim=-1) != labels) & (labels != IGNORED)).float()
        exact = torch.stack([part.sum(dim=1) == 0 for part in wrong.split(list(batch.slots.widths), dim=1)], dim=1)
        return (losses * weights).sum() / weights.sum(), exact

    def _tags(self, features: torch.Tensor, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The tags' loss of features [B, K, F, H] and the fraction of labels that they encode; zeros without tags."""
        if batch.tags is None:
            return features.new_zeros(()), features.new_zeros(())
        size = (batch.images.shape[1], batch.images.shape[2])
        points, scales = feature_centres(self.processor, size, batch.tiling)
        pitch = self.processor.crop_size / self.processor.features_per_side
        seen = features.detach() if self.step < self.head_only_steps else features
        tags = batch.tags.to(self.device)
        return self.tag_head.loss(seen, tags, self._moved(points), self._moved(scales), pitch)

    def train_step(self, batch: TrainingBatch, progress: float) -> tuple[StepResult, torch.Tensor]:
        """Take one optimiser step; returns the results and the gradient's norm before clipping."""
        factor = schedule(self.recipe, self.step, progress)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.learning_rate * factor
        self.optimiser.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        blocks, experts = self._drawn_blocks(), self._drawn_experts()
        result = self.forward(batch, blocks, experts)
        result.loss.backward()
        if result.answers is not None and self.drills_at(progress):
            context = CONTEXTS[self._rng.randrange(self.context_level + 1)]
            table = self.facts[0] if self.step % 2 else self.facts[self.step // 2 % len(self.facts)]
            loss, _ = self.forward_facts(table, context, result.answers.prefix, blocks, experts)
            (self.recipe.facts_weight * loss).backward()
        parameters = [*self.model.parameters(), *self.tag_head.parameters()]
        norm = nn.utils.clip_grad_norm_(parameters, self.recipe.max_grad_norm)
        finite = norm.isfinite()
        self.optimiser.found_inf = (~finite).float()  # type: ignore[attr-defined]  # read by the fused step
        self.optimiser.step()
        self.matrix_optimiser.step(self.recipe.matrix_learning_rate * factor, finite)
        self.step += 1
        return result, norm

    def drills_at(self, progress: float) -> bool:
        """Whether a step at this point of the curriculum drills prices."""
        return bool(self.facts) and stage_at(progress)[0].drills

    def _drawn_blocks(self) -> list[int] | None:
        """The blocks for one step: mostly all, else without one to four of the last ones or of any after the first."""
        total = self.model.num_total_blocks
        if self._rng.random() >= self.recipe.block_dropout_share:
            return None
        count = self._rng.randint(1, MOST_DROPPED_BLOCKS)
        is_last = self._rng.random() < 0.5
        dropped = range(total - count, total) if is_last else self._rng.sample(range(1, total), count)
        return [index for index in range(total) if index not in dropped]

    def _drawn_experts(self) -> int | None:
        """The experts a token for one step: mostly all, else from half of them on."""
        if self._rng.random() >= self.recipe.expert_dropout_share:
            return None
        top_k = self.model.default_top_k
        return self._rng.randrange(top_k // 2, top_k)

    def state(self, clock: TrainingClock) -> dict[str, Any]:
        """The state that a later leg needs."""
        parts = {name: getattr(self, name).state_dict() for name in SAVED_PARTS}
        return parts | {name: getattr(self, name) for name in SAVED_NUMBERS} | {"progress": clock.progress}

    def load_state(self, state: dict[str, Any]) -> float:
        """Continue from `state`; returns the progress at which it was saved."""
        for name in SAVED_PARTS:
            getattr(self, name).load_state_dict(state[name])
        for name in SAVED_NUMBERS:
            setattr(self, name, state[name])
        return float(state["progress"])


def schedule(recipe: OptimiserRecipe, step: int, progress: float) -> float:
    """The factor on the learning rates: linear warm-up over steps, times a cosine over the time spent."""
    warm = min((step + 1) / recipe.warmup_steps, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return warm * (recipe.final_share + (1 - recipe.final_share) * cosine)


def run_leg(
    trainer: Trainer,
    batches: Iterator[TrainingBatch],
    clock: TrainingClock,
    leg_s: float,
    source: BatchSource,
    log_path: Path,
) -> None:
    """Train for `leg_s` seconds or to the end of the plan; one log line every `LOG_EVERY` steps.

    Args:
        source: where the batches come from; its progress and number of facts are kept up to date.

    Raises:
        FloatingPointError: the loss is not a number; resume from the state saved last.
    """
    started = time.monotonic()
    sums: dict[str, list[float]] = defaultdict(list)
    waited, scenes = 0.0, 0
    with log_path.open("a") as log:
        while time.monotonic() - started < leg_s and clock.progress < 1.0:
            before = time.monotonic()
            batch = next(batches)
            waited += time.monotonic() - before
            scenes += len(batch.images)
            source.progress.value = clock.progress
            result, norm = trainer.train_step(batch, clock.progress)
            if trainer.step % READ_EVERY == 0:
                _collect(sums, batch, result)
                if not math.isfinite(loss := result.loss.item()):
                    raise FloatingPointError(f"loss {loss} at step {trainer.step}")
            if trainer.step % LOG_EVERY == 0:
                row = {
                    "step": trainer.step,
                    "progress": round(clock.progress, 4),
                    "s": round(time.monotonic() - started, 1),
                    "waited_s": round(waited, 1),
                    "scenes": scenes,
                    "grad_norm": round(float(norm), 3),
                    **(facts_learned(trainer, result.answers.prefix, clock.progress) if result.answers else {}),
                    **{name: round(sum(values) / len(values), 3) for name, values in sorted(sums.items())},
                }
                log.write(json.dumps(row) + "\n")
                log.flush()
                source.facts.value = trainer.known_facts or source.facts.value
                sums.clear()
                waited, scenes = 0.0, 0


def facts_learned(trainer: Trainer, prefix: torch.Tensor, progress: float) -> dict[str, float]:
    """The recall of prices in text over experts a token, and after tokens of embedded pictures [B, T, H] (`prefix`);
    then there may be more prices to learn, more tokens before them, or another weight of the routing's entropy.
    """
    if not trainer.drills_at(progress):
        return {}
    recipe, most, level = trainer.recipe, trainer.model.default_top_k, trainer.context_level
    recall = {f"top-{count}": trainer.recall(prefix, 0, count) for count in (most, most // 2, most // 4)}
    contexts = dict.fromkeys((*CONTEXTS[1 : level + 2], 256))
    recall |= {f"after {context}": trainer.recall(prefix, context) for context in contexts}
    last = CONTEXTS[level]
    recall |= {f"form {form} after {last}": trainer.recall(prefix, last, form=form) for form in (1, 2)}
    found = {
        "facts": trainer.known_facts,
        "entropy_weight": round(trainer.entropy_weight, 4),
        **{f"recall/{name}": round(value, 3) for name, value in recall.items()},
    }
    if level + 1 < len(CONTEXTS) and recall.get(f"after {last}", recall[f"top-{most}"]) >= recipe.context_recall:
        trainer.context_level += 1
    if recall[f"top-{most}"] >= recipe.facts_recall and progress < recipe.facts_until:
        trainer.known_facts = min(round(trainer.known_facts * recipe.facts_growth), len(trainer.facts[0]))
    recalled, by_half = recall[f"top-{most}"], recall[f"top-{most // 2}"]
    trainer.entropy_weight = next_entropy_weight(recipe, trainer.entropy_weight, recalled, by_half)
    return found


def next_entropy_weight(recipe: OptimiserRecipe, weight: float, recalled: float, by_half: float) -> float:
    """The weight of the bonus for even routing, from the recall of prices with all experts a token and with half."""
    if recalled < recipe.steering_recall:
        return weight
    is_free = by_half > recipe.half_experts_recall * recalled
    grown = weight * (recipe.entropy_growth if is_free else 1 / recipe.entropy_growth)
    return min(max(grown, recipe.router_entropy_weight), recipe.most_entropy_weight)


def _collect(sums: dict[str, list[float]], batch: TrainingBatch, result: StepResult) -> None:
    """Add one step's losses and fractions of right answers, by tier and question type, to `sums`."""
    sums[f"tags_loss/{batch.tier}"].append(float(result.tags_loss))
    sums[f"tags_right/{batch.tier}"].append(float(result.tags_right))
    if result.answers is None:
        return
    sums[f"loss/{batch.tier}"].append(float(result.answers.loss))
    exact = result.answers.exact.cpu()
    for index, name in enumerate(QUESTION_NAMES):
        of_type = exact[batch.types == index]
        if len(of_type):
            sums[f"{name.removeprefix('reference_')}/{batch.tier}"].append(float(of_type.float().mean()))


def _split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[tuple[str, nn.Parameter]]]:
    """The matrices inside blocks and connector, and the rest (embeddings, head, routers, norms, biases) by name."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_inner = ".layers." in name or ".connector." in name
        is_matrix = parameter.ndim >= 2 and not name.endswith(("gate.weight", "pad_embed"))
        if is_inner and is_matrix:
            matrices.append(parameter)
        else:
            others.append((name, parameter))
    return matrices, others


def _decay_groups(parameters: Sequence[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay; norms, biases and embeddings do not."""
    decayed = [parameter for name, parameter in parameters if parameter.ndim >= 2 and "embed" not in name]
    plain = [parameter for name, parameter in parameters if parameter.ndim < 2 or "embed" in name]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def save_model(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model in bfloat16 and its processor, all at once."""
    fresh, model_folder = folder / "model.next", folder / "model"
    deepcopy(trainer.model).to(torch.bfloat16).save_pretrained(fresh, max_shard_size="14MB")
    MolmoeProcessor(trainer.processor, tokenizer, trainer.tokens).save_pretrained(fresh)
    if model_folder.exists():
        shutil.rmtree(model_folder)
    fresh.rename(model_folder)
