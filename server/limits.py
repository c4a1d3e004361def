"""Every limit that a client can meet and no option sets."""

from __future__ import annotations

GATHER_SECONDS = 0.003  # that a round of frames waits for sessions whose audio is about to come
OUTGOING_SECONDS = 2.0  # of audio that may wait to be sent; a session whose queue is full takes no turn
SLOW_SECONDS = 3.0  # an event that waits so long to be sent: the client reads slower than real time
OUTGOING_EVENTS = 256  # beyond it no message is read: they are what is answered
INPUT_SECONDS = 10.0  # of audio that may wait for its turn; then the socket is not read
LONG_INPUT_SECONDS = 60.0  # the same where a client may send a recording at once
INPUT_MESSAGES = 512  # that may wait, however short
LAGGING_SECONDS = 0.5  # of waiting audio that a client is told of
LAGGING_PERIOD = 1.0  # seconds between two such events
PROMPT_CHARACTERS = 32_768  # each token of a prompt takes a step of the speech generator
CLOSING_SECONDS = 10.0  # for a client to answer a closing; then the connection is cut
UNREAD_SECONDS = 120.0  # for one that has stopped reading to come to it
ROOM_SECONDS = 0.5  # for the frame in which a client's place becomes free, who comes back at once
RETRY_SECONDS = 2  # what a client is told to wait while the model loads
CONNECTIONS = 512  # that are open at once, where the process may have so many descriptors
REQUEST_SECONDS = 20.0  # for a whole request to come, and its answer to be taken
LATE_SECONDS = 1.0  # so much later than it was due a timer shows that the process stood still
