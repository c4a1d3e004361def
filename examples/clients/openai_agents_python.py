"""OpenAI's Agents SDK for Python: an agent with a tool, asked for the weather in Paris.

pip install openai-agents
mlx-voicechat serve -m tiny
python openai_agents_python.py [ws://127.0.0.1:8080/v1/realtime]
"""

import asyncio
import sys
import wave
from pathlib import Path

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner

URL = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8080/v1/realtime"
with wave.open(str(Path(__file__).with_name("weather_24khz.wav"))) as file:
    QUESTION = file.readframes(file.getnframes())
set_tracing_disabled(True)  # traces go to the cloud otherwise


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    print(f"get_weather({city!r})")
    return '{"weather": "sunny"}'


async def main() -> None:
    runner = RealtimeRunner(RealtimeAgent(name="assistant", instructions="Be brief.", tools=[get_weather]))
    async with await runner.run(model_config={"url": f"{URL}?model=any", "api_key": "none"}) as session:
        await session.send_audio(QUESTION)
        async for event in session:
            if event.type == "raw_model_event" and event.data.type == "transcript_delta":
                print(event.data.delta, end="", flush=True)
            if event.type == "audio_end":
                return print()


asyncio.run(main())
