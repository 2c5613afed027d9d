"""Variants of a run measured on this machine, one after another, each in processes of its own."""
