"""Reference models written by hand in plain PyTorch, to compare compiled models with.

`revnet`: the RevNets of the PETRA paper. `vit`: a small Rev-ViT. These models do not use the
compiler, and the compiler does not use them.
"""
