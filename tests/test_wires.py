"""`talk` in other dialects: what is sent, the one timeline of what comes back, push-to-talk, the options."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from mlx_voicechat.cli import push, wires
from mlx_voicechat.cli.live import LiveConversation
from mlx_voicechat.cli.main import run
from mlx_voicechat.errors import DeviceError, ServerError
from tests.support.scripted_server import Peer, standing_in

SECOND = (12345 * np.sin(np.arange(16_000) * 0.1)).astype(np.int16)
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`talk` with a recording of one second and no silence after it -> exit code, stdout, stderr."""
    monkeypatch.delenv("MLX_VOICECHAT_API_KEY", raising=False)
    monkeypatch.setattr(wires, "LINGER_SECONDS", 0.3)
    path = tmp_path / "second.wav"
    soundfile.write(path, SECOND, 16_000)

    def call(*options: object) -> tuple[int, str, str]:
        arguments = ["talk", "--file", path, "--extra-decoding-seconds", 0, *options]
        return run([str(argument) for argument in arguments]), *capsys.readouterr()

    return call


def appended(peer: Peer, count: int) -> list[bytes]:
    """The audio of so many appends."""
    pieces: list[bytes] = []
    while len(pieces) < count:
        message = peer.receive()
        if message["type"] == "input_audio_buffer.append":
            pieces.append(base64.b64decode(message["audio"]))
    return pieces


def answer(peer: Peer, value: int, samples: int, words: str = "Good day.", status: str = "completed") -> None:
    """A response of OpenAI's vocabulary: every sample is `value`."""
    peer.send("response.created", response={"id": "r"})
    delta = base64.b64encode(np.full(samples, value, "<i2").tobytes()).decode()
    peer.send("response.output_audio.delta", response_id="r", delta=delta)
    peer.send("response.output_audio_transcript.delta", response_id="r", delta=words)
    peer.send("response.done", response={"id": "r", "status": status})


def transcribe(peer: Peer, words: str) -> None:
    peer.send("conversation.item.input_audio_transcription.delta", delta=words)
    peer.send("conversation.item.input_audio_transcription.completed", transcript=words)


def spoken(path: Path, rate_hz: int) -> np.ndarray:
    info = soundfile.info(path)
    assert (info.samplerate, info.channels, info.subtype) == (rate_hz, 1, "PCM_16")
    return soundfile.read(path, dtype="int16")[0]


def test_the_duplex_dialect(command: Command, tmp_path: Path) -> None:
    heard: list[bytes] = []

    def script(peer: Peer) -> None:
        assert peer.receive()["session"]["instructions"] == "Be brief."
        peer.send("session.created", session={"id": "duplex-1", "model": "m"})
        heard.extend(appended(peer, 6))
        transcribe(peer, "Hello.")
        answer(peer, 1000, 5 * 1764 + 10)
        heard.extend(appended(peer, 7))
        while peer.receive()["type"] != "session.close":
            pass
        peer.send("session.closed", reason="client_close")

    out = tmp_path / "out.wav"
    with standing_in(script) as server:
        code, printed, err = command(
            "--url", server.url, "--protocol", "duplex", "-p", "Be brief.", "--output-audio", out
        )
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in printed.splitlines()] == ["[user] Hello.", "Good day."]
    np.testing.assert_array_equal(np.frombuffer(b"".join(heard), "<i2"), SECOND)
    assert "duplex=1" in server.path
    samples = spoken(out, 22_050)
    assert len(samples) % 1764 == 0
    assert len(samples) >= 12 * 1764
    loud = np.flatnonzero(samples)
    assert len(loud) == loud[-1] - loud[0] + 1 == 5 * 1764 + 10
    assert loud[0] % 1764 == 0
    assert loud[0] >= 5 * 1764


