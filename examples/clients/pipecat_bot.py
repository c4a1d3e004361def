"""Pipecat: a pipeline around its OpenAI realtime service, whose input would be a transport's.

pip install 'pipecat-ai[openai]' websockets
mlx-voicechat serve -m tiny
python pipecat_bot.py [ws://127.0.0.1:8080/v1/realtime]
"""

import asyncio
import sys
import wave
from pathlib import Path

from pipecat.frames.frames import EndFrame, Frame, InputAudioRawFrame, LLMFullResponseEndFrame, TTSTextFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

URL = sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8080/v1/realtime"
with wave.open(str(Path(__file__).with_name("question_24khz.wav"))) as file:
    QUESTION = file.readframes(file.getnframes())


class Printer(FrameProcessor):
    """In place of a transport's output."""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSTextFrame):
            print(frame.text, end="", flush=True)
        if isinstance(frame, LLMFullResponseEndFrame):
            print()
            await worker.queue_frame(EndFrame())
        await self.push_frame(frame, direction)


service = OpenAIRealtimeLLMService(api_key="none", base_url=URL)
worker = PipelineWorker(Pipeline([service, Printer()]), params=PipelineParams(audio_in_sample_rate=24000))


async def main() -> None:
    @worker.event_handler("on_pipeline_started")
    async def speak(worker: PipelineWorker, frame: Frame) -> None:
        for at in range(0, len(QUESTION), 4800):
            piece = InputAudioRawFrame(audio=QUESTION[at : at + 4800], sample_rate=24000, num_channels=1)
            await worker.queue_frame(piece)

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await runner.run()


asyncio.run(main())
