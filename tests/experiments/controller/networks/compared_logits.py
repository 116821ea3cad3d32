"""The distance of a device's logits from the host's, for odd sizes."""

import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.models.common.cuda_graphs import GraphCapturer
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.action_logits import HostActionLogits
from experiments.controller.networks.on_device import USUAL_IDS, DeviceActionLogits
from experiments.controller.networks.on_host import Logits
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from tests.experiments.controller.networks.hand_made_networks import trained_looking

SPACE = KnobSpace(("low", "medium", "high"), (4, 8), (12, 13, 16), 16, 8)
# Block 2 is the least important: behind a pause of 3 or more all 16 blocks have to run.
SCORES = BlockChoice(scores={block: (0.0 if block == 2 else 1.0 - block / 100) for block in range(1, 16)})
WIDTH, VOCABULARY = 200, 30


@torch.inference_mode()
def compared(device: torch.device, dtype: torch.dtype, graph_capturer: GraphCapturer | None) -> dict[str, float | bool]:
    """Prompts of no ids to more than there is room for at first.

    Returns:
        worst: largest difference of logits, of prompts and of tokens, relative to 1.
        same_impossible: whether what is not possible is the same.
        several: whether the choices differ from question to question.
    """
    networks = trained_looking(TwoStageNetworks(action_space(SPACE, SCORES), WIDTH, embedding_rms=0.03, seed=4))
    generator = torch.Generator().manual_seed(2)
    table = (torch.randn(VOCABULARY, WIDTH, generator=generator) + 0.2).to(dtype)
    ours = DeviceActionLogits(networks.to(device), table.to(device), graph_capturer)
    host = HostActionLogits(networks, table.float().numpy(), torch.device("cpu"))
    worst, same, chosen = 0.0, True, set()
    for place, length in enumerate((0, 5, USUAL_IDS + 1)):
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        budget_s = 10.0 ** (2 * place - 3)
        tier, pause = place, 2 * place
        states = 10**place * torch.randn(2, WIDTH, generator=generator) - 0.5
        found = [ours.first(ids, budget_s), ours.second(states.to(device), tier, pause)]
        expected = [host.first(ids, budget_s), host.second(states, tier, pause)]
        for one, other in zip(found, expected, strict=True):
            worst, same = max(worst, _furthest(one, other)), same and _impossible(one) == _impossible(other)
        pairs = [*zip(ours.seen(), host.seen(), strict=True), (ours.token().cpu(), host.token())]
        worst = max(worst, *(float((one - other).abs().max() / other.abs().max().clamp(min=1)) for one, other in pairs))
        chosen.add(tuple(each.index(max(each)) for logits in found for each in logits))
    return {"worst": worst, "same_impossible": same, "several": len(chosen) > 1}


def _impossible(logits: Logits) -> list[list[bool]]:
    return [[each == float("-inf") for each in values] for values in logits]


def _furthest(one: Logits, other: Logits) -> float:
    pairs = [pair for ours, theirs in zip(one, other, strict=True) for pair in zip(ours, theirs, strict=True)]
    return max(abs(a - b) / max(abs(b), 1.0) for a, b in pairs if b != float("-inf"))
