"""A Model Context Protocol server that goes wrong as its first argument says. Plain JSON lines, no package."""

import json
import os
import sys
import time

MODE = sys.argv[1]
NAMES = {
    "sixty": [f"tool_{number}" for number in range(60)],
    "names": ["a.b/c", "a_b_c", "a-b-c", "9 lives", "ünïcode", "x" * 200],
}.get(MODE, ["get_time"])


def send(**message: object) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def flood() -> None:
    while True:
        print("x" * 100, flush=True)


def endless_line() -> None:
    while True:
        sys.stdout.write("x" * 65536)


def called(identity: object, name: str, arguments: object) -> None:
    if MODE == "dies_in_a_call":
        print("Traceback\n  KeyError: no key s3cret-value here", file=sys.stderr, flush=True)
        os._exit(3)
    if MODE == "hangs_in_a_call":
        time.sleep(600)
    if MODE == "floods_in_a_call":
        flood()
    if MODE == "endless_line":
        endless_line()
    content: object = [{"type": "text", "text": json.dumps([name, arguments, os.environ.get("TOKEN"), MODE])}]
    if MODE == "image":
        content = [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]
    if MODE == "not_a_result":
        content = "four o'clock"
    if MODE == "long":
        content = [{"type": "text", "text": "It is four. " * 2000}]
    send(id=identity, result={"content": content, "isError": MODE == "says_no"})


def listed(identity: object, cursor: object) -> None:
    if MODE == "dies_when_listing":
        sys.exit("the licence has expired")
    if MODE == "hangs_when_listing":
        time.sleep(600)
    tools = [{"name": name, "description": f"Of {name}.", "inputSchema": {"type": "object"}} for name in NAMES]
    more = {"nextCursor": "again"} if MODE == "endless_list" else {}
    send(id=identity, result={"tools": tools, **more})
    if MODE == "dies_when_idle":
        os._exit(4)


for line in sys.stdin:
    message = json.loads(line)
    method, identity, params = message.get("method"), message.get("id"), message.get("params", {})
    if method == "initialize":
        information = {"name": MODE, "version": "1"}
        version = params["protocolVersion"]
        send(id=identity, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": information})
    elif method == "tools/list":
        listed(identity, params.get("cursor"))
    elif method == "tools/call":
        print("a line that is no message", flush=True)
        called(identity, params["name"], params.get("arguments"))
    elif identity is not None:
        send(id=identity, error={"code": -32601, "message": "Method not found"})
