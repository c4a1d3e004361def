"""`--tool-command PROGRAM`: what it is given, what it may give back, and how it is ended."""

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from mlx_voicechat.cli.tool_command import ToolCommand
from mlx_voicechat.errors import InputError, ToolError


def command(program: str, seconds: float = 10.0) -> ToolCommand:
    return ToolCommand(f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}", seconds)


def call(program: str, seconds: float = 10.0) -> str:
    return command(program, seconds).call("get_weather", {"city": "Paris"}, "call_1")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc").is_dir() else True


def test_it_gets_the_call_and_its_output_is_the_result() -> None:
    read_back = "import sys, json; print('  ' + json.dumps(json.load(sys.stdin)), end='\\n\\n')"
    assert json.loads(call(read_back)) == {"name": "get_weather", "arguments": {"city": "Paris"}, "call_id": "call_1"}


def test_each_call_is_a_run() -> None:
    program = command("import os; print(os.getpid())")
    assert program.call("a", {}, "1") != program.call("a", {}, "2")


def test_it_need_not_read() -> None:
    assert call("print('rain')") == "rain"
    assert call("pass") == ""


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("import sys; sys.exit('no such city\\n')", "failed with exit code 1: no such city."),
        ("import sys; print('half'); sys.exit(7)", "failed with exit code 7."),
        ("import os; os.kill(os.getpid(), 9)", "failed with exit code -9."),
        ("print('x' * 70000)", "printed more than 65,536 bytes."),
        ("while True: print('x' * 1000)", "printed more than 65,536 bytes."),
        ("import sys; sys.stdout.buffer.write(b'ab\\xff')", "printed what is not UTF-8, at byte 2."),
        ("import sys; sys.stderr.write('x' * 10**6 + '\\a the end'); sys.exit(1)", "? the end."),
    ],
)
def test_faults(program: str, fault: str) -> None:
    with pytest.raises(ToolError, match=re.escape(fault)) as raised:
        call(program)
    assert len(str(raised.value)) < 400


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    program = (
        "import os, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(noted)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}');"
        "print('waiting', file=sys.stderr, flush=True);"
        "time.sleep(600)"
    )
    started = time.monotonic()
    with pytest.raises(ToolError, match=re.escape("did not answer within 1.5 s: waiting.")):
        call(program, seconds=1.5)
    assert time.monotonic() - started < 8
    deadline = time.monotonic() + 5
    pids = [int(pid) for pid in noted.read_text().split()]
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_a_child_in_the_background_is_not_waited_for_and_lives_on(tmp_path: Path) -> None:
    noted = tmp_path / "done"
    child = f"import time; time.sleep(5); open({str(noted)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print('playing')"
    started = time.monotonic()
    assert call(program) == "playing"
    assert time.monotonic() - started < 4.5
    deadline = time.monotonic() + 10
    while not noted.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert noted.exists()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "--tool-command is empty."),
        ("'unclosed", "--tool-command is no command line: No closing quotation."),
        ("no-such-program-here --x", "--tool-command: no-such-program-here is no program that can be run."),
        (str(Path(__file__)), f"Make it one with chmod +x {__file__}"),
    ],
)
def test_a_command_that_cannot_be_run_is_bad_use(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=re.escape(fault)):
        ToolCommand(text)
