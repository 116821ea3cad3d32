"""Where the features look, and what they have to encode."""

import pytest
import torch

from experiment_core_utils.models.molmoe.image_processing_molmoe import MolmoeImageProcessor
from experiment_core_utils.tasks.datasets.reference_scenes import SceneOptions, plan_scene
from experiments.reference_model.tags import CHARACTERS, NO_CHARACTER, TagHead, feature_centres, item_tags


@pytest.mark.parametrize(("size", "tiling"), [((300, 500), (1, 2)), ((640, 410), (3, 2)), ((336, 336), (1, 1))])
def test_feature_centres_match_the_crops_that_are_cut(size: tuple[int, int], tiling: tuple[int, int]) -> None:
    """A picture whose red is x and whose green is y shows where each feature looks."""
    processor = MolmoeImageProcessor()
    height, width = size
    x = (torch.arange(width) + 0.5) / width
    y = (torch.arange(height) + 0.5) / height
    picture = torch.stack([x.expand(height, -1), y[:, None].expand(-1, width), torch.ones(height, width)])
    crops, _ = processor.cut_crops(picture[None], tiling)
    mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
    shown = crops[0] * std.view(3, 1, 1) + mean.view(3, 1, 1)
    points, scales = feature_centres(processor, size, tiling)
    side = processor.features_per_side
    pitch = processor.crop_size // side
    # The middle of a window lies on the corner of four pixels: their mean is the value there.
    centres = shown.unfold(2, pitch, pitch).unfold(3, pitch, pitch)[..., 13:15, 13:15].mean(dim=(-1, -2))
    seen = centres.permute(0, 2, 3, 1).flatten(1, 2)
    inside = (points[..., 0] > 8) & (points[..., 0] < width - 8) & (points[..., 1] > 8) & (points[..., 1] < height - 8)
    assert inside.any(dim=1).all()
    expected = torch.stack([points[..., 0] / width, points[..., 1] / height], dim=-1)
    assert (seen[..., :2] - expected)[inside].abs().max() < 2e-3
    assert scales.shape == (tiling[0] * tiling[1] + 1,)


def test_item_tags_spell_the_labels() -> None:
    plans = [plan_scene(seed, SceneOptions(canvas=(500, 400))) for seed in range(3)]
    tags = item_tags(plans)
    for row, plan in enumerate(plans):
        for at, item in enumerate(plan.items):
            spelled = [CHARACTERS[i] for i in tags.names[row, at, 2:].tolist() if i != NO_CHARACTER]
            assert "".join(spelled) == item.label
        assert (tags.text_px[row] > 0).sum() == len(plan.items)


def test_loss_of_features_that_tell_all_goes_to_zero() -> None:
    """A head trained on random features of one scene can learn its tags by heart: the targets contradict nowhere."""
    torch.manual_seed(0)
    processor = MolmoeImageProcessor()
    plan = plan_scene(4, SceneOptions(canvas=(400, 400), h_rel=(0.03, 0.05)))
    points, scales = feature_centres(processor, (400, 400), (1, 1))
    head = TagHead(256)
    features = torch.randn(1, 2, 144, 256)
    optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(60):
        loss, right = head.loss(features, item_tags([plan]), points, scales, pitch=28.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.1
    assert right == 1.0
