"""Where weights are, what they make up, and how to read them; numpy only, so importing it is quick."""

from skippy_stage.weights.balance import balance_layers
from skippy_stage.weights.checkpoint import Checkpoint, open_checkpoint
from skippy_stage.weights.config import Llama3Scaling, ModelConfig, rotary_frequencies
from skippy_stage.weights.location import locate

__all__ = [
    "Checkpoint",
    "Llama3Scaling",
    "ModelConfig",
    "balance_layers",
    "locate",
    "open_checkpoint",
    "rotary_frequencies",
]