def test_openai_s_vocabulary_alone(command: Command, tmp_path: Path) -> None:
    heard: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.send("session.created", session={"id": "sess_1", "model": "m"})
        session = peer.receive()["session"]
        assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        assert session["audio"]["input"]["turn_detection"] == {"type": "server_vad"}
        peer.send("session.updated", session=session)
        heard.extend(appended(peer, 6))
        answer(peer, 1000, 4000)
        while True:
            heard.extend(appended(peer, 1))

    out = tmp_path / "out.wav"
    with standing_in(script) as server:
        code, printed, err = command("--url", server.url, "--protocol", "openai", "--output-audio", out)
    assert (code, err) == (0, "")
    assert printed == "Good day.\n[user]\n"
    assert "model=" in server.path
    assert "duplex" not in server.path
    assert np.count_nonzero(spoken(out, 24_000)) == 4000
    said = len(b"".join(heard)) // 2
    assert 24_000 * 0.9 <= said <= 24_000
    assert {message["type"] for message in server.heard} == {"session.update", "input_audio_buffer.append"}


def test_strict_v3_a_recording_is_a_turn(command: Command, tmp_path: Path) -> None:
    heard: list[bytes] = []

    def script(peer: Peer) -> None:
        protocol = {"name": "voicechat.realtime", "version": 3}
        peer.send("session.created", protocol=protocol, capabilities={"input_turn_detection": "client_smart_turn_v1"})
        peer.receive()
        peer.send("session.updated", session={"protocol_version": 3})
        start = peer.receive()
        ids = {"client_turn_id": 1, "turn_id": "t1"}
        peer.send("input_audio_buffer.turn_started", client_event_id=start["event_id"], **ids)
        heard.extend(appended(peer, 13))
        commit = peer.receive()
        assert commit["type"] == "input_audio_buffer.commit"
        peer.send("input_audio_buffer.committed", client_event_id=commit["event_id"], **ids)
        peer.send("conversation.item.input_audio_transcription.delta", turn_id="t1", delta="Hello.")
        peer.send("conversation.item.input_audio_transcription.completed", turn_id="t1", transcript="Hello.")
        response = {"turn_id": "t1", "response_id": "r1"}
        peer.send("response.created", **response)
        delta = base64.b64encode(np.full(3000, 1000, "<i2").tobytes()).decode()
        form = {"encoding": "pcm16", "sample_rate": 22_050, "channels": 1}
        peer.send("response.output_text.delta", delta="Good day.", **response)
        peer.send("response.output_audio.delta", delta=delta, **form, **response)
        peer.send("response.done", status="completed", reason="model_or_turn_taking", **response)
        while peer.receive()["type"] != "session.stop":
            pass
        peer.send("session.closed", status="completed", reason="client_stop")

    out = tmp_path / "out.wav"
    with standing_in(script) as server:
        code, printed, err = command("--url", server.url, "--protocol", "strict-v3", "--output-audio", out)
    assert (code, err) == (0, "")
    assert [line.rstrip() for line in printed.splitlines()] == ["[user] Hello.", "Good day."]
    np.testing.assert_array_equal(np.frombuffer(b"".join(heard), "<i2"), SECOND)
    assert np.count_nonzero(spoken(out, 22_050)) == 3000


@pytest.mark.parametrize("protocol", ["duplex", "openai"])
def test_an_interrupted_answer_is_heard_no_further(protocol: str) -> None:
    async def work() -> list[str]:
        wire = wires.timeline(protocol, "ws://nowhere", "", False)
        wire._take({"type": "response.created"})
        size = wire.output_rate_hz * 80 // 1000
        wire._take({"type": "response.output_audio.delta", "delta": base64.b64encode(b"\x01\x01" * 5 * size).decode()})
        wire._frame()
        wire._take({"type": "response.done", "response": {"status": "cancelled"}})
        wire._frame()
        wire._take({"type": "input_audio_buffer.speech_started"})
        wire._take({"type": "error", "error": {"code": "x", "message": "No."}})
        await wire.cancel()
        told = [event async for event in wire.events()]
        loud = [bool(np.any(event.samples)) for event in told if type(event).__name__ == "AudioFrame"]
        assert loud == [True, False]
        return [type(event).__name__ for event in told]

    kinds = asyncio.run(work())
    assert kinds == ["AudioFrame", "Interrupted", "AudioFrame", "Refusal", "Cancelled"]


