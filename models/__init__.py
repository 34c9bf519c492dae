"""Reference models written out by hand in plain PyTorch: the yardstick for compiled ones.

`resnet`: ResNets for CIFAR and ImageNet. `revnet`: the RevNets of the PETRA and RevNet papers.
`vit`: a small Rev-ViT. Nothing here knows the compiler, and the compiler knows nothing of this.
"""
