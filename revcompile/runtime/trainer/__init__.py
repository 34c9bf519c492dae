"""The trainer: step, flush, evaluate, data, save and load, in one process and on ranks."""
