"""OpenAI's own Python library: a question, and the words of the answer.

pip install 'openai[realtime]'
mlx-voicechat serve -m tiny
python openai_python.py [ws://127.0.0.1:8080/v1]
"""

import asyncio
import base64
import sys
import wave
from pathlib import Path

from openai import AsyncOpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8080/v1"
with wave.open(str(Path(__file__).with_name("question_24khz.wav"))) as file:
    QUESTION = file.readframes(file.getnframes())


async def main() -> None:
    client = AsyncOpenAI(api_key="none", websocket_base_url=URL)
    async with client.realtime.connect(model="any") as connection:
        await connection.input_audio_buffer.append(audio=base64.b64encode(QUESTION).decode())
        async for event in connection:
            if event.type == "response.output_audio_transcript.done":
                return print(event.transcript)


asyncio.run(main())
