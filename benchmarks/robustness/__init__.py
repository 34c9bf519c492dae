"""What goes wrong outside: damaged files, hostile messages, slow networks, long runs."""
