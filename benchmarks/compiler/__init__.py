"""Every family of timm: what is captured and rewired, and whether gradients are right."""
