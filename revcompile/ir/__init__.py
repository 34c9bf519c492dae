"""What travels between passes: graph facts, segments, programs, the ops of generated code."""
