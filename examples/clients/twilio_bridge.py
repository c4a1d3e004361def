"""A telephone: Twilio's Media Streams on one side, the server in 8 kHz mu-law on the other; nothing is resampled here.

pip install websockets
mlx-voicechat serve -m tiny
python twilio_bridge.py [ws://127.0.0.1:8080/v1/realtime [PORT]]
Twilio reaches it by <Connect><Stream url="wss://YOUR-HOST/"/></Connect>, through a TLS proxy.
"""

import asyncio
import json
import sys

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

URL = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8080/v1/realtime"
PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 8765
PHONE = {"format": {"type": "audio/pcmu"}}
SESSION = {"type": "realtime", "instructions": "Be brief.", "audio": {"input": PHONE, "output": PHONE}}


async def caller(phone: ServerConnection, model: ClientConnection, stream: dict[str, str]) -> None:
    async for message in phone:
        event = json.loads(message)
        if event["event"] == "start":
            stream["streamSid"] = event["start"]["streamSid"]
        elif event["event"] == "media":
            await model.send(json.dumps({"type": "input_audio_buffer.append", "audio": event["media"]["payload"]}))
        elif event["event"] == "stop":
            return


async def assistant(phone: ServerConnection, model: ClientConnection, stream: dict[str, str]) -> None:
    async for message in model:
        event = json.loads(message)
        if event["type"] == "response.output_audio.delta":
            await phone.send(json.dumps({"event": "media", **stream, "media": {"payload": event["delta"]}}))
        elif event["type"] == "input_audio_buffer.speech_started":  # the caller speaks: what waits at Twilio is dropped
            await phone.send(json.dumps({"event": "clear", **stream}))


async def call(phone: ServerConnection) -> None:
    async with connect(f"{URL}?model=any") as model:
        await model.send(json.dumps({"type": "session.update", "session": SESSION}))
        stream: dict[str, str] = {}
        sides = [asyncio.create_task(side(phone, model, stream)) for side in (caller, assistant)]
        await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        for side in sides:
            side.cancel()


async def main() -> None:
    async with serve(call, "127.0.0.1", PORT) as server:
        print(f"listening at ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/", flush=True)
        await server.serve_forever()


asyncio.run(main())
