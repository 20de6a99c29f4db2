"""Text in and out: tokenizer, chat template, detokenizing, stop strings."""
