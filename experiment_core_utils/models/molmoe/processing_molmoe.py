"""MolmoE's processor: token ids with the image part in front, crops, masks and feature positions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, PreTrainedTokenizerBase

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.image_processing_molmoe import (
    PATCH_DROPPED,
    MolmoeImageProcessor,
    ProcessedImage,
)
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.interface import Sample


def refuse_several_pictures(sample: Sample) -> None:
    """Raises SampleError for a question about more pictures than the one that a prompt has."""
    if len(sample.images) > 1:
        raise SampleError(f"sample {sample.sample_id} has {len(sample.images)} pictures, and Molmo takes one")


@dataclass(frozen=True)
class ImageTokens:
    """The ids around and inside the image part of a prompt."""

    bos: int
    start: int
    end: int
    patch: int
    column: int

    @classmethod
    def from_config(cls, config: MolmoeConfig) -> "ImageTokens":
        """The ids that a model was trained with."""
        return cls(
            bos=config.bos_token_id,
            start=config.image_start_token_id,
            end=config.image_end_token_id,
            patch=config.image_patch_token_id,
            column=config.image_column_token_id,
        )

    def layout(self, whole_side: int, stitched: tuple[int, int]) -> list[int]:
        """The ids of an image part: start, `whole_side` rows of patches each closed by a column mark, end; the same for
        the stitched tiles.
        """

        def grid(rows: int, cols: int) -> list[int]:
            return [self.start, *([self.patch] * cols + [self.column]) * rows, self.end]

        return grid(whole_side, whole_side) + grid(*stitched)


class MolmoeProcessor:
    """Joins the tokenizer and the image processor; same loading and saving calls as transformers' processors.

    Args:
        image_processor: cuts pictures into crops.
        tokenizer: turns text into ids; adds no special tokens by itself.
        image_tokens: ids of the image part.
    """

    def __init__(
        self,
        image_processor: MolmoeImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        image_tokens: ImageTokens,
    ) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.image_tokens = image_tokens

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> "MolmoeProcessor":
        """Loads tokenizer, image processor and ids from one folder or hub id; no code from there is run."""
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=False, **kwargs)
        image_processor = MolmoeImageProcessor.from_pretrained(path, **kwargs)
        return cls(image_processor, tokenizer, ImageTokens.from_config(MolmoeConfig.from_pretrained(path, **kwargs)))

    def save_pretrained(self, path: str | Path) -> None:
        """Writes the tokenizer's and the image processor's files; the ids are saved with the model's config."""
        self.tokenizer.save_pretrained(path)
        self.image_processor.save_pretrained(path)

    def __call__(self, text: str, image: Image.Image | None = None, crops: CropRange | None = None) -> BatchFeature:
        """One request as tensors on the host.

        Args:
            text: the prompt without image tokens.
            image: the picture, or None.
            crops: range of crops; None applies the official rule.

        Returns:
            `input_ids` [1, T]; with a picture also `pixel_values` [1, K, 3, S, S], `image_masks` [1, K, P] and
            `image_input_idx` [1, K, F].
        """
        prompt_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        processed = None if image is None else self.image_processor.preprocess(image, crops)
        return self.assemble(prompt_ids, processed)

    def assemble(self, prompt_ids: list[int], image: ProcessedImage | None) -> BatchFeature:
        """The ids of bos, image part and prompt, and the place of each pooled feature (see `__call__` for the
        shapes).
        """
        if image is None:
            return BatchFeature({"input_ids": torch.tensor([[self.image_tokens.bos, *prompt_ids]])})
        layout = self.image_tokens.layout(
            self.image_processor.features_per_side, self.image_processor.stitched_features(image.tiling)
        )
        input_ids = torch.tensor([self.image_tokens.bos, *layout, *prompt_ids])
        image_part = input_ids[: 1 + len(layout)]
        patch_positions = (image_part == self.image_tokens.patch).nonzero().flatten()
        rows = image.feature_rows
        places = torch.where(rows < 0, PATCH_DROPPED, patch_positions[rows.clamp(min=0)])
        return BatchFeature(
            {
                "input_ids": input_ids[None],
                "pixel_values": image.pixel_values[None],
                "image_masks": image.image_masks[None],
                "image_input_idx": places[None],
            }
        )

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        """Text of a list of ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
