"""Configurations of other pretraining programs as experiments of this one: what becomes what, and what is lost."""
