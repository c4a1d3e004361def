"""StrictV3Client of this package: a turn of the client's own, and its one response.

pip install mlx-voicechat
mlx-voicechat serve -m tiny
python strict_v3_client.py [ws://127.0.0.1:8080]
"""

import asyncio
import sys
from pathlib import Path

from mlx_voicechat.client import StrictV3Client, read_pcm16_wav

URL = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8080"
QUESTION = read_pcm16_wav(Path(__file__).parents[1] / "question.wav")


async def main() -> None:
    async with StrictV3Client(URL) as client:
        await client.start_turn()
        await client.stream_pcm(QUESTION)
        await client.commit()
        response = await client.next_response()
        sound = b"".join([chunk async for chunk in response.audio()])
        print(response.text, f"({len(sound) / 44100:.1f} s)")


asyncio.run(main())
