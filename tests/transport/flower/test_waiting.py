"""A site's question waits at the SuperLink until there is a message for it."""

import asyncio

from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node

from effuse.transport.flower import waiting
from effuse.transport.flower.waiting import ASK, END, RECEIVERS, SECONDS, SEND, Waiting

QUESTION = PullMessagesRequest(node=Node(node_id=7)).SerializeToString()


class Flower:
    """What lies behind: it answers each question at once with a message of node 7, if it has one."""

    def __init__(self) -> None:
        self.messages, self.asked = 0, 0

    async def __call__(self, scope, receive, send):
        if scope["path"] == SEND:
            self.messages += 1
        if scope["path"] == ASK:
            self.asked += 1
            assert (await receive())["body"] == QUESTION, "the question is passed on whole"
            length = b"9" if self.messages else b"0"
            self.messages = max(0, self.messages - 1)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})


def call(app, path, *headers, body=b"", gone=None):
    """A call, as a task whose result is the length that was answered."""
    lines = [(b"content-length", str(len(body)).encode())] + [(k.encode(), str(v).encode()) for k, v in headers]
    first = [{"type": "http.request", "body": body, "more_body": False}]
    answered = []

    async def receive():
        if first:
            return first.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        answered.append(int(dict(message["headers"])[b"content-length"]))

    async def done():
        await app({"type": "http", "path": path, "headers": lines}, receive, send)
        return answered[0] if answered else None

    return asyncio.ensure_future(done())


def ask(app, seconds=9, gone=None):
    return call(app, ASK, (SECONDS, seconds), body=QUESTION, gone=gone)


async def turns():
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_question_waits_for_a_message_to_its_node():
    async def scene():
        app = Waiting(flower := Flower())
        question = ask(app)
        await turns()
        assert flower.asked == 0
        await call(app, SEND, (RECEIVERS, 8))
        flower.messages = 0
        await turns()
        assert flower.asked == 0, "another node's message"
        await call(app, SEND, (RECEIVERS, 7))
        assert await question == 9 and flower.asked == 1 and not app.news

    asyncio.run(scene())


def test_messages_that_came_before_are_answered_at_once_and_counted():
    """Two came: two questions pass, and the third waits."""

    async def scene():
        app = Waiting(flower := Flower())
        await call(app, SEND, (RECEIVERS, 7))
        await call(app, SEND, (RECEIVERS, 7))
        assert [await ask(app), await ask(app)] == [9, 9]
        third = ask(app)
        await turns()
        assert flower.asked == 2 and not third.done() and not app.unread
        third.cancel()

    asyncio.run(scene())


def test_an_empty_answer_ends_the_count():
    """A message that Flower dropped as too old is not waited for: its question is answered, and the next one waits."""

    async def scene():
        app = Waiting(flower := Flower())
        for _ in range(3):
            await call(app, SEND, (RECEIVERS, 7))
        flower.messages = 0
        assert await ask(app) == 0
        second = ask(app)
        await turns()
        assert flower.asked == 1 and not second.done()
        second.cancel()

    asyncio.run(scene())


def test_a_question_ends_with_its_time_its_site_and_the_run(monkeypatch):
    async def scene():
        app, gone = Waiting(flower := Flower()), asyncio.Event()
        monkeypatch.setattr(waiting, "LONGEST", 5)
        assert await ask(app, seconds=0) == 0 and flower.asked == 1, "it does not want to wait"
        assert await ask(app, seconds=6) == 0 and flower.asked == 2, "longer than any may wait"
        assert await ask(app, seconds=1) == 0 and flower.asked == 3
        lost = ask(app, seconds=5, gone=gone)
        await turns()
        gone.set()
        assert await lost is None and flower.asked == 3, "a message for a site that has gone stays unread"
        last = ask(app, seconds=5)
        await turns()
        await call(app, END)
        assert await last == 0 and await ask(app) == 0

    asyncio.run(scene())


def test_what_is_no_question_passes():
    async def scene():
        app = Waiting(Flower())
        assert await call(app, "/v1/fleet/push-object", body=b"x" * 5000) is None
        seen = []

        async def behind(scope, receive, send):
            seen.append((await receive())["body"])

        app = Waiting(behind)
        for body in (b"\xff\xff", b"x" * 5000):
            await call(app, ASK, (SECONDS, 9), body=body)
        assert [len(body) for body in seen] == [2, 5000], "Flower says what is wrong with it"

    asyncio.run(scene())
