"""What a run leaves on disk and shows on the screen: records, sinks, the console and the summary.

It handles plain records, without torch or megatron-core, so it also works on a finished run from any machine.
"""
