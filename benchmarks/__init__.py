"""Measurements: each module is a script, run by `python -m benchmarks.NAME`.

For users:    memory, whole (models), peers, coverage
Regressions:  engine, ranks, stage_memory, families, huggingface
Papers:       accounting, learning (CIFAR-10), text (a GPT)

`--help` says what each one measures; `--json FILE` writes its rows.
"""
