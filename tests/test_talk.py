"""`talk` and its client: what is sent, shown and kept, and the words for every way in which a server can fail."""

import base64
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from mlx_voicechat.cli import client, recorded
from mlx_voicechat.cli.main import run
from mlx_voicechat.client import connecting
from mlx_voicechat.client.connecting import realtime_url
from mlx_voicechat.errors import InputError
from tests.support.checkpoints import GOLDEN
from tests.support.scripted_server import Peer, standing_in
from tests.support.server import ServerProcess, serve_process

SECOND_FRAMES = 13  # 1 s is 12.5 frames
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A recording of one second, 16 bits at 16 kHz."""
    path = tmp_path / "second.wav"
    soundfile.write(path, (12345 * np.sin(np.arange(16000) * 0.1)).astype(np.int16), 16000)
    return path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], second: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`talk --fast` with the one-second recording and no silence after it -> exit code, stdout, stderr."""
    monkeypatch.delenv("MLX_VOICECHAT_API_KEY", raising=False)

    def call(url: object, *options: object, fast: bool = True, file: Path = second) -> tuple[int, str, str]:
        arguments = ["talk", "--file", file, "--url", url, "--extra-decoding-seconds", 0, *options]
        code = run([str(argument) for argument in [*arguments, *(["--fast"] if fast else [])]])
        return code, *capsys.readouterr()

    return call


def wav(path: Path) -> np.ndarray:
    """Its samples (S,) as integers."""
    info = soundfile.info(path)
    assert (info.samplerate, info.channels, info.subtype) == (22050, 1, "PCM_16")
    return soundfile.read(path, dtype="int16")[0]


def whole(peer: Peer) -> None:
    """A conversation from greeting to farewell."""
    peer.greet()
    peer.answer()
    peer.finish()


def one_line(result: tuple[int, str, str], code: int = 1) -> str:
    """The line of an error that left nothing on stdout."""
    assert result[:2] == (code, "")
    assert result[2].startswith("error: ")
    assert result[2].count("\n") == 1
    return result[2]


# What it sends, shows and writes


