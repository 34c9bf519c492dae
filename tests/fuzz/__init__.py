"""Random residual nets through capture, reversify and petrafy, compared with autograd."""
