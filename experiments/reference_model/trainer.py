"""In: batches and a time budget; out: a trained `MolmoeForConditionalGeneration`, its log and a resumable state.

The experts are computed densely here (two products over all of them, the unused ones weighted 0): the same numbers
as routing, in a form that a GPU runs without asking the host anything. Inference does not do this.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiment_core_utils.models.molmoe.image_processing_molmoe import MolmoeImageProcessor
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens
from experiments.reference_model.batches import TrainingBatch
from experiments.reference_model.packing import IGNORED, slot_mask, slot_positions
from experiments.reference_model.recipe import OptimiserRecipe

LENGTH_MULTIPLE = 64
LOG_EVERY = 50


@dataclass
class StepResult:
    """What one forward pass gives: the loss to minimise, its parts, and the share of answers all right."""

    loss: torch.Tensor
    answer_loss: torch.Tensor
    exact: torch.Tensor


@dataclass
class Clock:
    """Training time spent, over all legs, against the whole plan; everything scheduled depends on this share."""

    planned_s: float
    spent_s: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """Count from now on; what passed since the clock was made (loading, starting workers) is not training."""
        self._since = time.monotonic()

    @property
    def progress(self) -> float:
        """Share of the planned training time that is spent, at most 1."""
        return min((self.spent_s + time.monotonic() - self._since) / self.planned_s, 1.0)


def dense_experts(block: nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, H] -> mixture output [T, H], load-balancing loss (Switch Transformer eq. 4, arXiv 2101.03961), z-loss."""
    gate, experts = block.gate, block.experts
    logits = nn.functional.linear(states, gate.weight).float()
    probabilities = logits.softmax(dim=-1)
    top = probabilities.topk(gate.top_k, dim=-1)
    weights = torch.zeros_like(probabilities).scatter(1, top.indices, top.values)
    count, width = experts.down_proj.shape[0], experts.down_proj.shape[2]
    hidden = nn.functional.linear(states, experts.gate_up_proj.flatten(0, 1)).view(-1, count, 2, width)
    hidden = nn.functional.silu(hidden[:, :, 0]) * hidden[:, :, 1] * weights[..., None].to(hidden.dtype)
    output = hidden.flatten(1) @ experts.down_proj.permute(0, 2, 1).flatten(0, 1).to(hidden.dtype)
    used = (weights > 0).float().mean(dim=0)
    balance = count * (used * probabilities.mean(dim=0)).sum() / gate.top_k
    return output, balance, logits.logsumexp(dim=-1).pow(2).mean()


