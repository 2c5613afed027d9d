"""How the optional parts are installed: README.md's commands, for messages that miss one.

The package is on no registry, so that an extra is installed from the checkout.
"""

_COMMANDS = {
    # Built against the PyTorch that is there, hence no build isolation.
    "te": "python -m pip install --no-build-isolation -c constraints.txt -e '.[te]'",
    # Its wheel for CUDA 13.
    "flash": "python -m pip install -c constraints.txt -e '.[flash]'",
    "wandb": "python -m pip install -c constraints.txt -e '.[wandb]'",
    "plot": "python -m pip install -c constraints.txt -e '.[plot]'",
}


def install_command(extra: str) -> str:
    """The command that installs an extra, from the checkout."""
    return _COMMANDS[extra]


def how_to_install(extra: str) -> str:
    """The way out of a message about a missing extra."""
    return f"install it from the checkout with {install_command(extra)}"
