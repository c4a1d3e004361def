"""Spoken questions that need a tool, through the commands and a server, on the talking checkpoint."""

import base64
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import soxr

from mlx_voicechat.cli import tool_sources
from mlx_voicechat.cli.main import run
from mlx_voicechat.sound.pcm import pcm16
from mlx_voicechat.tools import Tool
from tests.support.caller import Caller, append, calling
from tests.support.openai_caller import talking
from tests.support.server import running_server, serve_process

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TIME, WEATHER = EXAMPLES / "what_time_is_it.wav", EXAMPLES / "what_is_the_weather_in_paris_f4.wav"
CAPITAL = EXAMPLES / "what_is_the_capital_of_france.wav"
MCP = shlex.join([sys.executable, str(EXAMPLES / "mcp_server.py")])
CALLED = '[call] get_weather(city="Paris")\n[result] {"city": "Paris", "weather": "sunny"}\n'
ANSWERED = f"[user] What is the weather in Paris?\n{CALLED}It is sunny in Paris.\n"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "get_time", "description": "Returns the current time."}]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command line -> exit code, stdout, stderr."""
    for name in ("MLX_VOICECHAT_API_KEY", "MLX_VOICECHAT_MODEL"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: object) -> tuple[int, str, str]:
        return run([str(word) for word in words]), *capsys.readouterr()

    return call


@pytest.fixture
def time_tool(tmp_path: Path) -> Callable[[str], list[object]]:
    """The options for a tool get_time that is this Python program."""

    def options(program: str) -> list[object]:
        tools, script = tmp_path / "tools.json", tmp_path / "program.py"
        tools.write_text(json.dumps(TOOLS), encoding="utf-8")
        script.write_text(textwrap.dedent(program), encoding="utf-8")
        return ["--tools", tools, "--tool-command", shlex.join([sys.executable, str(script)])]

    return options


def bad(mode: str) -> str:
    return shlex.join([sys.executable, str(ROOT / "tests" / "support" / "bad_mcp_server.py"), mode])


# Commands


def test_generate_with_the_example_server(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the extra tools is not installed")
    generate = ["generate", "-m", "tiny", "--audio", WEATHER, "--mcp", MCP]
    code, printed, err = command(*generate)
    assert (code, printed) == (0, ANSWERED), err
    assert err.startswith("note: tools: get_time, get_weather.\n")
    events, speech = tmp_path / "events.jsonl", tmp_path / "speech.wav"
    code, printed, _ = command(*generate, "--stream", "--json", "--events", events, "--output-audio", speech)
    result = json.loads(printed)
    (call,) = result["calls"]
    assert re.fullmatch("call_[0-9a-f]{24}", call.pop("call_id"))
    weather = '{"city": "Paris", "weather": "sunny"}'
    assert call == {"name": "get_weather", "arguments": {"city": "Paris"}, "result": weather}
    assert result["text"] == "It is sunny in Paris."
    lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    kinds = [line["event"] for line in lines]
    assert kinds.index("function_call") < kinds.index("function_applied") < kinds.index("text_delta")
    assert np.abs(sf.read(speech)[0]).max() > 0.05


def test_no_tool_no_call(command: Command) -> None:
    code, printed, _ = command("generate", "-m", "tiny", "--audio", WEATHER, "--json")
    assert code == 0
    assert "calls" not in json.loads(printed)
    assert json.loads(printed)["text"] == "I cannot look that up."


def test_a_program_of_ones_own(command: Command, time_tool: Callable[[str], list[object]]) -> None:
    program = """
        import json, sys
        call = json.load(sys.stdin)
        assert call["name"] == "get_time" and call["arguments"] == {} and call["call_id"].startswith("call_")
        print(json.dumps({"time": "ten past four"}))
        """
    code, printed, err = command("generate", "-m", "tiny", "--audio", TIME, *time_tool(program))
    result = '[call] get_time()\n[result] {"time": "ten past four"}\n'
    assert (code, printed) == (0, f"[user] What time is it?\n{result}It is ten past four.\n"), err


def test_a_program_that_fails(command: Command, time_tool: Callable[[str], list[object]]) -> None:
    code, printed, _ = command(
        "generate", "-m", "tiny", "--audio", TIME, *time_tool("import sys; sys.exit('no battery')")
    )
    assert code == 0
    lines = printed.splitlines()
    assert lines[0] == "[user] What time is it?"
    assert lines[-1] == "Sorry, that did not work."
    assert any(line.startswith('[result] {"error": "') and "no battery" in line for line in lines), lines


@pytest.mark.parametrize("mode", ["dies_in_a_call", "hangs_in_a_call", "floods_in_a_call", "image"])
def test_a_server_that_goes_wrong(command: Command, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="the extra tools is not installed")
    from mlx_voicechat.cli.mcp_servers import McpServers

    call = McpServers.call
    monkeypatch.setattr(tool_sources.McpServers, "call", lambda *words: call(*words, seconds=2.0))
    code, printed, err = command("talk", "--fast", "-m", "tiny", "--file", TIME, "--mcp", bad(mode))
    assert code == 0, err
    lines = printed.splitlines()
    assert lines[0] == "[user] What time is it?"
    assert lines[-1] == "Sorry, that did not work."
    assert any(line.startswith('[result] {"error": "') for line in lines), lines
    told = [line for line in err.splitlines() if "its tools cannot be called" in line]
    assert len(told) == (mode in ("dies_in_a_call", "floods_in_a_call"))


def test_talk_here_and_with_a_server(command: Command) -> None:
    pytest.importorskip("mcp", reason="the extra tools is not installed")
    talk = ["talk", "--file", WEATHER]
    assert command(*talk, "--fast", "-m", "tiny", "--mcp", MCP)[:2] == (0, ANSWERED)
    with serve_process("--model", "tiny", "--mcp", MCP) as server:
        code, printed, err = command(*talk, "--url", server.ws_url)
        assert (code, printed) == (0, ANSWERED), err
        assert server.end() == 143
    assert any("tools: get_time, get_weather." in line for line in server.stderr)
    message = "error: --mcp is for a model that runs here, and does not go with --url.\n"
    assert command(*talk, "--url", "ws://127.0.0.1:1", "--mcp", MCP) == (2, "", message)


@pytest.mark.parametrize("words", [["generate", "--audio"], ["talk", "--file"]])
def test_bad_use_is_said_before_anything_is_loaded(command: Command, words: list[str]) -> None:
    use = [*words, TIME, "-m", "tiny"]
    assert command(*use, "--tools", "x.json") == (2, "", "error: --tools works only together with --tool-command.\n")
    code, printed, err = command(*use, "--tools", "x.json", "--tool-command", "cat")
    assert (code, printed, err) == (2, "", "error: --tools x.json cannot be read: No such file or directory.\n")
    code, _, err = command(*use, "--mcp", "no-such-program-here")
    assert (code, err) == (
        2,
        "error: --mcp: no-such-program-here is no program that can be run. Write its whole path, or install it.\n",
    )


# The wire


def samples(path: Path, seconds: float = 0.0) -> np.ndarray:
    """A recording and silence after it, int16, in whole frames of 80 ms."""
    speech = sf.read(path, dtype="int16")[0]
    frames = -(-(len(speech) + round(16000 * seconds)) // 1280)
    return np.pad(speech, (0, 1280 * frames - len(speech)))


def frames_of(caller: Caller) -> list[int]:
    return [event["frame_index"] for event in caller.events if event["type"] == "response.audio.delta"]


def told(caller: Caller, kind: str) -> list[dict[str, Any]]:
    return [event for event in caller.events if event["type"] == kind]


def text_of(caller: Caller) -> str:
    return told(caller, "response.text.delta")[-1]["text"]


def weather(city: str) -> dict[str, str]:
    return {"city": city, "weather": "raining"}


WEATHER_TOOL = Tool("get_weather", "Returns the weather of a city.", CITY, weather)


def test_only_clients_that_ask_are_told_of_tools() -> None:
    with running_server("tiny", tools=(WEATHER_TOOL,), wait_for_tools=True) as server:
        said = []
        for session in ({}, {"extensions": False}, {"extensions": True}):
            with calling(server.ws_url) as caller:
                caller.until("session.created")
                caller.send({"type": "session.update", "session": session})
                (updated,) = caller.until("session.updated")
                assert updated["session"].get("tools") == (["get_weather"] if session.get("extensions") else None)
                caller.send(append(samples(WEATHER, 4)))
                caller.send({"type": "input_audio_buffer.commit"})
                caller.until("response.done")
                assert text_of(caller) == "It is raining in Paris."
                said.append([event for event in caller.events if event["type"].startswith("tool.")])
                others = [e for e in caller.events if not e["type"].startswith(("tool.", "session."))]
                said.append(others)
    plain, others, *rest = said
    assert plain == rest[0] == []
    assert others == rest[1] == rest[3]
    call, result = rest[2]
    call_id, frame = call["call_id"], call["frame_index"]
    assert re.fullmatch("call_[0-9a-f]{24}", call_id)
    assert call == {
        "type": "tool.call",
        "frame_index": frame,
        "call_id": call_id,
        "name": "get_weather",
        "arguments": {"city": "Paris"},
    }
    assert result == {
        "type": "tool.result",
        "frame_index": result["frame_index"],
        "call_id": call_id,
        "result": '{"city": "Paris", "weather": "raining"}',
    }


def test_turns_of_ones_own() -> None:
    with running_server("tiny", tools=(WEATHER_TOOL,), wait_for_tools=True) as server, calling(server.ws_url) as caller:
        caller.until("session.created")
        session = {"extensions": True, "turns": "application"}
        caller.send({"type": "session.update", "session": session})
        caller.until("session.updated")
        heard = 0

        def say(audio: np.ndarray) -> None:
            nonlocal heard
            heard += len(audio) // 1280
            caller.send(append(audio))
            while len(frames_of(caller)) < heard:
                caller.receive()

        say(np.zeros(12800, np.int16))
        say(samples(CAPITAL, 2))  # nobody's turn: it is not answered
        assert told(caller, "response.text.delta") == []
        for path, answer in ((CAPITAL, "The capital of France is Paris."), (WEATHER, "It is raining in Paris.")):
            before = len(told(caller, "response.text.delta"))
            caller.send({"type": "turn.begin"})
            caller.until("response.interrupted")
            assert caller.events[-1]["frame_index"] == heard
            say(samples(path, 0.3))
            assert len(told(caller, "response.text.delta")) == before
            caller.send({"type": "turn.end"})
            say(np.zeros(4 * 16000, np.int16))
            assert text_of(caller).endswith(answer)
        assert len(told(caller, "tool.call")) == len(told(caller, "tool.result")) == 1
        # Begun while it speaks
        caller.send({"type": "turn.begin"})
        say(samples(CAPITAL, 0.3))
        caller.send({"type": "turn.end"})
        say(np.zeros(12 * 1280, np.int16))
        caller.send({"type": "turn.begin"})
        say(samples(WEATHER, 0.3))
        caller.send({"type": "turn.end"})
        say(np.zeros(4 * 16000, np.int16))
        assert text_of(caller).endswith("It is raining in Paris.")
        caller.send({"type": "input_audio_buffer.commit"})
        caller.until("response.done")
        assert frames_of(caller) == list(range(len(frames_of(caller))))  # one for each that was heard
        assert heard <= len(frames_of(caller)) <= heard + 1
        assert caller.events[-1]["frame_index"] == len(frames_of(caller))


def test_clients_of_other_dialects_are_offered_them_too() -> None:
    speech = sf.read(WEATHER, dtype="float32")[0]
    pcm = pcm16(soxr.resample(np.pad(speech, (0, 5 * 16000)), 16000, 24000)).tobytes()
    with running_server("tiny", tools=(WEATHER_TOOL,)) as server, talking(server.ws_url) as talker:
        for at in range(0, len(pcm), 9600):
            piece = base64.b64encode(pcm[at : at + 9600]).decode()
            talker.send({"type": "input_audio_buffer.append", "audio": piece})
        texts: list[str] = []
        while not texts:
            talker.receive(60)
            texts = [e["transcript"] for e in talker.events if e["type"] == "response.output_audio_transcript.done"]
    assert texts == ["It is raining in Paris."]
    assert not any("function_call" in json.dumps(event) for event in talker.events)


def test_messages_and_options_that_do_not_go_together() -> None:
    with running_server("tiny") as server, calling(server.ws_url) as caller:
        caller.until("session.created")
        for session, fault in (
            ({"extensions": 1}, "session.extensions must be true or false, not 1."),
            ({"extensions": True, "turns": "mine"}, 'session.turns must be model or application, not "mine".'),
            ({"turns": "application"}, "session.turns works only with session.extensions true."),
        ):
            caller.send({"type": "session.update", "session": session})
            (error,) = caller.until("error")
            assert error["error"]["code"] == "session_initialization_failed"
            assert error["error"]["message"] == fault
        caller.send({"type": "turn.begin"})
        assert caller.until("error")[-1]["error"]["message"] == "Send session.update before audio."
        caller.send({"type": "session.update", "session": {"extensions": True}})
        (updated,) = caller.until("session.updated")
        assert updated["session"]["tools"] == []
        for kind in ("turn.begin", "turn.end"):
            caller.send({"type": kind, "event_id": "mine"})
            error = caller.until("error")[-1]["error"]
            assert error["message"] == f'{kind} needs a session.update with "turns": "application".'
            assert error["event_id"] == "mine"
