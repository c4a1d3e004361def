"""`talk` with a microphone, on a stand-in for the sound library: what is said and kept, and the words of trouble."""

import base64
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from mlx_voicechat.cli import live
from mlx_voicechat.cli.live import smaller_checkpoint
from mlx_voicechat.cli.main import run
from tests.support.scripted_server import Peer, standing_in
from tests.support.server import RunningServer, running_server
from tests.support.sound import Sound, device, install

QUESTION = Path(__file__).parents[1] / "examples" / "question.wav"
LOUD = np.full(1764, 16000, "<i2")
NOISE = np.full(48000 * 60, 0.1, np.float32)
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`talk` without the echo canceller's package -> exit code, stdout, stderr."""
    monkeypatch.setitem(sys.modules, "livekit", None)
    monkeypatch.delenv("MLX_VOICECHAT_API_KEY", raising=False)
    monkeypatch.delenv("MLX_VOICECHAT_MODEL", raising=False)

    def call(*options: object) -> tuple[int, str, str]:
        return run(["talk", *map(str, options)]), *capsys.readouterr()

    return call


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> Sound:
    """A microphone that hears something; what is pulled out is not waited for long."""
    monkeypatch.setattr(live, "RETURN_SECONDS", 0.2)
    return install(monkeypatch, hears=NOISE)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def hear(peer: Peer, frames: int = 1 << 30, speech: np.ndarray | None = None) -> bool:
    """Answer every 80 ms with a frame, for `frames` frames or to the commit: then True."""
    held = getattr(peer, "held", 0)
    while frames:
        message = peer.receive()
        if message["type"] != "input_audio_buffer.append":
            return True
        held += len(base64.b64decode(message["audio"])) // 2
        while held >= 1280 and frames:
            held -= 1280
            frames -= 1
            peer.audio(speech)
    return False


def whole(peer: Peer) -> None:
    peer.greet()
    hear(peer)
    peer.finish()


def sent(peer: Peer | None) -> np.ndarray:
    """What the microphone said, as the server heard it."""
    assert peer is not None
    appends = [message["audio"] for message in peer.heard if "audio" in message]
    return np.frombuffer(b"".join(map(base64.b64decode, appends)), "<i2")


def trouble(result: tuple[int, str, str], code: int) -> str:
    """The error's line."""
    assert result[0] == code, result
    *_, line = result[2].splitlines()
    assert line.startswith("error: ")
    return line


# With a model


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    with running_server("tiny") as server:
        yield server


def question(rate_hz: int) -> np.ndarray:
    import soxr

    return soxr.resample(soundfile.read(QUESTION, dtype="float32")[0], 16000, rate_hz)


