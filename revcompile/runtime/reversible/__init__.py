"""A reversible model on one device, as an `nn.Module`."""
