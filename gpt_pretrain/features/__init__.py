"""Optional behaviours of the model, one file each, and which of them a run uses.

A feature is a class, a `feature.Feature`, that knows when its key is refused and why, when null turns it on, how it is
built into the model, what it changes in the plan and what the doctor says of it. `registry` finds them. Torch
and megatron-core are imported inside functions only, because rules, plan and doctor read features without them.
"""
