"""`generate`: what it prints, what it writes, what it refuses, and how it ends early."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_voicechat
from mlx_voicechat import AudioFrame, Event, FunctionDelta, TextDelta, TranscriptDelta, TurnOpened
from mlx_voicechat.cli.main import run
from mlx_voicechat.cli.offline import cut, silence
from mlx_voicechat.cli.render import LiveText, Output
from tests.support.fake_model import SCRIPT, FakeModel

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTION = EXAMPLES / "question.wav"
SECOND_FRAMES = 13  # 1 s is 12.5 frames
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    model = FakeModel()
    monkeypatch.setattr(mlx_voicechat, "load", model.load, raising=False)
    monkeypatch.delenv("MLX_VOICECHAT_MODEL", raising=False)
    return model


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A recording of one second."""
    path = tmp_path / "second.wav"
    soundfile.write(path, 0.5 * np.sin(np.arange(16000) * 0.1), 16000)
    return path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], second: Path) -> Command:
    """`generate` on the one-second recording with no silence after it -> exit code, stdout, stderr."""

    def call(*options: object, audio: object = second, extra: object = 0) -> tuple[int, str, str]:
        arguments = ["generate", "--audio", audio, "--extra-decoding-seconds", extra, *options]
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def wav(path: Path) -> tuple[np.ndarray, int, str]:
    info = soundfile.info(path)
    return soundfile.read(path, dtype="float32")[0], info.samplerate, info.subtype


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What it prints and writes


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_text_and_speech(command: Command, fake: FakeModel, tmp_path: Path, stream: list[str]) -> None:
    out = tmp_path / "out.wav"
    code, printed, err = command(*stream, "--output-audio", out)
    assert (code, printed, err) == (0, "[user] Hello there.\nGood day.\n", "")
    samples, rate_hz, subtype = wav(out)
    assert (len(samples), rate_hz, subtype) == (SECOND_FRAMES * 1764, 22050, "PCM_16")
    np.testing.assert_allclose(samples[::1764], np.arange(SECOND_FRAMES) / 1000, atol=2**-15)


def test_offline_feeds_blocks_and_stream_feeds_frames(command: Command, fake: FakeModel) -> None:
    command(extra=60)
    command("--stream", extra=60)
    blocks, frames = (session.blocks for session in fake.sessions)
    assert blocks == [512 * 1280, 61 * 16000 - 512 * 1280]
    assert frames == [1280] * 762 + [640]


def test_silence_follows_the_recording(command: Command, fake: FakeModel) -> None:
    command("--json", extra=3.0)
    assert sum(fake.sessions[0].blocks) == 4 * 16000
    assert fake.sessions[0].frames == 50


def test_function_channel(command: Command, fake: FakeModel) -> None:
    fake.script = {1: ("user", "What time?"), 8: ("function", "<call>"), 9: ("function", "x")}
    expected = "[user] What time?\n[function] <call>x\n"
    assert command()[1] == expected
    assert command("--stream")[1] == expected


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_nothing_heard_and_nothing_said(command: Command, fake: FakeModel, stream: list[str]) -> None:
    fake.script = {}
    assert command(*stream)[:2] == (0, "[user]\n")


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_every_turn_has_a_line(command: Command, fake: FakeModel, stream: list[str]) -> None:
    fake.script = {0: ("assistant", "Other side."), 4: ("user", "Stop."), 10: ("assistant", "It stopped.")}
    assert command(*stream)[:2] == (0, "Other side.\n[user] Stop.\nIt stopped.\n")
    assert json.loads(command(*stream, "--json")[1])["text"] == "Other side.It stopped."


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_json_is_one_object(command: Command, fake: FakeModel, stream: list[str]) -> None:
    fake.script = {0: ("user", "héllo"), 1: ("function", "f")}
    code, printed, _ = command(*stream, "--json", "--seed", 5)
    assert code == 0
    assert printed.count("\n") == 1
    assert json.loads(printed) == {
        "transcript": "héllo",
        "text": "",
        "function": "f",
        "frames": SECOND_FRAMES,
        "seconds": 1.04,
        "seed": 5,
        "model": "fake",
        "turns": [{"speaker": "user", "text": "héllo", "start": 0.0, "end": 0.08}],
    }


