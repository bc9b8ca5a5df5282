"""Answers that are not next in cohort order wait on disk, so that memory does not grow with the cohort."""

from pathlib import Path

from effuse.core.federation import Order
from effuse.core.files import writing
from effuse.transport.flower.messages import ANSWER, Packet


class Inbox:
    """Answers in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, packet: Packet) -> None:
        """Store an answer; it need not survive a crash, because its order would be sent again."""
        with writing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds single clients' models
            with open(self.folder / name, "wb") as file:
                file.write(len(packet.head).to_bytes(8, "little"))
                file.write(packet.head)
                file.write(packet.body)

    def take(self, name: str) -> Packet:
        """Read an answer and delete its file."""
        path = self.folder / name
        with open(path, "rb") as file:
            head = file.read(int.from_bytes(file.read(8), "little"))
            packet = Packet(ANSWER, head, file.read())
        path.unlink()
        return packet

    def clear(self) -> None:
        for path in self.folder.glob("*"):
            path.unlink(missing_ok=True)
        if self.folder.is_dir():
            self.folder.rmdir()


def file_name(order: Order) -> str:
    """The name under which the answer to an order waits."""
    return f"{order.t}_{order.call}_{order.client}"
