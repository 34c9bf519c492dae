"""What goes wrong outside: slow networks, long runs."""
