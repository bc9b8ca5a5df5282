"""Client state as bytes on a disk that may be torn: every damage is the project's own error, or costs nothing."""

import pytest

from effuse.core.errors import FederationError, WireError
from effuse.transport.state import Snapshots, frame, pack_state, sealed, unframe, unpack_state


def test_a_state_that_is_torn_within_its_header_is_damaged_as_any_other(tmp_path):
    """The header is read before the digest; `fall_back` goes to the checkpoint before at a FederationError only."""
    snapshots = Snapshots(tmp_path)
    snapshots.write("1_0", {"visits": 3})
    whole = (tmp_path / "1_0.state").read_bytes()
    for size in (0, 7, 40, len(whole) - 1):
        (tmp_path / "1_0.state").write_bytes(whole[:size])
        with pytest.raises(FederationError, match="1_0.state is damaged"):
            snapshots.read("1_0")


def test_a_state_with_more_or_fewer_values_than_its_table_names_is_refused():
    table, value = unframe(pack_state({"visits": 3}))
    for values in ((), (value, value)):
        with pytest.raises(WireError, match=f"a state has {len(values)} values, and its table names 1"):
            unpack_state(sealed(frame(table, *values)))
    with pytest.raises(WireError, match="cannot be read"):
        unpack_state(b"")


def test_the_list_of_durable_states_may_be_torn_anywhere(tmp_path):
    snapshots = Snapshots(tmp_path)
    for name in ("1_0", "2_0", "3_0"):
        snapshots.write(name, {"visits": 3})
    (tmp_path / "durable").write_bytes(b"1_\xef\xff")
    snapshots.prune({"3_0"}, "2_0")
    assert {path.stem for path in tmp_path.glob("*.state")} == {"2_0", "3_0"}
