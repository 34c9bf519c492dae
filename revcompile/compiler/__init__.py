"""The passes: capture, find, rewire. Each maps one immutable value to the next."""