def test_a_conversation(command: Command, second: Path, tmp_path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        peer.answer(2)
        transcript = {"frame_index": 2, "delta": "Hello", "transcript": "Hello"}
        peer.send("conversation.item.input_audio_transcription.delta", **transcript)
        peer.answer(3)
        peer.text("Good")
        peer.text(" day.", "Good day.")
        peer.send("response.function.delta", frame_index=5, token_id=8, delta="<call>", text="<call>")
        peer.send("session.pong")
        peer.send("something.new", of="a later server")
        peer.answer()
        peer.finish()

    out = tmp_path / "out.wav"
    with standing_in(script) as server:
        code, printed, err = command(server.url, "--output-audio", out, "-p", "Be brief.", "--seed", 2**40)
    assert (code, err) == (0, "")
    assert printed == "[user] Hello\nGood day.\n[function] <call>\n"
    assert wav(out).tolist() == [index for index in range(SECOND_FRAMES) for _ in range(1764)]
    update, *appends, commit = server.heard
    session = {"system_prompt": "Be brief.", "seed": 2**40, "extensions": True}
    assert update == {"type": "session.update", "session": session}
    assert commit == {"type": "input_audio_buffer.commit", "pad_partial": True}
    assert all(set(append) == {"type", "audio", "sample_rate"} for append in appends)
    assert {append["sample_rate"] for append in appends} == {16000}
    pieces = [base64.b64decode(append["audio"]) for append in appends]
    assert [len(piece) // 2 for piece in pieces] == [1280] * 12 + [640]
    sent = np.frombuffer(b"".join(pieces), "<i2")
    np.testing.assert_array_equal(sent, soundfile.read(second, dtype="int16")[0])


def test_what_is_called_is_shown_in_place_of_the_function_text(command: Command) -> None:
    arguments = {"city": "Paris", "days": 2, "exact": True}

    def script(peer: Peer) -> None:
        peer.greet(tools=["get_weather", "get_time"])
        peer.answer(2)
        heard = {"frame_index": 2, "delta": "Rain?", "transcript": "Rain?"}
        peer.send("conversation.item.input_audio_transcription.delta", **heard)
        peer.send("response.function.delta", frame_index=3, token_id=8, delta="<call>", text="<call>")
        peer.send("tool.call", frame_index=3, call_id="call_1", name="get_weather", arguments=arguments)
        peer.send("tool.failed", frame_index=3, call_id="call_2", reason="unknown_tool", raw="get_\nrich()")
        peer.send("tool.result", frame_index=4, call_id="call_1", result='{"weather": "raining"}')
        peer.send("tool.result", frame_index=4, call_id="call_2", result="x" * 1000)
        peer.text("It rains.")
        peer.answer()
        peer.finish()

    with standing_in(script) as server:
        code, printed, err = command(server.url)
    assert (code, err) == (0, "")
    assert printed.splitlines() == [
        "[user] Rain?",
        '[call] get_weather(city="Paris", days=2, exact=true)',
        "[call] failed (unknown tool) get_ rich()",
        '[result] {"weather": "raining"}',
        f"[result] {'x' * 400}...",
        "It rains.",
    ]


def test_silence_follows_and_the_prompt_may_be_absent(command: Command) -> None:
    with standing_in(whole) as server:
        assert command(server.url, "--extra-decoding-seconds", 1.5) == (0, "[user]\n", "")
    assert server.heard[0]["session"] == {"seed": 0, "extensions": True}
    sent = b"".join(base64.b64decode(message["audio"]) for message in server.heard[1:-1])
    assert len(sent) == 2 * 2.5 * 16000
    assert not any(sent[2 * 16000 :])


def test_every_sample_value_within_one_step(command: Command, tmp_path: Path) -> None:
    values = np.arange(-32767, 32768).astype("<i2")
    values = np.concatenate([values, np.zeros(-len(values) % 1764, "<i2")]).reshape(-1, 1764)

    def script(peer: Peer) -> None:
        peer.greet()
        for frame in values:
            peer.audio(frame)
        peer.finish()

    with standing_in(script) as server:
        assert command(server.url, "--output-audio", tmp_path / "out.wav")[0] == 0
    written = wav(tmp_path / "out.wav").astype(int)
    in_files = np.minimum(values.reshape(-1) / 32767 * 32768, 32767)
    np.testing.assert_allclose(written, in_files, rtol=0, atol=0.51)  # so within 1 of the rounded sample itself


def test_real_time_is_kept(command: Command) -> None:
    arrivals: list[float] = []

    def script(peer: Peer) -> None:
        peer.greet()
        arrivals.append(time.monotonic())
        while peer.receive()["type"] == "input_audio_buffer.append":
            arrivals.append(time.monotonic())
            peer.audio()
        peer.finish()

    with standing_in(script) as server:
        assert command(server.url, fast=False)[0] == 0
    waits = np.array(arrivals[1:]) - arrivals[0]
    assert len(waits) == SECOND_FRAMES
    assert (waits > 0.08 * np.arange(1, SECOND_FRAMES + 1) - 0.02).all()


def test_fast_stays_two_seconds_ahead_at_most(command: Command) -> None:
    ahead = []

    def script(peer: Peer) -> None:
        peer.greet()
        for _ in range(25):
            peer.receive()
        with pytest.raises(TimeoutError):
            peer.receive(0.3)
        ahead.append(len(peer.heard) - 1)
        for _ in range(25):
            peer.audio()
        peer.answer()
        peer.finish()

    with standing_in(script) as server:
        assert command(server.url, "--extra-decoding-seconds", 4)[0] == 0
    assert ahead == [25]


def test_a_server_slower_than_real_time_is_spoken_of(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "BEHIND_SECONDS", 0.5)

    def script(peer: Peer) -> None:
        peer.greet()
        while peer.receive()["type"] == "input_audio_buffer.append":
            pass
        peer.send("session.lagging", backlog_seconds=1.0)
        for _ in range(SECOND_FRAMES):
            peer.audio()
        peer.finish()

    with standing_in(script) as server:
        code, _, err = command(server.url, fast=False)
    assert (code, err) == (0, "note: the server fell behind by 0.9 s: it is slower than real time, or shared.\n")


def test_the_key_is_a_header(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_in(whole) as server:
        assert command(server.url, "--api-key", "s3cret")[0] == 0
        assert server.headers["Authorization"] == "Bearer s3cret"
        monkeypatch.setenv("MLX_VOICECHAT_API_KEY", "other")
        assert command(server.url)[0] == 0
        assert server.headers["Authorization"] == "Bearer other"
        monkeypatch.delenv("MLX_VOICECHAT_API_KEY")
        assert command(server.url)[0] == 0
        assert not {"Authorization", "Origin"} & set(server.headers)
        for key in ("s3crèt", "s3cret\n"):
            assert "s3c" not in one_line(command(server.url, "--api-key", key), code=2)


def test_no_proxy_for_loopback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with standing_in(whole) as server:
        assert command(server.url)[0] == 0


def test_no_mlx(second: Path) -> None:
    program = (
        "import sys; from mlx_voicechat.cli.main import run; code = run(sys.argv[1:]);"
        "print(code, [name for name in ('mlx.core', 'mlx_lm', 'starlette', 'uvicorn') if name in sys.modules])"
    )
    with standing_in(whole) as server:
        words = ["talk", "--file", str(second), "--url", server.url, "--fast", "--extra-decoding-seconds", "0"]
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[user]\n0 []\n", "")


# Addresses


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("ws://127.0.0.1:8080/v1/realtime", "ws://127.0.0.1:8080/v1/realtime"),
        ("ws://127.0.0.1:8080", "ws://127.0.0.1:8080/v1/realtime"),
        ("http://localhost:1234/", "ws://localhost:1234/v1/realtime"),
        ("https://voice.example/prefix/v1/realtime?x=1", "wss://voice.example/prefix/v1/realtime?x=1"),
        ("WSS://Voice.example", "wss://Voice.example/v1/realtime"),
        ("ws://[::1]:8080", "ws://[::1]:8080/v1/realtime"),
    ],
)
def test_addresses(given: str, meant: str) -> None:
    assert realtime_url(given) == meant


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1", "127.0.0.1:8080", "localhost:8080", "ftp://x", "ws://", "ws:///v1/realtime", "ws://[::1"),
        *("ws://a:99999", "ws://a:b", "ws://a:0", "ws://a b", "ws://a\n", "ws://user:pass@a", "file:///etc/passwd"),
    ],
)
def test_bad_addresses(command: Command, url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    with pytest.raises(InputError):
        realtime_url(url)
    line = one_line(command(url, "--output-audio", out), code=2)
    assert "--url" in line
    assert "pass@" not in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--seed", -1], "--seed"),
        (["--extra-decoding-seconds", 601], "--extra-decoding-seconds"),
        (["--max-seconds", 0.5], "limit of 0.5 seconds"),
        (["--output-audio", "no/such/folder/out.wav"], "no/such/folder"),
        (["--file", "no-such.wav"], "no such file"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_bad_options(command: Command, options: list[object], word: str) -> None:
    with standing_in(whole) as server:
        assert word in one_line(command(server.url, *options), code=2)
    assert server.heard == []


def test_the_recording_is_never_the_output(command: Command, second: Path) -> None:
    before = second.read_bytes()
    line = one_line(command("ws://127.0.0.1:1", "--output-audio", second), code=2)
    assert "--output-audio and --file are both" in line
    assert second.read_bytes() == before


# Servers that cannot be had


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """An output file that must stay as it was."""
    path = tmp_path / "kept.wav"
    path.write_bytes(b"as it was")
    yield path
    assert path.read_bytes() == b"as it was"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept.wav", "second.wav"]


def test_nobody_listens(command: Command, kept: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        line = one_line(command(f"ws://{host}:{port}", "--output-audio", kept))
        assert f"Nobody listens at {host}:{port}." in line
        assert "mlx-voicechat serve" in line


def test_no_such_machine(command: Command, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    line = one_line(command("ws://nowhere.invalid", "--output-audio", kept))
    assert "no machine named nowhere.invalid" in line


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, "", ["asks for an API key", "--api-key", "MLX_VOICECHAT_API_KEY"]),
        (
            403,
            '{"error": {"code": "x", "message": "Origin not allowed."}}',
            ["refuses this client: Origin not allowed."],
        ),
        (403, "", ["refuses this client."]),
        (404, "<html>no</html>", ["no realtime server at ws://127.0.0.1", "HTTP 404."]),
        (426, "Upgrade\nRequired", ["no realtime server", "HTTP 426: Upgrade Required."]),
        (500, '{"error": "broken"}', ["no realtime server", "HTTP 500: broken."]),
    ],
)
def test_http_refusals(command: Command, kept: Path, status: int, body: str, words: list[str]) -> None:
    with standing_in(whole, [(status, body)]) as server:
        line = one_line(command(server.url, "--output-audio", kept))
    for word in words:
        assert word in line


def test_a_wrong_key(command: Command) -> None:
    with standing_in(whole, [(401, "")]) as server:
        line = one_line(command(server.url, "--api-key", "s3cret"))
    assert "does not accept this API key" in line
    assert "s3cret" not in line


def test_a_loading_server_is_waited_for(command: Command, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_in(whole, [(503, "")] * 2) as server:
        code, printed, err = command(server.url)
    assert (code, printed, err) == (0, "[user]\n", "note: the server is still loading its model: waiting for it.\n")
    monkeypatch.setattr(connecting, "LOADING_SECONDS", 0.5)
    with standing_in(whole, [(503, '{"error": {"message": "Loading."}}')] * 9) as server:
        code, printed, err = command(server.url, "--output-audio", kept)
    assert (code, printed, err.count("\n")) == (1, "", 2)
    assert "is not ready after 0.5 s: Loading." in err


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Something that takes one connection and says `answer`, or nothing at all."""
    done = threading.Event()

    def take() -> None:
        connection, _ = server.accept()
        with connection:
            if answer is None:
                done.wait(20)
            else:
                connection.recv(1000)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=take)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        done.set()
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.9\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"])
def test_something_else_listens(command: Command, kept: Path, answer: bytes) -> None:
    with listener(answer) as place:
        line = one_line(command(f"ws://{place}", "--output-audio", kept))
    assert f"There is no realtime server at ws://{place}/v1/realtime: it answered" in line


def test_no_answer_at_all(command: Command, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "CONNECT_SECONDS", 0.3)
    with listener(None) as place:
        line = one_line(command(f"ws://{place}", "--output-audio", kept))
    assert f"{place} did not answer within 0.3 s." in line


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and the certificate it signed for itself."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", path.with_suffix(".crt")]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True, timeout=60)
    path.write_bytes(path.read_bytes() + path.with_suffix(".crt").read_bytes())
    return path


def test_certificates(command: Command, certificate: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with standing_in(whole, tls=context) as server:
        line = one_line(command(server.url, "--output-audio", kept))
        assert "The certificate of 127.0.0.1" in line
        assert "SSL_CERT_FILE" in line
        one_line(command(server.url.replace("wss", "ws"), "--output-audio", kept))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
        assert command(server.url.replace("wss", "https"))[0] == 0
    with standing_in(whole) as server:
        line = one_line(command(server.url.replace("ws", "wss", 1), "--output-audio", kept))
    assert "a server without a certificate is reached with ws://" in line


def busy(peer: Peer) -> None:
    peer.error("server_busy", "Another conversation is active.")
    peer.socket.close(1013, "try again later")


def busy_without_a_word(peer: Peer) -> None:
    peer.socket.close(1013)


def refuses_to_open(peer: Peer) -> None:
    peer.send("session.created", session={"input_audio_format": {"sample_rate": 16000}, **FORMATS_OUT})
    peer.receive()
    peer.error("session_initialization_failed", "No voice is named Bob.")
    peer.receive()


def shuts_down(peer: Peer) -> None:
    peer.greet()
    peer.socket.close(1001)


def closes_with_a_reason(peer: Peer) -> None:
    peer.greet()
    peer.socket.close(1008, "idle for 120 s")


def vanishes(peer: Peer) -> None:
    peer.greet()
    peer.receive()
    peer.vanish()


def fails_at_once(peer: Peer) -> None:
    peer.greet()
    peer.receive()
    peer.error("inference_error", "The model computed NaN.")
    while peer.receive():
        peer.error("inference_error", "The model has failed.")


FORMATS_OUT = {"output_audio_format": {"sample_rate": 22050}}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (busy, ["busy with another conversation", "--max-sessions"]),
        (busy_without_a_word, ["busy with another conversation"]),
        (refuses_to_open, ["did not open the conversation: No voice is named Bob (session_initialization_failed)."]),
        (shuts_down, ["The server is shutting down."]),
        (closes_with_a_reason, ["closed the connection (code 1008): idle for 120 s."]),
        (vanishes, ["The connection to the server was lost."]),
        (fails_at_once, ["The server says: The model computed NaN (inference_error)."]),
    ],
)
def test_ends_before_a_word_was_spoken(
    command: Command, kept: Path, script: Callable[[Peer], None], words: list[str]
) -> None:
    with standing_in(script) as server:
        line = one_line(command(server.url, "--output-audio", kept))
    for word in words:
        assert word in line
    assert "what was spoken" not in line


@pytest.mark.parametrize(
    "message",
    [
        "hello",
        "[]",
        "[" * 100_000,
        b"\xff\x00",
        "{}",
        '{"type": "error"}',
        '{"type": "session.created"}',
        '{"type": "session.created", "session": {"input_audio_format": {"sample_rate": "fast"}}}',
        '{"type": "session.updated", "session": {}}',
    ],
    ids=lambda message: str(message[:40]),
)
def test_babble_instead_of_a_greeting(command: Command, kept: Path, message: str | bytes) -> None:
    with standing_in(lambda peer: peer.socket.send(message)) as server:
        line = one_line(command(server.url, "--output-audio", kept))
    assert "does not speak this protocol" in line
    assert len(line) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "response.audio.delta", "frame_index": 3, "delta": "????", "audio_codes": []},
        {"type": "response.audio.delta", "frame_index": 3, "delta": "AAA=", "audio_codes": None},
        {"type": "response.audio.delta", "delta": "AAA=", "audio_codes": []},
        {"type": "response.text.delta", "frame_index": 3, "token_id": None, "delta": "x", "text": "x"},
        {"type": "response.done"},
        {"type": "error", "error": "no object"},
    ],
    ids=str,
)
def test_babble_in_the_middle(command: Command, tmp_path: Path, fields: dict[str, Any]) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        peer.answer(3)
        peer.send(**{"kind" if name == "type" else name: value for name, value in fields.items()})
        peer.answer()

    out = tmp_path / "out.wav"
    with standing_in(script) as server:
        code, printed, err = command(server.url, "--output-audio", out)
    assert (code, printed, err.count("\n")) == (1, "[user]\n", 1)
    assert "does not speak this protocol" in err
    assert len(wav(out)) == 3 * 1764


# Ends in the middle: what was spoken is kept


def middle(end: Callable[[Peer], object]) -> Callable[[Peer], None]:
    """A conversation that comes to `end` after four frames and a few words."""

    def script(peer: Peer) -> None:
        peer.greet()
        peer.answer(4)
        peer.text("The capital")
        end(peer)

    return script


def full(peer: Peer) -> None:
    while peer.receive():
        peer.error("inference_error", "The limit of 0.32 s is reached.")


def silent(peer: Peer) -> None:
    while peer.receive(20):
        pass


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (Peer.vanish, "The connection to the server was lost."),
        (lambda peer: peer.socket.close(1001), "The server is shutting down."),
        (lambda peer: peer.socket.close(1008, "slow_consumer"), "closed the connection (code 1008): slow_consumer."),
        (full, "The server says: The limit of 0.32 s is reached (inference_error)."),
        (silent, "has sent nothing for 2 s."),
    ],
    ids=["vanished", "shut down", "slow consumer", "limit", "silent"],
)
@pytest.mark.parametrize("fast", [True, False])
def test_ends_in_the_middle(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Peer], object],
    words: str,
    fast: bool,
) -> None:
    monkeypatch.setattr(client, "SILENT_SECONDS", 2)
    out = tmp_path / "out.wav"
    out.write_bytes(b"of another day")
    with standing_in(middle(end)) as server:
        code, printed, err = command(server.url, "--output-audio", out, fast=fast)
    assert (code, printed) == (1, "The capital\n[user]\n")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert f"The conversation ended after 0.32 s; what was spoken until then is in {out}." in err
    assert wav(out).tolist() == [index for index in range(4) for _ in range(1764)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.wav", "second.wav"]


def test_ends_in_the_middle_with_nothing_to_write(command: Command) -> None:
    with standing_in(middle(Peer.vanish)) as server:
        code, _, err = command(server.url)
    assert code == 1
    assert err.endswith(" The conversation ended after 0.32 s.\n")


def test_a_recording_that_turns_out_damaged(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.wav"
    soundfile.write(path, np.zeros(48000, np.int16), 16000)

    def script(peer: Peer) -> None:
        peer.greet()
        path.write_bytes(path.read_bytes()[:60])
        if peer.answer()["type"] == "session.cancel":
            peer.send("response.cancelled", frame_index=peer.frames)

    from mlx_voicechat.errors import AudioError
    from mlx_voicechat.sound.recordings import AudioReader

    def damaged(self: AudioReader) -> Iterator[np.ndarray]:
        yield np.zeros(16000, np.float32)
        raise AudioError("It is damaged after second 1.")

    monkeypatch.setattr(AudioReader, "__iter__", damaged)
    with standing_in(script) as server:
        code, _, err = command(server.url, "--output-audio", tmp_path / "out.wav", file=path)
    assert (code, err) == (2, "error: It is damaged after second 1.\n")
    assert server.heard[-1] == {"type": "session.cancel"}
    assert not (tmp_path / "out.wav").exists()


# Ctrl-C


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def cancelled(peer: Peer) -> None:
    press()
    while peer.receive()["type"] != "session.cancel":
        pass
    peer.send("response.cancelled", frame_index=peer.frames)


def deaf(peer: Peer) -> None:
    press()
    while peer.receive():
        pass


@pytest.mark.parametrize("end", [cancelled, deaf])
@pytest.mark.parametrize("fast", [True, False])
def test_interrupted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Peer], object], fast: bool
) -> None:
    monkeypatch.setattr(recorded, "FAREWELL_SECONDS", 0.3)
    out, before = tmp_path / "out.wav", signal.getsignal(signal.SIGINT)
    with standing_in(middle(end)) as server:
        code, printed, err = command(server.url, "--output-audio", out, fast=fast)
    assert (code, printed) == (130, "The capital\n[user]\n")
    assert err == "note: interrupted after 0.32 s of the conversation.\n"
    assert len(wav(out)) == 4 * 1764
    assert server.heard[-1] == {"type": "session.cancel"}
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_before_the_first_frame(command: Command, kept: Path) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        peer.receive()
        cancelled(peer)

    with standing_in(script) as server:
        code, printed, err = command(server.url, "--output-audio", kept)
    assert (code, printed, err) == (130, "", "note: interrupted after 0.00 s of the conversation.\n")


# Both commands as processes

EXAMPLES = Path(__file__).parents[1] / "examples"
KEY = "s3cret-Key"


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    env = os.environ | {"MLX_VOICECHAT_API_KEY": KEY}
    with serve_process("-m", "tiny", "--log-level", "debug", env=env) as server:
        yield server


def started(folder: Path, command: str, file: str, *options: object) -> subprocess.Popen[str]:
    """A command of ours on one of the examples, at work."""
    words = [command, "--file" if command == "talk" else "--audio", str(EXAMPLES / file), *map(str, options)]
    return subprocess.Popen(
        [sys.executable, "-m", "mlx_voicechat.cli.main", *words],
        cwd=folder,
        env=os.environ | {"MLX_VOICECHAT_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_the_result_is_that_of_generate(
    served: ServerProcess, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question, options = (
        EXAMPLES / "question.wav",
        ["-p", "Be brief.", "--seed", "7", "--extra-decoding-seconds", "1.23"],
    )
    stream = ["--audio", str(question), "-m", "tiny", "--stream", "--output-audio", str(tmp_path / "generate.wav")]
    assert run(["generate", *stream, *options]) == 0
    printed = capsys.readouterr().out
    assert len(printed) > len("[user] \n")
    result = command(served.ws_url, "--output-audio", tmp_path / "talk.wav", "--api-key", KEY, *options, file=question)
    assert result == (0, printed, "")
    difference = wav(tmp_path / "talk.wav").astype(int) - wav(tmp_path / "generate.wav")
    assert np.abs(difference).max() == 1


def test_ctrl_c_keeps_what_was_spoken(served: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    process = started(tmp_path, "talk", "question.wav", "--url", served.url, "--output-audio", out)
    assert process.stdout
    assert process.stdout.read(6) == "[user]"
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130, err
    assert err.startswith("note: interrupted after ")
    assert err.count("\n") == 1
    assert 0 < len(wav(out)) < 66 * 1764
    assert len(wav(out)) % 1764 == 0


def test_a_busy_server(served: ServerProcess, tmp_path: Path, command: Command) -> None:
    first = started(tmp_path, "talk", "question.wav", "--url", served.url)
    assert first.stdout
    assert first.stdout.read(6) == "[user]"
    assert "busy with another conversation" in one_line(command(served.url, "--api-key", KEY))
    first.terminate()
    assert ended(first)[0] == 128 + signal.SIGTERM


def test_the_key_is_asked_for_and_never_logged(served: ServerProcess, command: Command) -> None:
    assert "asks for an API key" in one_line(command(served.url))
    assert "does not accept this API key" in one_line(command(served.url, "--api-key", "guess"))
    assert KEY not in "".join(served.stderr)
    assert "guess" not in "".join(served.stderr)


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    with serve_process("-m", str(GOLDEN / "tiny-f32")) as server:
        process = started(tmp_path, "talk", "question.wav", "--url", server.url, "--output-audio", out)
        assert process.stdout
        assert process.stdout.read(12)  # tiny-f32 babbles at once: by then some of it was spoken
        server.end(signal.SIGKILL)
        code, _, err = ended(process)
    assert code == 1
    assert err.startswith("error: The connection to the server was lost")
    assert f"what was spoken until then is in {out}." in err
    assert len(wav(out)) % 1764 == 0
