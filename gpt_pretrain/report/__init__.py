"""What a run leaves on disk and shows on the screen: records, sinks, the console and the summary.

It reads and writes plain records and knows nothing live (no torch, no megatron-core), so it works on a finished run
from any machine.
"""
