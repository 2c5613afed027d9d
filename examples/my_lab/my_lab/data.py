"""A data source: mails of mbox files, one document each; `model.data.data_impl=lab_mails` chooses it."""

import mailbox
from collections.abc import Iterator
from pathlib import Path

from gpt_pretrain import extend
from my_lab.settings import MyLab


@extend.data_source("lab_mails")
class MailSource:
    """Subject and body of each mail that is plain text."""

    def __init__(self, config: extend.Config) -> None:
        self.files = [Path(name) for name in extend.own_keys(config, MyLab).mails]
        if not self.files:
            raise extend.UserError("my_lab.mails=[] names no mails; give paths of mbox files")

    def documents(self, path: Path) -> Iterator[str]:
        """Mails in the order of the file."""
        for mail in mailbox.mbox(path, create=False):
            if not mail.is_multipart():
                yield f"{mail['subject']}\n\n{mail.get_payload()}"

    def identity(self) -> None:
        """Nothing but the files decides the text."""
