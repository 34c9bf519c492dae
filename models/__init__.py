"""Reference models written out by hand in plain PyTorch: the yardstick for compiled ones.

`revnet`: the RevNets of the PETRA paper. `vit`: a small Rev-ViT. Nothing here knows the compiler,
and the compiler knows nothing of this.
"""
