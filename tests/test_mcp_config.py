"""`--mcp` and `--mcp-config`: the usual form, and faults that show no secret."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_voicechat.cli.mcp_config import Address, ServerEntry, read_config, servers_of
from mlx_voicechat.cli.mcp_process import Program
from mlx_voicechat.errors import InputError

SECRET = "s3cret-value"


def written(folder: Path, content: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_usual_form(tmp_path: Path) -> None:
    servers = {
        "clock": {"command": sys.executable, "args": ["-m", "clock"], "env": {"TOKEN": SECRET}, "cwd": str(tmp_path)},
        "bare": {"command": sys.executable, "type": "stdio", "alwaysAllow": ["x"], "timeout": 60},
        "far": {"type": "http", "url": "https://example.org/mcp", "headers": {"Authorization": f"Bearer {SECRET}"}},
        "near": {"url": "http://127.0.0.1:8000/mcp"},
        "off": {"command": "no-such-program-here", "disabled": True},
    }
    entries = read_config(written(tmp_path, {"mcpServers": servers, "theme": "dark"}))
    assert entries == [
        ServerEntry("clock", Program([sys.executable, "-m", "clock"], {"TOKEN": SECRET}, str(tmp_path))),
        ServerEntry("bare", Program([sys.executable])),
        ServerEntry("far", Address("https://example.org/mcp", {"Authorization": f"Bearer {SECRET}"})),
        ServerEntry("near", Address("http://127.0.0.1:8000/mcp")),
    ]
    assert SECRET not in repr(entries)


def test_commands_are_called_by_their_program_and_script(tmp_path: Path) -> None:
    path = written(tmp_path, {"mcpServers": {"cat": {"command": "cat"}}})
    commands = [f"{sys.executable} /a/b/server.py --key {SECRET}", "cat", "cat --token x", f"cat /x/{'y' * 99}"]
    names = [entry.name for entry in servers_of(commands, path)]
    python = Path(sys.executable).name
    assert names == [f"{python} server.py", "cat", "cat (2)", f"cat {'y' * 56}", "cat (3)"]
    with pytest.raises(InputError, match=r"--mcp: no-such-program-here is no program that can be run\."):
        servers_of(["no-such-program-here"], None)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ([], "has no object mcpServers."),
        ({"servers": {}}, "has no object mcpServers."),
        ({"mcpServers": {}}, "names no server that is not disabled."),
        ({"mcpServers": {"a": 3}}, "server 'a' is no object."),
        ({"mcpServers": {"a": {}}}, "server 'a' needs either a command or a url."),
        ({"mcpServers": {"a": {"command": "cat", "url": "http://x"}}}, "needs either a command or a url."),
        ({"mcpServers": {"a": {"command": 3}}}, "has a command that is no text."),
        ({"mcpServers": {"a": {"command": "no-such-program-here"}}}, "server 'a': no-such-program-here is no program"),
        ({"mcpServers": {"a": {"command": "cat", "args": "-u"}}}, "has args that are no list of texts."),
        ({"mcpServers": {"a": {"command": "cat", "env": [SECRET]}}}, "has env that is no object."),
        ({"mcpServers": {"a": {"command": "cat", "env": {"N": 1234567}}}}, "has env whose 'N' is no text."),
        ({"mcpServers": {"a": {"command": "cat", "cwd": "/no/folder"}}}, "has a cwd that is no folder."),
        ({"mcpServers": {"a": {"command": "cat", "type": "http"}}}, "has a type other than stdio."),
        ({"mcpServers": {"a": {"url": f"ftp://{SECRET}"}}}, "has a url that is no http or https address."),
        ({"mcpServers": {"a": {"url": 3}}}, "has a url that is no http or https address."),
        ({"mcpServers": {"a": {"url": "http://x", "type": "sse"}}}, "has a type other than http or streamable-http"),
        ({"mcpServers": {"a": {"url": "http://x", "headers": {"K": [SECRET]}}}}, "has headers whose 'K' is no text."),
    ],
)
def test_faults_name_the_server(content: Any, fault: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InputError, match=re.escape(fault)) as raised:
        read_config(path)
    assert str(raised.value).startswith(f"--mcp-config {path}")
    assert SECRET not in str(raised.value)
    assert "1234567" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--mcp-config .*none\.json cannot be read: No such file"):
        read_config(tmp_path / "none.json")
