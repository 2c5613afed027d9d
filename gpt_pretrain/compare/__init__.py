"""Training runs side by side: whether one trains as well as another, and how much sooner it gets there; no torch.

variants trained here, or finished runs and logs → RunRecord → statistics → Comparison → console, JSON, page
"""
