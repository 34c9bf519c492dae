"""Does delay hurt? Trainings on CIFAR-10, side by side on one GPU."""
