"""Where weights are, what they make up, and how to read them; numpy only, so importing it is quick."""

from skippy_stage.weights.balance import balance_layers
from skippy_stage.weights.checkpoint import Checkpoint, open_checkpoint
from skippy_stage.weights.config import Llama3Scaling, ModelConfig, rotary_frequencies
from skippy_stage.weights.location import locate
from skippy_stage.weights.mtp_head import MtpWeights, open_mtp_head

__all__ = [
    "Checkpoint",
    "Llama3Scaling",
    "ModelConfig",
    "MtpWeights",
    "balance_layers",
    "locate",
    "open_checkpoint",
    "open_mtp_head",
    "rotary_frequencies",
]
