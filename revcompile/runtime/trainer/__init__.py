"""Trainers: what users call to train, evaluate, load data and save; here of one process."""