def test_options_reach_the_session(command: Command, fake: FakeModel) -> None:
    command("-p", "Be brief.", "--seed", 2**40, "--voice", "Aria", "--guidance-scale", 0.5)
    command("--system-prompt", "", "--stream", "--max-streaming-seconds", 9, "--profile")
    empty: dict[str, Any] = {"seed": 0, "max_seconds": None, "voice": None, "guidance_scale": None, "profile": False}
    empty["turn_events"] = True
    given_first = {"system_prompt": "Be brief.", "seed": 2**40, "voice": "Aria", "guidance_scale": 0.5}
    assert fake.opened[0] == empty | given_first
    assert fake.opened[1] == empty | {"system_prompt": "", "max_seconds": 9.0, "profile": True}


def test_compiling_is_decided_by_the_length_of_the_job(command: Command, fake: FakeModel) -> None:
    for options, extra, expected in (
        ([], 0, None),
        ([], 200, True),
        (["--no-compile"], 200, False),
        (["--compile"], 0, True),
    ):
        assert command(*options, extra=extra)[0] == 0
        assert fake.load_options[-1]["compile"] is expected


def test_how_speech_weights_are_held(command: Command, fake: FakeModel) -> None:
    for options, expected in (([], None), (["--speech-weights", "q8"], "q8")):
        assert command(*options)[0] == 0
        assert fake.load_options[-1]["speech_weights"] == expected


def test_which_model(command: Command, fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    command()
    monkeypatch.setenv("MLX_VOICECHAT_MODEL", "from/the-environment")
    command()
    command("-m", "named")
    assert fake.loaded == ["mlx-community/NemotronLabs-VoiceChat-11B-4bit", "from/the-environment", "named"]


def test_both_sides(command: Command, fake: FakeModel, second: Path, tmp_path: Path) -> None:
    offline, streamed = tmp_path / "offline.wav", tmp_path / "streamed.wav"
    assert command("--both-sides", offline, extra=2)[0] == 0
    assert command("--both-sides", streamed, "--stream", extra=2)[0] == 0
    assert offline.read_bytes() == streamed.read_bytes()
    samples, rate_hz, subtype = wav(offline)
    assert (samples.shape, rate_hz, subtype) == ((38 * 1764, 2), 22050, "PCM_16")
    np.testing.assert_allclose(samples[::1764, 1], np.arange(38) / 1000, atol=2**-15)
    heard = np.concatenate([wav(second)[0], np.zeros(2 * 16000, np.float32)])
    whole = soxr.resample(heard, 16000, 22050)
    np.testing.assert_allclose(samples[: len(whole), 0], whole, atol=2**-15)
    assert not samples[len(whole) :, 0].any()


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_events(command: Command, fake: FakeModel, tmp_path: Path, stream: list[str]) -> None:
    path = tmp_path / "events.jsonl"
    assert command(*stream, "--events", path)[0] == 0
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    walls = [line.pop("wall_seconds") for line in lines]
    assert walls == sorted(walls)
    assert lines[2:4] == [
        {"event": "transcript_delta", "time_seconds": 0.16, "frame_index": 2, "delta": "Hello", "text": "Hello"},
        {"event": "audio_frame", "time_seconds": 0.16, "frame_index": 2, "codes": [2] * 31},
    ]
    assert lines[-1] == {"event": "done", "time_seconds": 1.04, "frame_index": SECOND_FRAMES}
    assert len(lines) == SECOND_FRAMES + 4 + 1


def test_replaced_files_keep_their_permissions(command: Command, fake: FakeModel, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("events.jsonl", "profile.json")]
    for path in paths:
        path.touch(0o600)
        path.chmod(0o640)
    assert command("--stream", "--events", paths[0], "--profile-json", paths[1])[0] == 0
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o640, 0o640]


