"""DuplexClient of this package: a question, and the answer as text and sound.

pip install mlx-voicechat
mlx-voicechat serve -m tiny
python duplex_client.py [ws://127.0.0.1:8080]
"""

import asyncio
import sys
from pathlib import Path

from mlx_voicechat.client import DuplexClient, SessionConfig, read_pcm16_wav

URL = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8080"
QUESTION = read_pcm16_wav(Path(__file__).parents[1] / "question.wav")


async def main() -> None:
    async with DuplexClient(URL, config=SessionConfig(instructions="Be brief.")) as client:
        await client.stream_pcm(QUESTION)
        await client.commit()
        async for response in client.responses():
            if response.decision == "listen":
                continue
            sound = b"".join([chunk async for chunk in response.audio()])
            return print(response.transcript, f"({len(sound) / 48000:.1f} s)")


asyncio.run(main())
