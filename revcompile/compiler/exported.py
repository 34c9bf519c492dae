"""placeholder"""
def export_capture(*a): raise NotImplementedError
