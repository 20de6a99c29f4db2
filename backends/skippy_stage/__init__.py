"""One pipeline stage: protocol, runtime, engines, KV cache, sampling and weights."""
