"""What a person runs: repository generation, serve, demo, doctor, documentation, benchmarks, load tests."""
