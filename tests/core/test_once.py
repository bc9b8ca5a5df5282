"""Arguments that are sent once: repeated until a reply to them is accepted, and then no more."""

from replies import Declared, Scripted, reply


def test_once_is_sent_until_a_reply_to_it_is_accepted():
    """Client 1 does not answer at first, so only it is sent the guide a second time."""
    fed = Scripted({0: reply(1.0), 2: reply(1.0)})

    def ask(clients: list[int]) -> None:
        list(fed.ask(Declared().guided, clients, guide="", note=None, once={"guide": "go"}))

    ask([0, 1])
    assert {k: m.guide for k, m in fed.sent.items()} == {0: "go", 1: "go"} and fed.has("guide") == {0}
    assert fed.sent[0] is fed.sent[1], "one message, which is encoded once"
    fed.answers[1] = reply(1.0)
    ask([0, 1, 2])
    assert {k: m.guide for k, m in fed.sent.items()} == {0: "", 1: "go", 2: "go"} and fed.has("guide") == {0, 1, 2}
    ask([0, 1, 2])
    assert {m.guide for m in fed.sent.values()} == {""} and fed.has("note") == set()


def test_once_may_differ_by_client_and_may_add_arguments():
    fed = Scripted(dict.fromkeys(range(3), reply(1.0)))
    notes = {0: {"note": "a"}, 1: {"note": "b"}}
    fed.mean(Declared().guided, {k: {"guide": "all"} for k in range(3)}, note=None, once=notes)
    assert [fed.sent[k].note for k in range(3)] == ["a", "b", None] and fed.has("note") == {0, 1}
    list(fed.ask(Declared().guided, [2], guide="all", once={2: {"note": "c"}}))
    assert fed.sent[2].note == "c" and fed.has("note") == {0, 1, 2}


def test_equal_messages_are_one():
    """True, 1 and 1.0 are equal in Python and written differently."""
    fed = Scripted({})
    values = ("x", "x", "y", None, None)
    list(fed.ask_each(Declared().guided, {k: {"note": v} for k, v in enumerate(values)}, guide="g"))
    assert fed.sent[0] is fed.sent[1] is not fed.sent[2] and fed.sent[3] is fed.sent[4]
    list(fed.ask_each(Declared().guided, {k: {"note": v} for k, v in enumerate((True, 1, 1.0))}, guide="g"))
    assert len({id(m) for m in fed.sent.values()}) == 3


def test_receipts_are_restored_from_a_checkpoint():
    fed = Scripted({})
    fed.restore({0: "1_0"}, {"guide": (0, 2)})
    assert fed.has("guide") == {0, 2} and fed.snapshots == fed.durable == {0: "1_0"}


def test_what_was_sent_once_can_be_sent_again():
    """A guide that has changed goes to all once more; one that client 1 has lost goes to it alone."""
    fed = Scripted(dict.fromkeys(range(3), reply(1.0)))

    def ask() -> dict[int, str]:
        list(fed.ask(Declared().guided, range(3), guide="", note=None, once={"guide": "go"}))
        return {k: m.guide for k, m in fed.sent.items()}

    assert ask() == dict.fromkeys(range(3), "go") and ask() == dict.fromkeys(range(3), "")
    fed.forget("guide", [1])
    assert ask() == {0: "", 1: "go", 2: ""}
    fed.forget("guide")
    assert ask() == dict.fromkeys(range(3), "go")
    fed.forget("never sent")


def test_what_arrives_in_an_evaluation_is_not_received():
    fed = Scripted({0: reply(1.0)})
    with fed.evaluating():
        list(fed.ask(Declared().guided, [0], guide="", note=None, once={"guide": "go"}))
    assert fed.has("guide") == set()