def test_an_error_of_the_server_ends_it(command: Command) -> None:
    def refuse(peer: Peer) -> None:
        peer.send("error", error={"type": "x", "code": "insufficient_quota", "message": "Pay."})
        peer.receive()

    def vanish(peer: Peer) -> None:
        peer.receive()
        peer.send("session.created", session={"id": "duplex-1"})
        appended(peer, 3)
        peer.socket.close()

    with standing_in(refuse) as server:
        code, _, err = command("--url", server.url, "--protocol", "openai")
    assert (code, "Pay." in err) == (1, True)
    with standing_in(vanish) as server:
        code, _, err = command("--url", server.url, "--protocol", "duplex")
    assert (code, "connection to the server was lost" in err) == (1, True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--protocol", "soap", "--url", "ws://x"], "--protocol must be one of mlxcel, openai, duplex, strict-v3"),
        (["--protocol", "duplex"], "needs --url"),
        (["--protocol", "duplex", "--url", "ws://x", "--fast"], "--fast does not go with --protocol duplex"),
        (["--protocol", "openai", "--url", "ws://x", "--seed", "1"], "--seed does not go with --protocol openai"),
        (["--protocol", "strict-v3", "--url", "ws://x", "--type"], "--type works only with"),
        (["--url", "ws://x", "--type"], "--type works only with"),
    ],
)
def test_options_that_do_not_go_together(command: Command, options: list[str], why: str) -> None:
    code, printed, err = command(*options)
    assert (code, printed) == (2, "")
    assert why in err


class Keys(wires.StrictTimeline):
    """A timeline that only notes what the keys do."""

    def __init__(self) -> None:
        super().__init__("ws://nowhere", "", True)
        self.did: list[str] = []

    async def toggle(self) -> bool:
        self.turn_open = not self.turn_open
        self.did.append("begin" if self.turn_open else "end")
        return self.turn_open

    async def type_text(self, text: str) -> None:
        self.did.append(text)
        if text == "no":
            raise ServerError("The server does not take typed text: typed_input_unavailable.")


@pytest.mark.parametrize("typed", [True, False])
def test_keys(typed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    read, write = os.pipe()

    async def listening(self: LiveConversation, wire: Any) -> None:
        for line in ("\n", "hello\n", "no\n", "\n"):
            os.write(write, line.encode())
            await asyncio.sleep(0.05)
        os.close(write)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(LiveConversation, "_send", listening)
    with os.fdopen(read) as keyboard:
        monkeypatch.setattr("sys.stdin", keyboard)
        devices: list[Any] = [None, None, None]
        options = {"duration": None, "half_duplex": False, "here": False}
        dialogue = push.PushToTalk(*devices, said.append, typed=typed, **options)
        wire = Keys()
        asyncio.run(dialogue._send(wire))
    if typed:
        assert wire.did == ["begin", "hello", "no", "end"]
        assert said[1:] == [
            "listening; Enter ends.",
            "The server does not take typed text: typed_input_unavailable.",
            "heard.",
        ]
    else:
        assert wire.did == ["begin", "end"] * 2
    assert said[0] == (push.TYPED if typed else push.HOW)


def test_no_keyboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\n")
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        devices: list[Any] = [None, None, None]
        options = {"duration": None, "half_duplex": False, "here": False}
        dialogue = push.PushToTalk(*devices, lambda _: None, typed=False, **options)
        with pytest.raises(DeviceError, match="no keyboard"):
            asyncio.run(dialogue._send(Keys()))
