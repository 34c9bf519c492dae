"""Random residual nets: each is captured, made reversible and staged, and compared with autograd."""