def test_a_folder_that_takes_no_file(refused: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def deny(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", deny)
    err = refused("--events", tmp_path / "events.jsonl")[2]
    assert str(tmp_path / "events.jsonl") in err
    assert ".part" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("option", ["--events", "--profile-json"])
def test_a_full_disk_names_the_file(command: Command, fake: FakeModel, option: str) -> None:
    code, _, err = command("--stream", option, "/dev/full")
    assert (code, err) == (1, "error: Cannot write /dev/full: No space left on device.\n")


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_speech_that_cannot_be_written_takes_no_words_with_it(
    command: Command, fake: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: list[str]
) -> None:
    wanted = command(*stream)[1]
    assert wanted

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wave.Wave_write, "writeframesraw", full)
    out = tmp_path / "out.wav"
    before = list(tmp_path.iterdir())
    code, printed, err = command(*stream, "--output-audio", out)
    assert (code, printed) == (1, wanted)
    assert err.splitlines()[-1] == f"error: Cannot write {out}: No space left on device."
    assert list(tmp_path.iterdir()) == before


def test_a_recording_that_cancels_itself_gets_a_hint(
    command: Command, fake: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script = {}
    noise = np.random.default_rng(0).normal(0, 0.1, 16000).astype(np.float32)
    soundfile.write(tmp_path / "x.wav", np.stack([noise, -noise], axis=1), 16000)
    code, _, err = command("--audio", tmp_path / "x.wav")
    assert code == 0
    assert "cancel each other out when mixed" in err


def test_events_into_a_pipe(command: Command, fake: FakeModel) -> None:
    reader, writer = os.pipe()
    assert command("--events", f"/dev/fd/{writer}")[0] == 0
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        assert len(pipe.readlines()) == SECOND_FRAMES + 5


def test_profile(command: Command, fake: FakeModel, tmp_path: Path) -> None:
    code, _, err = command("--stream", "--profile")
    assert (code, json.loads(err)) == (0, {"frames": SECOND_FRAMES})
    path = tmp_path / "profile.json"
    assert command("--stream", "--profile-json", path) == (0, "[user] Hello there.\nGood day.\n", "")
    assert json.loads(path.read_text()) == {"frames": SECOND_FRAMES}


def test_notes(command: Command, fake: FakeModel, tmp_path: Path) -> None:
    assert "-n is ignored" in command("-n", 100)[2]
    fake.speaking = True
    _, printed, err = command(extra=1.5)
    assert printed == "[user] Hello there.\nGood day.\n"
    assert err.count("\n") == 1
    assert "--extra-decoding-seconds (now 1.5)" in err
    fake.speaking, fake.script = False, {2: ("user", "Hello")}
    _, printed, err = command()
    assert printed == "[user] Hello\n"
    assert err.count("\n") == 1
    assert "did not answer" in err
    assert "--extra-decoding-seconds (now 0)" in err
    fake.script = SCRIPT
    fake.config.demonstration = "a toy that knows eighteen questions"
    err = command()[2]
    assert err.count("\n") == 1
    assert "a demonstration, a toy that knows eighteen questions" in err
    assert "NemotronLabs-VoiceChat-11B-4bit" in err


def test_progress_bar_on_a_terminal_only(command: Command, fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        assert command()[0] == 0
    assert "13/13" in screen.getvalue()
    assert re.search(r"real-time factor \d", screen.getvalue())
    assert command()[2] == ""


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    program = (
        "import os, sys; import mlx_voicechat; from tests.support.fake_model import FakeModel;"
        "mlx_voicechat.load = FakeModel().load; from mlx_voicechat.cli.main import main; sys.stdin.read(); main()"
    )
    out = tmp_path / "out.wav"
    audio = str(EXAMPLES / "hello.wav")
    child = subprocess.Popen(
        [sys.executable, "-c", program, "generate", "--audio", audio, "--stream", "--output-audio", str(out)],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    child.stdout.close()
    child.stdin.close()
    with child.stderr:
        assert (child.stderr.read(), child.wait(60)) == (b"", 0)
    assert len(wav(out)[0]) == 52 * 1764


def test_memory_is_flat_in_length(command: Command, fake: FakeModel, tmp_path: Path) -> None:
    def peak(seconds: int) -> int:
        path = tmp_path / "long.wav"
        soundfile.write(path, np.zeros(seconds * 16000, np.int16), 16000)
        outputs = ["--output-audio", tmp_path / "a.wav", "--both-sides", tmp_path / "b.wav"]
        tracemalloc.start()
        assert command(*outputs, audio=path)[0] == 0
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(45)
    assert peak(270) < 1.2 * peak(90)


# The pieces


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 40))
def test_cut(lengths: list[int], block: int) -> None:
    whole = np.arange(sum(lengths), dtype=np.float32)
    blocks = list(cut(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else [], block))
    np.testing.assert_array_equal(np.concatenate([whole[:0], *blocks]), whole)
    assert all(len(part) == block for part in blocks[:-1])
    assert all(len(part) for part in blocks)


def test_silence() -> None:
    assert [len(piece) for piece in silence(2500, 1000)] == [1000, 1000, 500]
    assert list(silence(0)) == []


def live(events: list[Event], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What stands on the screen after every event, and at the end."""
    text, shown, screens = LiveText(Output().write), "", []
    for event in events:
        text.take(event)
        shown += capsys.readouterr().out
        screens.append(shown)
    text.close()
    return [*screens, shown + capsys.readouterr().out]


def quiet(first: int, last: int) -> list[Event]:
    return [AudioFrame(index, np.zeros(0, np.float32), ()) for index in range(first, last)]


def test_live_text_comes_as_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    events = [TranscriptDelta(0, "Hi", "Hi"), TranscriptDelta(1, " you.", "Hi you."), TextDelta(2, 5, "", "")]
    assert live(events, capsys) == ["[user] Hi", "[user] Hi you.", "[user] Hi you.", "[user] Hi you.\n"]


def test_live_text_gives_every_turn_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        *[TextDelta(0, 5, "Hello.", "Hello."), *quiet(0, 9)],
        *[TranscriptDelta(9, "Stop.", "Stop."), *quiet(9, 18)],
        *[TextDelta(18, 5, " Why", "Hello. Why"), TextDelta(19, 6, "?", "Hello. Why?")],
        *[FunctionDelta(20, 5, "<call>", "<call>"), *quiet(20, 26)],
    ]
    assert live(events, capsys)[-1] == "Hello.\n[user] Stop.\nWhy?\n[function] <call>\n"


def test_live_text_does_not_cut_words_when_both_speak(capsys: pytest.CaptureFixture[str]) -> None:
    events = [TextDelta(0, 5, "The joke", ""), TranscriptDelta(1, "St", "St"), TextDelta(2, 6, " ends.", "")]
    events += [TranscriptDelta(3, "op.", "Stop."), *quiet(3, 6)]
    held = live(events, capsys)
    assert held[-2] == "The joke ends."
    assert held[-1] == "The joke ends.\n[user] Stop.\n"
    assert live([*events, *quiet(6, 8)], capsys)[-2] == "The joke ends.\n[user] Stop."


def test_live_text_gives_answers_in_a_row_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    told = [TurnOpened(0, ""), TextDelta(1, 5, "It is", ""), TurnOpened(2, ""), TextDelta(3, 5, " so", "")]
    assert live(told, capsys)[-1] == "It is\nso\n[user]\n"
    over = [TranscriptDelta(0, "Well", "Well"), *told, TranscriptDelta(4, ".", "Well."), *quiet(4, 12)]
    assert live(over, capsys)[-1] == "[user] Well.\nIt is\nso\n"
    glued = [TextDelta(0, 5, "On.", "On."), TextDelta(20, 5, "Blue", ""), TextDelta(21, 5, ".", ""), *quiet(21, 23)]
    assert live(glued, capsys)[-1] == "On.\nBlue.\n[user]\n"


@pytest.mark.parametrize(
    "deltas", [((0, "The U."), (1, "S.")), ((0, "One."), (9, " Two.")), ((0, "Three"), (9, "fold."))]
)
def test_live_text_leaves_a_turn_whole(capsys: pytest.CaptureFixture[str], deltas: tuple[tuple[int, str], ...]) -> None:
    events: list[Event] = [TextDelta(index, 5, delta, "") for index, delta in deltas]
    assert live(events, capsys)[-1] == "".join(delta for _, delta in deltas) + "\n[user]\n"


# What it refuses


@pytest.fixture
def refused(command: Command, fake: FakeModel, tmp_path: Path) -> Command:
    """A call that must end with one line and exit code 2, load no model and leave the output as it was."""
    out = tmp_path / "kept.wav"
    out.write_bytes(b"as it was")

    def call(*options: object, **more: Any) -> tuple[int, str, str]:
        before = listing(tmp_path)
        code, printed, err = command("--output-audio", out, *options, **more)
        assert (code, printed) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert fake.loaded == []
        assert out.read_bytes() == b"as it was"
        assert listing(tmp_path) == before
        return code, printed, err

    return call


@pytest.mark.parametrize(
    "options",
    [
        ["--image", "cat.png"],
        ["--video", "cat.mp4"],
        ["--profile"],
        ["--profile-json", "profile.json"],
        ["--max-streaming-seconds", 5],
        ["--max-streaming-seconds", 0, "--stream"],
        ["--max-streaming-seconds", "nan", "--stream"],
        ["--max-streaming-seconds", "inf", "--stream"],
        ["--max-streaming-seconds", "1e308", "--stream"],
        ["--extra-decoding-seconds", -0.1],
        ["--extra-decoding-seconds", 600.1],
        ["--extra-decoding-seconds", "nan"],
        ["--extra-decoding-seconds", "long"],
        ["--seed", -1],
        ["--seed", 1.5],
        ["--guidance-scale", -1],
        ["--guidance-scale", "nan"],
        ["--max-seconds", 0],
        ["--events", "no/such/folder/events.jsonl"],
        ["--events", "/dev/null/events.jsonl"],
        ["--events", "/"],
        ["--events", "-"],
        ["--events", "x" * 300],
    ],
    ids=lambda options: " ".join(map(str, options))[:40],
)
def test_bad_options(refused: Command, options: list[object]) -> None:
    assert str(options[0]).removesuffix("-json") in refused(*options)[2]


@pytest.mark.parametrize("path", ["no/such/folder/sides.wav", "/dev/null", "/"])
def test_bad_places_for_sound(refused: Command, path: str) -> None:
    assert path.rpartition("/")[0] in refused("--both-sides", path)[2]


def test_one_file_for_two_things(refused: Command, tmp_path: Path, second: Path) -> None:
    (tmp_path / "link.wav").symlink_to(tmp_path / "kept.wav")
    (tmp_path / "same.wav").symlink_to(second)
    assert "--output-audio" in refused("--both-sides", tmp_path / "link.wav")[2]
    assert "--audio" in refused("--both-sides", tmp_path / "same.wav")[2]


def text_file(path: Path) -> None:
    path.write_text("no sound at all\n" * 50)


def without_samples(path: Path) -> None:
    soundfile.write(path, np.zeros(0, np.float32), 16000)


def with_nan(path: Path) -> None:
    soundfile.write(path, np.where(np.arange(16000) == 8000, np.nan, 0.0), 16000, subtype="FLOAT")


def voice_memo(path: Path) -> None:
    path.write_bytes(b"\0\0\0\x20ftypM4A " + bytes(2000))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "directory"),
        (lambda path: path.touch(), "empty"),
        (lambda path: path.write_bytes(QUESTION.read_bytes()[:30]), "Cannot read"),
        (without_samples, "no samples"),
        (text_file, "text file"),
        (with_nan, "0.500"),
        (voice_memo, "MPEG-4"),
    ],
    ids=["missing", "directory", "empty", "cut in the header", "no samples", "text", "NaN", "m4a"],
)
def test_bad_recordings(
    refused: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], word: str
) -> None:
    monkeypatch.setenv("PATH", "")  # no converter
    path = tmp_path / "bad.wav"
    make(path)
    assert word in refused(audio=path)[2]


def test_a_recording_nobody_may_read(refused: Command, second: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    second.chmod(0)
    assert "permission" in refused()[2]


def test_a_recording_over_the_limit(refused: Command, command: Command, fake: FakeModel) -> None:
    assert "limit of 0.9 seconds" in refused("--max-seconds", 0.9)[2]
    assert command("--max-seconds", 1)[0] == 0


# How it ends early


def test_streaming_limit(command: Command, fake: FakeModel, tmp_path: Path) -> None:
    out, events = tmp_path / "out.wav", tmp_path / "events.jsonl"
    code, printed, err = command("--stream", "--max-streaming-seconds", 0.5, "--output-audio", out, "--events", events)
    assert (code, printed) == (1, "[user] Hello there.\n")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "0.5 s (--max-streaming-seconds)" in err
    assert len(wav(out)[0]) == 6 * 1764
    names = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    assert names[-2:] == ["limit_reached", "done"]


def test_streaming_limit_that_is_just_enough(command: Command, fake: FakeModel) -> None:
    assert command("--stream", "--max-streaming-seconds", 1)[0] == 0


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_interrupted(command: Command, fake: FakeModel, tmp_path: Path, stream: list[str]) -> None:
    fake.before = lambda index: signal.raise_signal(signal.SIGINT) if index == 3 else None
    out, sides = tmp_path / "out.wav", tmp_path / "sides.wav"
    code, printed, err = command(*stream, "--output-audio", out, "--both-sides", sides, extra=60)
    assert (code, printed) == (130, "[user] Hello there.\n")
    assert err == "note: interrupted after 0.32 s of the conversation.\n"
    assert len(wav(out)[0]) == 4 * 1764
    assert wav(sides)[0].shape == (4 * 1764, 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupted_twice_or_before_the_first_frame(command: Command, fake: FakeModel, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    out.write_bytes(b"as it was")

    def press_twice(index: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    fake.before = press_twice
    assert command("--output-audio", out)[0] == 130
    fake.load = lambda *_, **__: signal.raise_signal(signal.SIGINT)  # type: ignore[assignment, misc]
    mlx_voicechat.load = fake.load  # type: ignore[attr-defined]
    assert command("--output-audio", out) == (130, "", "")
    assert out.read_bytes() == b"as it was"
    assert listing(tmp_path) == ["out.wav", "second.wav"]


def test_limit_before_the_first_frame(command: Command, fake: FakeModel, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    assert command("--stream", "--max-streaming-seconds", 0.05, "--output-audio", out)[0] == 1
    assert not out.exists()


def test_a_failure_midway_writes_nothing(command: Command, fake: FakeModel, tmp_path: Path) -> None:
    def fail(index: int) -> None:
        if index == 5:
            raise RuntimeError("out of memory")

    fake.before = fail
    names = ("out.wav", "sides.wav", "events.jsonl", "profile.json")
    for name in names:
        (tmp_path / name).write_bytes(b"as it was")
    options = zip(("--output-audio", "--both-sides", "--events", "--profile-json"), names, strict=True)
    code, printed, err = command("--stream", *(word for option, name in options for word in (option, tmp_path / name)))
    assert (code, printed) == (1, "[user] Hello there.\n")
    assert err.startswith("error: Unexpected RuntimeError: out of memory.")
    assert err.count("\n") == 1
    assert all((tmp_path / name).read_bytes() == b"as it was" for name in names)
    assert listing(tmp_path) == sorted([*names, "second.wav"])


# The whole path: the installed command and a model that talks


def installed(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mlx_voicechat.cli.main", "generate", "-m", "tiny", *map(str, arguments)]


def test_question_is_answered_offline_and_streamed(tmp_path: Path) -> None:
    for name, options in ("offline", []), ("streamed", ["--stream", "--profile-json", "profile.json"]):
        call = installed("--audio", QUESTION, "--output-audio", f"{name}.wav", "--both-sides", f"{name}-both.wav")
        done = subprocess.run([*call, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "[user] What is the capital of France?\nThe capital of France is Paris.\n"
        assert done.stderr.count("\n") == 1
        assert "eighteen questions" in done.stderr
    for kind in (".wav", "-both.wav"):
        assert (tmp_path / f"offline{kind}").read_bytes() == (tmp_path / f"streamed{kind}").read_bytes()
    samples, rate_hz, subtype = wav(tmp_path / "offline.wav")
    assert (rate_hz, subtype, len(samples)) == (22050, "PCM_16", 66 * 1764)
    assert np.abs(samples).max() > 0.05
    assert json.loads((tmp_path / "profile.json").read_text())["realtime_factor"] > 0


def test_ctrl_c_keeps_what_was_spoken(tmp_path: Path) -> None:
    child = subprocess.Popen(
        installed("--audio", EXAMPLES / "long.wav", "--stream", "--output-audio", "out.wav"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout
    assert child.stdout.read(6) == b"[user]"  # it is at work
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert b"Traceback" not in err
    samples, rate_hz, _ = wav(tmp_path / "out.wav")
    assert rate_hz == 22050
    assert len(samples) % 1764 == 0
    assert 0 < len(samples) < 1000 * 1764
    assert listing(tmp_path) == ["out.wav"]
