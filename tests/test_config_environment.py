"""What is settled before torch is imported."""

import getpass
import os
import pwd

from gpt_pretrain.launch.environment import prepare_libraries

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


def test_a_user_that_the_machine_does_not_know_is_called_by_number(monkeypatch):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in NAMES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    prepare_libraries()
    assert getpass.getuser() == str(os.getuid())


def test_a_user_who_has_a_name_keeps_it(monkeypatch):
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("USER", "")
    prepare_libraries()
    assert getpass.getuser() == "ada"
    assert os.environ["USER"] == ""
