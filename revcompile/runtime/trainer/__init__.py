"""What a user trains with, in one process."""
