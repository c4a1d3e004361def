"""LiveKit Agents: an agent session with the OpenAI realtime plugin, whose microphone would be a room's.

pip install livekit-plugins-openai
mlx-voicechat serve -m tiny
python livekit_agent.py [ws://127.0.0.1:8080/v1/realtime]
"""

import asyncio
import sys
import wave
from pathlib import Path

from livekit import rtc
from livekit.agents import Agent, AgentSession, ConversationItemAddedEvent
from livekit.agents.utils import http_context
from livekit.agents.voice import io
from livekit.plugins.openai.realtime import RealtimeModel

URL = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8080/v1/realtime"
with wave.open(str(Path(__file__).with_name("question_24khz.wav"))) as file:
    QUESTION = file.readframes(file.getnframes())


class Recording(io.AudioInput):
    """In place of a room's microphone: the recording in pieces of 100 ms, then silence."""

    at = 0

    async def __anext__(self) -> rtc.AudioFrame:
        await asyncio.sleep(0.1)
        piece = QUESTION[self.at : self.at + 4800].ljust(4800, b"\0")
        self.at += 4800
        return rtc.AudioFrame(data=piece, sample_rate=24000, num_channels=1, samples_per_channel=2400)


async def main() -> None:
    answered = asyncio.Event()
    async with http_context.open():
        session = AgentSession(llm=RealtimeModel(model="any", base_url=URL, api_key="none"))

        @session.on("conversation_item_added")
        def said(event: ConversationItemAddedEvent) -> None:
            if event.item.type == "message":
                print(f"{event.item.role}: {event.item.text_content}")
                if event.item.role == "assistant":
                    answered.set()

        session.input.audio = Recording(label="recording")
        await session.start(Agent(instructions="Be brief."))
        await answered.wait()
        await session.aclose()


asyncio.run(main())
