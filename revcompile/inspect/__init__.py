"""Tables, generated code, explanations of blocks, drawings."""