def test_what_is_said_is_heard_as_a_recording_is(
    command: Command, served: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "file.wav", tmp_path / "live.wav"
    url = ["--url", served.ws_url, "--seed", 5]
    code, printed, _ = command("--file", QUESTION, "--fast", *url, "--output-audio", a, "--extra-decoding-seconds", 2)
    assert (code, printed) == (0, "[user] What is the capital of France?\nThe capital of France is Paris.\n")
    devices = [device(0, "Mic", inputs=1, rate_hz=16000), device(1, "Out", outputs=2, rate_hz=22050)]
    sound = install(monkeypatch, devices=devices, hears=question(16000), speed=3)
    seconds = soundfile.info(QUESTION).duration + 2
    assert command("--duration", seconds, *url, "--output-audio", b)[:2] == (0, printed)
    np.testing.assert_array_equal(soundfile.read(a, dtype="int16")[0], soundfile.read(b, dtype="int16")[0])
    assert [stream.rate_hz for stream in sound.streams] == [22050, 16000]
    # Through the devices' own rates, too.
    sound = install(monkeypatch, hears=question(48000), speed=3)
    assert command("--duration", seconds, *url)[:2] == (0, printed)
    assert {stream.rate_hz for stream in sound.streams} == {48000}
    assert np.abs(sound.played).max() > 0.05


def test_a_model_in_the_same_process(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    interval = sys.getswitchinterval()
    code, printed, err = command("--file", QUESTION, "--fast", "-m", "tiny")
    assert (code, printed) == (0, "[user] What is the capital of France?\nThe capital of France is Paris.\n")
    assert err.startswith("note: tiny is a demonstration")
    install(monkeypatch, hears=NOISE)
    code, _, err = command("--duration", 1, "-m", "tiny")
    assert code == 0
    assert "Built-in Microphone listens, Built-in Output speaks; Ctrl-C ends." in err
    assert sys.getswitchinterval() == interval


def test_a_model_that_cannot_be_loaded(command: Command, tmp_path: Path) -> None:
    result = command("--file", QUESTION, "-m", tmp_path)
    assert result[1] == ""
    assert str(tmp_path) in trouble(result, 2)


def test_ctrl_c_while_the_model_loads(tmp_path: Path) -> None:
    program = (
        "import sys, time, mlx_voicechat; from mlx_voicechat.cli.main import main;"
        "mlx_voicechat.load = lambda *_, **__: (print('loading', flush=True), time.sleep(60)); main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "talk", "-m", "tiny", "--file", str(QUESTION), "--output-audio", "out.wav"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "note: ended while the model was at work.\n")
    assert list(tmp_path.iterdir()) == []


# What is sent and played


def test_a_conversation(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        hear(peer, 4, LOUD)
        peer.text("Hello.")
        hear(peer, speech=LOUD)
        peer.finish()

    sound = install(monkeypatch, hears=NOISE, speed=4)
    with standing_in(script) as server:
        code, printed, err = command("--url", server.url, "--duration", 2, "-p", "Be brief.", "--seed", 3)
    assert (code, printed) == (0, "Hello.\n[user]\n")
    first, second, *_ = err.splitlines()
    assert first == (
        "note: no echo cancellation without the package livekit (pip install livekit); "
        "use headphones: through loudspeakers the model hears itself."
    )
    assert second == "note: Built-in Microphone listens, Built-in Output speaks; Ctrl-C ends."
    assert server.heard[0]["session"] == {"system_prompt": "Be brief.", "seed": 3, "extensions": True}
    assert server.heard[-1]["type"] == "input_audio_buffer.commit"
    heard = sent(server.peer)
    assert len(heard) == 2 * 16000
    assert np.abs(heard[1000:-1000] - 0.1 * 32768).max() < 40
    assert (np.abs(sound.played - 16000 / 32767) < 0.02).sum() > 0.95 * 25 * 0.08 * 48000  # all 25 frames


def test_push_to_talk(command: Command, noisy: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    person, terminal = pty.openpty()
    keys = os.fdopen(person, "wb", buffering=0)

    def script(peer: Peer) -> None:
        peer.greet()
        hear(peer, 10, LOUD)
        for key in (b" ", b"\r"):
            keys.write(key)
            assert hear(peer)
            if peer.heard[-1]["type"] == "turn.begin":
                peer.send("response.interrupted", frame_index=peer.frames)
            hear(peer, 10)
        assert hear(peer)
        peer.finish()

    noisy.speed = 1
    with keys, os.fdopen(terminal) as stdin, standing_in(script) as server:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, _, err = command("--url", server.url, "--duration", 3.5, "--push-to-talk")
    assert code == 0
    assert (
        "note: push to talk: the space bar or Enter begins what you say, and ends it; else nothing is heard.\n" in err
    )
    assert err.count("note: you are heard; press again when you have finished.\n") == 1
    assert server.heard[0]["session"] == {"seed": 0, "extensions": True, "turns": "application"}
    kinds = [message["type"] for message in server.heard]
    begun, ended = kinds.index("turn.begin"), kinds.index("turn.end")
    assert kinds.count("turn.begin") == kinds.count("turn.end") == 1
    assert begun < ended
    heard = [any(base64.b64decode(message.get("audio", ""))) for message in server.heard]
    assert any(heard[begun:ended])
    assert not any(heard[:begun])
    assert not any(heard[ended:])


def test_push_to_talk_without_a_terminal(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch)
    (tmp_path / "stdin").touch()
    with (tmp_path / "stdin").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        result = command("--push-to-talk")
    assert trouble(result, 2).startswith("error: --push-to-talk needs a terminal")
    line = trouble(command("--push-to-talk", "--file", QUESTION), 2)
    assert line == "error: --push-to-talk is for the microphone, and does not go with --file."


def test_half_duplex(command: Command, noisy: Sound) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        hear(peer, 5, np.zeros(1764, "<i2"))
        hear(peer, 10, LOUD)
        hear(peer, speech=np.zeros(1764, "<i2"))
        peer.finish()

    noisy.speed = 1
    with standing_in(script) as server:
        code, _, err = command("--url", server.url, "--duration", 3, "--half-duplex")
    assert code == 0
    assert "note: half duplex: while the assistant speaks the microphone is off, and interrupting it is, too.\n" in err
    heard = np.abs(sent(server.peer)) > 1000
    assert heard[: 4 * 1280].all()
    assert 0.7 * 16000 < (~heard).sum() < 2.4 * 16000
    assert heard[-1000:].all()


def test_an_interruption_empties_what_waits(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        for _ in range(50):
            peer.audio(LOUD)
        time.sleep(0.3)
        peer.send("response.interrupted", frame_index=peer.frames)
        hear(peer, speech=np.zeros(1764, "<i2"))
        peer.finish()

    sound = install(monkeypatch, hears=NOISE, speed=1)
    with standing_in(script) as server:
        assert command("--url", server.url, "--duration", 1)[0] == 0
    assert 0.1 * 48000 < (sound.played > 0.4).sum() < 2.5 * 48000  # of four seconds


# Ctrl-C


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c(command: Command, noisy: Sound, tmp_path: Path, presses: int) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        hear(peer, 10, LOUD)
        press()
        while peer.receive()["type"] != "input_audio_buffer.commit":
            pass
        if presses == 2:
            press()
            peer.receive()
        for _ in range(5):
            peer.audio(LOUD)
        peer.finish()

    out, before = tmp_path / "out.wav", signal.getsignal(signal.SIGINT)
    noisy.speed = 3
    with standing_in(script) as server:
        code, _, err = command("--url", server.url, "--output-audio", out)
    frames = 15 if presses == 1 else 10
    assert code == 130
    assert "note: the microphone is closed; what is left is played. Ctrl-C again ends at once.\n" in err
    assert err.endswith(f"note: interrupted after {frames * 0.08:.2f} s of the conversation.\n")
    assert len(soundfile.read(out)[0]) == frames * 1764
    if presses == 1:
        assert (noisy.played > 0.4).sum() > 0.95 * frames * 0.08 * 48000
    assert signal.getsignal(signal.SIGINT) is before
    assert not any(stream.active for stream in noisy.streams)


def test_ctrl_c_before_the_first_frame_leaves_files_alone(command: Command, noisy: Sound, tmp_path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        peer.receive()
        press()
        time.sleep(0.1)
        press()
        while peer.receive():
            pass

    out = tmp_path / "out.wav"
    out.write_bytes(b"as it was")
    with standing_in(script) as server:
        assert command("--url", server.url, "--output-audio", out)[0] == 130
    assert out.read_bytes() == b"as it was"


# What can be wrong with the sound


@pytest.mark.parametrize(
    ("level", "platform", "words"),
    [
        (0, "darwin", "System Settings > Privacy & Security > Microphone"),
        (0, "linux", "nothing but zeros: is it muted"),
        (1e-4, "darwin", "is silent: is its level turned down"),
        (0.01, "darwin", ""),
    ],
)
def test_a_silent_microphone(
    command: Command, monkeypatch: pytest.MonkeyPatch, level: float, platform: str, words: str
) -> None:
    install(monkeypatch, hears=np.full(200_000, level, np.float32))
    monkeypatch.setattr(live, "sys", SimpleNamespace(platform=platform))  # of this module: imports ask, too
    with standing_in(whole) as server:
        code, _, err = command("--url", server.url, "--duration", 1.5)
    assert code == 0, err
    told = [
        line for line in err.splitlines() if line.startswith("note: Built-in Microphone ") and "listens" not in line
    ]
    assert len(told) == bool(words)
    assert all(words in line for line in told)


def test_underruns_are_counted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        for _ in range(3):
            for _ in range(5):
                peer.audio(LOUD)
            time.sleep(0.4)
        hear(peer)
        peer.finish()

    install(monkeypatch, hears=NOISE, speed=2, flags={"output_underflow": True, "input_overflow": True})
    with standing_in(script) as server:
        code, _, err = command("--url", server.url, "--duration", 2.5)
    assert code == 0
    dry = re.search(r"playback ran dry (\d+) times: answers came late", err)
    assert dry
    assert int(dry[1]) >= 3
    for name in ("loudspeaker", "microphone"):
        assert re.search(rf"this program was \d+ times too late for the {name}\.", err)


def test_a_model_that_falls_behind(command: Command, noisy: Sound) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        for seconds in (0.3, 1.0, 1.3, 4.0, 5.0):
            peer.send("session.lagging", backlog_seconds=seconds)
        hear(peer)
        peer.finish()

    noisy.speed = 1
    with standing_in(script) as server:
        code, _, err = command("--url", server.url, "--duration", 1)
    assert code == 0
    lines = [line for line in err.splitlines() if "behind" in line]
    assert len(lines) == 3
    assert re.match(
        r"note: the model is 1\.\d s behind: answers come that much later\. Close other programs, ", lines[0]
    )
    assert re.match(r"note: the model is 4\.\d s behind: answers come that much later\.$", lines[1])
    assert re.match(r"note: the model was up to 5\.\d s behind\.", lines[2])


def test_which_checkpoint_is_smaller() -> None:
    name = "mlx-community/NemotronLabs-VoiceChat-11B-"
    assert smaller_checkpoint("NemotronLabs-VoiceChat-11B-bf16", True).endswith(f"--model {name}4bit or {name}8bit.")
    assert smaller_checkpoint("NemotronLabs-VoiceChat-11B-8bit", False).endswith(f"a server of {name}4bit.")
    assert "4bit is the smallest" in smaller_checkpoint(f"{name}4bit", True)
    assert "use a smaller checkpoint" in smaller_checkpoint("mine", True)


def test_a_microphone_that_is_unplugged(command: Command, noisy: Sound, tmp_path: Path) -> None:
    noisy.unplugged_after = 1.0
    out = tmp_path / "out.wav"
    with standing_in(whole) as server:
        line = trouble(command("--url", server.url, "--output-audio", out), 1)
    assert line.startswith("error: The microphone Built-in Microphone has stopped. The conversation ended after ")
    assert f"what was spoken until then is in {out}. Was it unplugged, or taken by another?" in line
    assert 10 * 1764 <= len(soundfile.read(out)[0]) <= 13 * 1764


def test_a_loudspeaker_that_does_not_play(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(live, "STALLED_SECONDS", 0.2)
    monkeypatch.setattr(live.Playback, "fill", lambda *_: None)
    install(monkeypatch, hears=NOISE)
    with standing_in(whole) as server:
        assert command("--url", server.url, "--duration", 1, "--output-audio", tmp_path / "out.wav")[0] == 0
    assert len(soundfile.read(tmp_path / "out.wav")[0]) == 12 * 1764


def test_a_server_that_vanishes(command: Command, noisy: Sound, tmp_path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.greet()
        hear(peer, 4, LOUD)
        peer.vanish()

    out = tmp_path / "out.wav"
    with standing_in(script) as server:
        line = trouble(command("--url", server.url, "--output-audio", out), 1)
    assert "The connection to the server was lost. The conversation ended after 0.32 s" in line
    assert len(soundfile.read(out)[0]) == 4 * 1764
    assert not any(stream.active for stream in noisy.streams)


# Devices

SEVERAL = [
    device(0, "MacBook Pro Microphone", inputs=1),
    device(1, "MacBook Pro Speakers", outputs=2, rate_hz=44100),
    device(2, "USB Headset", inputs=1, outputs=2, rate_hz=16000),
    device(3, "USB Headset 2", inputs=2, outputs=2),
]


def test_devices_are_listed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, devices=SEVERAL)
    assert command("--list-devices") == (
        0,
        "  0  MacBook Pro Microphone: 1 input (default), 48000 Hz\n"
        "  1  MacBook Pro Speakers: 2 output (default), 44100 Hz\n"
        "  2  USB Headset: 1 input, 2 output, 16000 Hz\n"
        "  3  USB Headset 2: 2 input, 2 output, 48000 Hz\n",
        "",
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], ("MacBook Pro Microphone", "MacBook Pro Speakers")),
        (["--input-device", "2", "--output-device", 3], ("USB Headset", "USB Headset 2")),
        (["--input-device", "usb headset", "--output-device", "headset 2"], ("USB Headset", "USB Headset 2")),
    ],
)
def test_devices_are_chosen(
    command: Command, monkeypatch: pytest.MonkeyPatch, options: list[object], names: tuple[str, str]
) -> None:
    install(monkeypatch, devices=SEVERAL, hears=NOISE)
    with standing_in(whole) as server:
        code, _, err = command("--url", server.url, "--duration", 0.2, *options)
    assert code == 0
    assert f"note: {names[0]} listens, {names[1]} speaks; Ctrl-C ends.\n" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input-device", "headset"], "More than one input device is named 'headset'."),
        (["--input-device", "9"], "There is no input device '9'."),
        (["--input-device", "Speakers"], "There is no input device 'Speakers'."),
        (["--output-device", ""], "More than one output device is named ''."),
    ],
)
def test_unknown_and_ambiguous_devices(
    command: Command, monkeypatch: pytest.MonkeyPatch, options: list[object], words: str
) -> None:
    install(monkeypatch, devices=SEVERAL)
    line = trouble(command("--url", "ws://127.0.0.1:1", *options), 2)
    assert line.startswith(f"error: {words} The ")
    assert "2 USB Headset; 3 USB Headset 2" in line


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ({"devices": []}, 1, "This machine has no input device: no microphone."),
        ({"devices": SEVERAL[:1]}, 1, "This machine has no output device: no loudspeaker."),
        ({"default_devices": (-1, 1)}, 1, "No input device is the default. Name one with --input-device: 0 Built-in"),
        ({"takes": lambda *_: False}, 1, "The microphone Built-in Microphone cannot be used: Invalid sample rate."),
    ],
)
def test_devices_that_cannot_be_had(
    command: Command, monkeypatch: pytest.MonkeyPatch, how: dict[str, object], code: int, words: str
) -> None:
    install(monkeypatch, **how)
    assert words in trouble(command("-m", "/nowhere"), code)


def test_a_device_in_use(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, opening="Device unavailable")
    out = tmp_path / "out.wav"
    with standing_in(whole) as server:
        line = trouble(command("--url", server.url, "--output-audio", out), 1)
    assert "The loudspeaker Built-in Output cannot be opened: Device unavailable. Is it in use, or unplugged?" in line
    assert not out.exists()


def test_a_rate_that_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [device(0, "Mic", inputs=2), device(1, "Out", outputs=2)]
    sound = install(
        monkeypatch, devices=devices, hears=NOISE, takes=lambda rate_hz, channels: (rate_hz, channels) == (44100, 2)
    )
    with standing_in(whole) as server:
        assert command("--url", server.url, "--duration", 1)[0] == 0
    assert [(stream.rate_hz, stream.channels) for stream in sound.streams] == [(44100, 2)] * 2
    assert len(sent(server.peer)) == 16000


def test_no_devices_at_all(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, devices=[])
    assert command("--list-devices") == (1, "", "error: This machine has no audio devices.\n")


def test_without_the_library(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    for options in ([], ["--list-devices"]):
        line = trouble(command(*options), 2)
        assert line == "error: The microphone needs the package sounddevice. pip install 'mlx-voicechat[talk]'"


def test_without_the_library_of_the_system(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')\n")
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert trouble(command(), 2) == "error: sounddevice does not find PortAudio. apt install libportaudio2"


# Options that do not go together


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fast"], "--fast works only with --file."),
        (["--extra-decoding-seconds", 1], "--extra-decoding-seconds works only with --file."),
        (["--file", QUESTION, "--duration", 3], "--duration is for the microphone, and does not go with --file."),
        (["--file", QUESTION, "--half-duplex"], "--half-duplex is for the microphone"),
        (["--url", "ws://127.0.0.1:1", "-m", "tiny"], "--model is for a model that runs here"),
        (["--duration", 0], "--duration"),
    ],
)
def test_options_that_do_not_go_together(command: Command, options: list[object], words: str) -> None:
    assert words in trouble(command(*options), 2)
