"""Answers that wait for their turn do so on disk, so that memory does not grow with the cohort."""

from pathlib import Path

from effuse.core.files import writing
from effuse.transport.flower.messages import ANSWER, Packet


class Inbox:
    """Letters in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, letter: Packet) -> None:
        """Keep an answer; nothing of it need survive a crash, since its order would be sent again."""
        with writing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a model of one client's data alone
            with open(self.folder / name, "wb") as file:
                file.write(len(letter.head).to_bytes(8, "little"))
                file.write(letter.head)
                file.write(letter.body)

    def take(self, name: str) -> Packet:
        """Get it back, once."""
        path = self.folder / name
        with open(path, "rb") as file:
            head = file.read(int.from_bytes(file.read(8), "little"))
            letter = Packet(ANSWER, head, file.read())
        path.unlink()
        return letter

    def clear(self) -> None:
        for path in self.folder.glob("*"):
            path.unlink(missing_ok=True)
        if self.folder.is_dir():
            self.folder.rmdir()
