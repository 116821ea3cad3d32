"""MolmoE on transformers' own OLMoE and CLIP parts."""

from transformers import AutoConfig, AutoModelForImageTextToText

from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.image_processing_molmoe import MolmoeImageProcessor
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.processing_molmoe import MolmoeProcessor

AutoConfig.register(MolmoeConfig.model_type, MolmoeConfig, exist_ok=True)
AutoModelForImageTextToText.register(MolmoeConfig, MolmoeForConditionalGeneration, exist_ok=True)

__all__ = ["MolmoeConfig", "MolmoeForConditionalGeneration", "MolmoeImageProcessor", "MolmoeProcessor"]
