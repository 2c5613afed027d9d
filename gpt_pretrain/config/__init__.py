"""The configuration: its names and types, how it is composed and checked. Imports no torch and nothing of ours."""