def decoder_block(
    layer: nn.Module, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One OLMoE block with dense experts; returns its output and the two router losses."""
    attended, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(states), position_embeddings=(cos, sin), attention_mask=mask
    )
    states = states + attended
    flat = layer.post_attention_layernorm(states).flatten(0, 1)
    mixed, balance, router_z = dense_experts(layer.mlp, flat)
    return states + mixed.view_as(states), balance, router_z


def vision_block(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """One CLIP encoder layer."""
    output = layer(states, attention_mask=None)
    return output[0] if isinstance(output, tuple) else output


class Trainer:
    """Runs the recipe.

    Args:
        model: the model in float32; computed in bfloat16 where the device is a GPU.
        processor: cuts the pictures, on the model's device.
        recipe: optimiser settings.
        compile_blocks: compile the blocks with torch.compile.
    """

    def __init__(
        self,
        model: MolmoeForConditionalGeneration,
        processor: MolmoeImageProcessor,
        recipe: OptimiserRecipe,
        compile_blocks: bool,
    ) -> None:
        self.model = model
        self.processor = processor
        self.recipe = recipe
        self.device = next(model.parameters()).device
        self.tokens = ImageTokens.from_config(model.config)
        self.optimiser = torch.optim.AdamW(
            _parameter_groups(model, recipe.weight_decay),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            fused=self.device.type == "cuda",
        )
        self.step = 0
        self._generator = torch.Generator().manual_seed(recipe.seed)
        wrap: Callable[[Any], Any] = (
            (lambda block: torch.compile(block, dynamic=True)) if compile_blocks else (lambda block: block)
        )
        self._decoder_block = wrap(decoder_block)
        self._vision_block = wrap(vision_block)
        self._connector = wrap(lambda connector, features, masks: connector(features, masks))

    def forward(self, batch: TrainingBatch, blocks: int | None = None) -> StepResult:
        """Loss over the answers of one batch; `blocks` runs only the first so many blocks."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            features, prefix = self._encode(batch)
            slots = batch.slots
            ids = slots.input_ids.to(self.device, non_blocking=True)
            length = prefix.shape[0] + ids.shape[1]
            total = -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            ids = torch.cat([prefix.expand(ids.shape[0], -1), ids], dim=1)
            ids = nn.functional.pad(ids, (0, total - length), value=self.model.config.pad_token_id)
            states = self.model.model.embed(ids, features)
            positions = slot_positions(prefix.shape[0], slots.widths, total).to(self.device)
            mask = slot_mask(prefix.shape[0], slots.widths, total, self.device)
            states, balance, router_z = self._decode(states, positions, mask, blocks)
            answers = states[:, prefix.shape[0] : length]
            return self._loss(answers, batch, balance, router_z)

    def _encode(self, batch: TrainingBatch) -> tuple[MolmoeImageFeatures, torch.Tensor]:
        """Features of the pictures, and the ids (bos and image part) that stand before every slot."""
        config = self.model.config
        pixels = batch.images.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float().div_(255)
        crops, masks = self.processor.cut_crops(pixels, batch.tiling)
        count, per_picture = crops.shape[:2]
        tower = self.model.model.vision_tower
        states = tower.pre_layernorm(tower.embeddings(crops.flatten(0, 1)))
        kept = {}
        for index, layer in enumerate(tower.layers):
            states = self._vision_block(layer, states)
            kept[index] = states
        stacked = torch.cat([kept[index][:, 1:] for index in tower.feature_blocks], dim=-1)
        features = self._connector(self.model.model.connector, stacked, masks.repeat(count, 1))
        layout = self.tokens.layout(self.processor.features_per_side, self.processor.stitched_features(batch.tiling))
        prefix = torch.tensor([config.bos_token_id, *layout])
        places = (prefix == self.tokens.patch).nonzero().flatten()
        rows = self.processor.feature_rows(batch.tiling).flatten()
        index = torch.where(rows < 0, rows, places[rows.clamp(min=0)]).to(self.device)
        encoded = MolmoeImageFeatures(
            pooler_output=features.reshape(count, per_picture * features.shape[1], -1),
            image_input_idx=index.expand(count, -1),
        )
        return encoded, prefix.to(self.device)

    def _decode(
        self, states: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, blocks: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        decoder = self.model.model.language_model
        cos, sin = decoder.rotary_emb(states, positions[None])
        layers = list(decoder.layers)[:blocks]
        balance = states.new_zeros((), dtype=torch.float32)
        router_z = states.new_zeros((), dtype=torch.float32)
        for layer in layers:
            states, block_balance, block_z = self._decoder_block(layer, states, cos, sin, mask)
            balance, router_z = balance + block_balance / len(layers), router_z + block_z / len(layers)
        return decoder.norm(states), balance, router_z

    def _loss(
        self, states: torch.Tensor, batch: TrainingBatch, balance: torch.Tensor, router_z: torch.Tensor
    ) -> StepResult:
        labels = batch.slots.labels.to(self.device, non_blocking=True)
        weights = batch.slots.weights.to(self.device, non_blocking=True)
        logits = self.model.lm_head(states).float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        answer_loss = (losses * weights).sum() / weights.sum()
        wrong = ((logits.argmax(dim=-1) != labels) & (labels != IGNORED)).float()
        exact = torch.stack([part.sum(dim=1) == 0 for part in wrong.split(list(batch.slots.widths), dim=1)], dim=1)
        loss = answer_loss + self.recipe.load_balancing_weight * balance + self.recipe.router_z_weight * router_z
        return StepResult(loss, answer_loss.detach(), exact.float().mean(dim=0))

    def train_step(self, batch: TrainingBatch, progress: float) -> tuple[StepResult, torch.Tensor]:
        """One optimiser step; returns the results and the gradient's norm before clipping."""
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step, progress)
        result = self.forward(batch, self._drawn_blocks())
        self.optimiser.zero_grad(set_to_none=True)
        result.loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)
        self.optimiser.step()
        self.step += 1
        return result, norm

    def _drawn_blocks(self) -> int | None:
        total = self.model.num_total_blocks
        if float(torch.rand((), generator=self._generator)) >= self.recipe.block_dropout_share:
            return None
        return total - 1 - int(torch.randint(0, 4, (), generator=self._generator))

    def state(self, clock: Clock) -> dict[str, Any]:
        """Everything that a later leg needs."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "progress": clock.progress,
        }

    def load_state(self, state: dict[str, Any]) -> float:
        """Continue from `state`; returns the progress at which it was saved."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        return float(state["progress"])


def learning_rate(recipe: OptimiserRecipe, step: int, progress: float) -> float:
    """Linear warm-up over steps, then a cosine over the share of time that is spent."""
    warm = min((step + 1) / recipe.warmup_steps, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return warm * (recipe.final_learning_rate + (recipe.learning_rate - recipe.final_learning_rate) * cosine)


def run_leg(
    trainer: Trainer, batches: Iterator[TrainingBatch], clock: Clock, leg_s: float, share: Any, log_path: Path
) -> None:
    """Train for `leg_s` seconds or to the end of the plan; one log line every `LOG_EVERY` steps.

    Args:
        share: the batch source's shared progress, kept up to date.

    Raises:
        FloatingPointError: the loss is not a number; the state saved last is the one to go on from.
    """
    started = time.monotonic()
    sums: dict[str, list[float]] = {}
    waited = 0.0
    with log_path.open("a") as log:
        while time.monotonic() - started < leg_s and clock.progress < 1.0:
            before = time.monotonic()
            batch = next(batches)
            waited += time.monotonic() - before
            share.value = clock.progress
            result, norm = trainer.train_step(batch, clock.progress)
            if trainer.step % 10 == 0:
                sums.setdefault(batch.tier, []).append(float(result.exact[:-1].mean()))
                if not math.isfinite(float(result.loss)):
                    raise FloatingPointError(f"loss {float(result.loss)} at step {trainer.step}")
            if trainer.step % LOG_EVERY == 0:
                elapsed = time.monotonic() - started
                row = {
                    "step": trainer.step,
                    "progress": round(clock.progress, 4),
                    "s": round(elapsed, 1),
                    "waited_s": round(waited, 1),
                    "loss": round(float(result.answer_loss), 4),
                    "grad_norm": round(float(norm), 3),
                    "exact": {tier: round(sum(values) / len(values), 3) for tier, values in sums.items()},
                }
                log.write(json.dumps(row) + "\n")
                log.flush()
                if trainer.step % (4 * LOG_EVERY) == 0:
                    print(json.dumps(row), flush=True)
                    sums = {}


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and embeddings do not."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and "embed" not in name
        (decayed if is_matrix else plain).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
