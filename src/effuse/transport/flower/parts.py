"""How Flower cuts a message into parts, and how a SuperLink says that it dropped one; without torch, for its process."""

PIECE = 5 << 20  # bytes of a packet's body in one part, as Flower cuts it
SMALL = 16  # parts of a packet beside those
INLINE = 256 << 10  # bytes of a packet that travels within its message: 2 calls instead of 15
CALL = 512 << 10  # bytes of a call that brings no part: a packet within its message, or the names of a packet's parts
DROPPED = 4130  # code of the error that stands for a reply over its limit
