"""A session in OpenAI's Realtime vocabulary, without its socket: the engine's events in, server events out.

The wire's session: it has a place at the engine from the connection on, and the model's session when it is known what
that is to be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mlx_voicechat.events import (
    Cancelled,
    Done,
    FunctionApplied,
    FunctionCall,
    FunctionDelta,
    FunctionFailed,
    OnHold,
    SettleTimeout,
    TextDelta,
    TranscriptDelta,
    TurnClosed,
    TurnOpened,
)
from mlx_voicechat.sound.pcm import Samples

from . import messages
from .connection import FAILED, NORMAL
from .detector import Activity
from .engine import Engine, Slot
from .items import Items, new_id
from .openai_config import SERVER_VAD, SessionConfig
from .openai_events import ServerEvent, error_fields, server_event
from .openai_input import Ear, Recent, Utterances
from .openai_prompt import Prompt
from .openai_responses import Response
from .settings import ServerSettings
from .typed_voice import TypedVoice
from .wire_audio import Decoder, WireFormat

RESULT_SECONDS = 1.0  # for response.create to come after a call's result; then the model gets it all the same
PATIENCE_FRAMES = 15  # for the model to open its turn by itself where a response was asked for after speech


class OpenAISession:
    """See above. `send` gets the server events, `close` the closing code after the last."""

    vendor = False

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        voice: TypedVoice | None,
        beta: bool,
        send: Callable[[ServerEvent], None],
        close: Callable[[int], None],
    ) -> None:
        self.id = new_id("sess")
        self.conversation_id = new_id("conv")
        self.engine, self.settings, self.voice, self.beta = engine, settings, voice, beta
        self.loop = asyncio.get_running_loop()
        self.config = self._first_config()
        self.items = Items()
        self.ear = Ear(self._hear, self._activity)
        self.prompt = Prompt(self.put, self._updated, self.items, settings, self._under_way)
        self.prompt.first(self.config)
        self.utterances = Utterances(self.emit, self.items, beta, self._unanswered)
        self.response: Response | None = None
        self.calls: dict[str, str | None] = {}  # open calls and the results that wait to be given
        self.answer_due = False  # results are given, and the answer's turn has not opened
        self.turn_due = False  # a turn was asked for, and has not opened
        self.wanted: dict[str, Any] | None = None  # the metadata of the response that was asked for
        self.asked = False  # whether the open response was asked for
        self.typed: list[str] = []  # text that was typed, and waits for a response
        self.uncommitted_ms = self.input_ms = 0.0
        self.last_response_id: str | None = None
        self.ended = False
        self._send, self._close = send, close
        self._decoder: Decoder | None = None
        self._recent = Recent()
        self._slot: Slot | None = None
        self._typing = False  # what the model hears now was typed
        self._dropping = False  # the agent's turn was interrupted, and has not ended
        self._delta_sent = False
        self._heard_frames = 0
        self._result_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def _first_config(self) -> SessionConfig:
        turn = {**SERVER_VAD, "create_response": True, "interrupt_response": True}
        form = WireFormat("audio/pcm", 24_000)
        return SessionConfig(self.settings.model_id, form, form, turn_detection=turn)

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Take a place at the engine; False where there is none."""
        self._slot = self.engine.take_slot(self.deliver)
        if self._slot is None:
            return False
        self._task = self.loop.create_task(self.ear.run())
        self._task.add_done_callback(self._ear_ended)
        self.ear.configure(self.config.turn_detection)
        return True

    def greet(self) -> None:
        """Tell that the session is there."""
        self.emit("session.created", session=self.session_object())

    def end(self) -> None:
        """Nobody is there any more."""
        self.ended = True
        self.prompt.stop()
        if self._result_timer is not None:
            self._result_timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._slot is not None:
            self._slot.release()
            self._slot = None

    def _ear_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.loop.call_exception_handler({"message": "An ear failed.", "exception": task.exception()})
            self.fail("internal_error", "The server failed.")

    def fail(self, code: str, message: str, closing: int = FAILED) -> None:
        """End the session with an error."""
        if self.response is not None:
            self.response.end("failed", code)
        self.error(code, message)
        self._close(closing)
        self.end()

    def is_new(self, message: dict[str, Any]) -> bool:
        """Whether a message was not taken before; only what is resumed can be sent again."""
        return True

    # -- what others see -----------------------------------------------------------------------------------------

    @property
    def waiting_seconds(self) -> float:
        """Audio that the model has not heard."""
        waiting = 0.0 if self._slot is None else self._slot.waiting_seconds
        return waiting + self.ear.waiting_samples / self.engine.config.input_rate_hz

    @property
    def _idle(self) -> bool:
        """Whether no response is under way."""
        return not self.at_work and not self.calls

    @property
    def at_work(self) -> bool:
        """Whether the client waits for the server."""
        return self.response is not None or self.turn_due or self.answer_due

    def frames_left(self, count: int) -> None:
        """So many frames of speech were sent."""
        for _ in range(count if self._slot is not None else 0):
            assert self._slot is not None
            self._slot.sent()

    def session_object(self) -> dict[str, Any]:
        """The session as created and updated show it."""
        return self.config.as_beta_json(self.id) if self.beta else self.config.as_json(self.id)

    # -- events --------------------------------------------------------------------------------------------------

    def emit(self, name: str, /, **fields: Any) -> None:
        """Say a server event in the names of the connection."""
        frames = 0
        if name == "response.output_audio.delta" and not self._delta_sent:
            frames, self._delta_sent = 1, True
        event = server_event(name, fields, frames, self.beta, self.vendor)
        if event is not None:
            self._send(event)

    def error(self, code: str, message: str, param: str | None = None, event_id: str | None = None) -> None:
        """Say an error."""
        self.emit("error", **error_fields(code, message, param, event_id, self.vendor))

    # -- the model's session -------------------------------------------------------------------------------------

    def _updated(self, session: dict[str, Any]) -> None:
        self.emit("session.updated", session=session)

    def put(self, request: messages.Request) -> None:
        """Hand the engine a request."""
        if self._slot is not None:
            self._slot.put(request)

    def configure(self, config: SessionConfig) -> None:
        """Other settings; `session.updated` is said when they are in force."""
        before, self.config = self.config, config
        if config.input_format != before.input_format:
            self._decoder = None
        if config.turn_detection != before.turn_detection:
            self.ear.configure(self.config.turn_detection)
        self.prompt.update(config, self.session_object(), self._idle)

    # -- audio ---------------------------------------------------------------------------------------------------

    def hear(self, data: bytes, form: WireFormat | None = None) -> Samples:
        """Bytes of an append -> the samples that they gave. Raises WrongAudio."""
        form = form or self.config.input_format
        if self._decoder is None or self._decoder.format != form:
            self._decoder = Decoder(form, self.engine.config.input_rate_hz)
        samples = self._decoder.push(data)
        self.uncommitted_ms += form.milliseconds(len(data))
        self.input_ms += form.milliseconds(len(data))
        self.prompt.open()
        self.ear.audio(samples)
        return samples

    def _hear(self, samples: bytes) -> None:
        if samples:
            self.put(messages.Append(samples))
            self._recent.hear(samples, self.utterances.current is not None)

    def _under_way(self) -> bytes:
        """The audio of the utterance that the model was about to answer."""
        return b"" if self.utterances.current is None else self._recent.again()

    def _activity(self, activity: Activity) -> None:
        if activity.kind == "stopped":
            self.utterances.stop(activity.at_ms)
            self.uncommitted_ms = 0.0
            return
        self.prompt.touched = True
        self.utterances.start(activity.at_ms)
        if self.config.interrupts and self.response is not None:
            self.interrupt("turn_detected")

    # -- turns ---------------------------------------------------------------------------------------------------

    def interrupt(self, reason: str) -> None:
        """End the agent's turn, at once for the client and at the next frame for the model."""
        response, self.response = self.response, None
        if response is None:
            return
        self._dropping = True
        response.end("cancelled", reason)
        self.put(messages.Interrupt())
        self._after_turn()

    async def ask(self, metadata: dict[str, Any] | None) -> None:
        """A response was asked for, and nothing is open: speak what was typed, and open the agent's turn."""
        self.wanted, self.turn_due = metadata, True
        self.prompt.open()
        texts, self.typed = self.typed, []
        heard = self.utterances.current is not None
        if texts and self.voice is not None:
            self.prompt.touched = heard = self._typing = True
            samples = await self.voice.speak(" ".join(texts))
            self.put(messages.BeginTurn())
            self.put(messages.Append(samples.tobytes()))
        self.put(messages.EndTurn(PATIENCE_FRAMES if heard else 0))

    def give_results(self) -> None:
        """The results of calls that wait go into the model."""
        if self._result_timer is not None:
            self._result_timer.cancel()
            self._result_timer = None
        given = {call_id: result for call_id, result in self.calls.items() if result is not None}
        for call_id, result in given.items():
            del self.calls[call_id]
            self.put(messages.Give(call_id, result))
        self.answer_due = not self.calls

    def results_wait(self) -> None:
        """A result came: response.create is waited for a while."""
        if self._result_timer is not None:
            self._result_timer.cancel()
        self._result_timer = self.loop.call_later(RESULT_SECONDS, self.give_results)

    def _unanswered(self) -> None:
        """An utterance is over, and the model has not opened a turn."""

    def _respond(self) -> Response:
        """A new response; all of its question comes first."""
        self.prompt.touched = True
        self.utterances.answered(self.ear.heard_ms)
        self._recent.clear()
        if self.ear.detector is not None and self.ear.detector.speaking:
            self.ear.forget()
        metadata, self.wanted = self.wanted, None
        self.asked = self.turn_due or self.answer_due
        self.turn_due = self._typing = False
        response = Response(
            self.emit,
            self.items,
            self.config,
            self.engine.config.output_rate_hz,
            round(self.engine.config.frame_seconds * 1000),
            self.conversation_id,
            metadata,
            self.beta,
        )
        self.last_response_id = response.id
        response.heard_frames, self._heard_frames = self._heard_frames, 0
        self.response = response
        return response

    def _after_turn(self) -> None:
        if self._idle:
            self.prompt.change()

    # -- the engine's events -------------------------------------------------------------------------------------

    def deliver(self, event: Any) -> None:
        """Take one event of the engine. Raises KeyError for one that a session has not."""
        handle = DELIVERED[type(event)]
        if not self.ended and handle is not None:
            handle(self, event)

    def _opened(self, _: messages.Opened) -> None:
        self.utterances.repeat()
        self.prompt.opened()

    def _opening_failed(self, event: messages.OpeningFailed) -> None:
        self._slot = None
        self.fail("invalid_event", event.message)

    def _broken(self, event: messages.Broken) -> None:
        self._slot = None
        self.fail("internal_error", event.message)

    def _refused(self, event: messages.AppendRefused) -> None:
        if self.response is not None:
            self.response.end("incomplete", "session_limit_reached")
        self.fail("session_limit_reached", event.message, NORMAL)

    def _transcript(self, event: TranscriptDelta) -> None:
        if not self._typing:
            self.prompt.touched = True
            self.utterances.heard(event.delta)

    def _answering(self, _: messages.Answering) -> None:
        """The turn goes on behind a call: the answer is a response of its own."""
        if self.response is None and not self._dropping:
            self._respond()
        self.answer_due = False

    def _text(self, event: TextDelta) -> None:
        if self.response is None or self._dropping:
            return
        self.response.text(event.delta)
        most = self.config.max_output_tokens
        if isinstance(most, int) and self.response.text_tokens >= most:
            response, self.response, self._dropping = self.response, None, True
            response.end("incomplete", "max_output_tokens")
            self.put(messages.Interrupt())

    def _speech(self, event: messages.Speech) -> None:
        self._delta_sent = False
        self._heard_frames += 1
        if self.response is not None and not self._dropping:
            self.response.audio(np.frombuffer(event.samples, np.float32))
        if not self._delta_sent:
            self.frames_left(1)
        self._delta_sent = True
        self.utterances.frame()
        if event.unheard:
            self.ear.silence(self.engine.config.frame_samples_in)

    def _turn_opened(self, _: TurnOpened) -> None:
        self._dropping = False
        if self.response is not None:
            self.response.end("completed")
        self._respond()
        self.answer_due = False

    def _turn_closed(self, _: TurnClosed) -> None:
        self._dropping = False
        response, self.response = self.response, None
        if response is not None:
            response.end("completed")
        self._after_turn()

    def _function_call(self, event: FunctionCall) -> None:
        if self.prompt.operators:  # it runs here, and is not the client's
            return
        response = self.response
        if response is not None and response.item is not None:
            response.end("completed")
            response = None
        if response is None or not response.open:
            response = self._respond()
        self.calls[event.call_id] = None
        response.call(event.name, event.call_id, json.dumps(event.arguments, ensure_ascii=False))
        self.loop.call_soon(partial(self._call_ended, response))  # behind the other calls of the cycle

    def _call_ended(self, response: Response) -> None:
        response.end("completed")
        if self.response is response:
            self.response = None

    def _settle_timeout(self, _: SettleTimeout) -> None:
        self.put(messages.OpenTurn())

    def _result_refused(self, event: messages.ResultRefused) -> None:
        self.calls[event.call_id] = None
        self.answer_due = False
        self.error("invalid_function_call_output", event.message, "item.output")


DELIVERED: dict[type, Callable[[OpenAISession, Any], None] | None] = {
    messages.Opened: OpenAISession._opened,
    messages.OpeningFailed: OpenAISession._opening_failed,
    messages.Broken: OpenAISession._broken,
    messages.AppendRefused: OpenAISession._refused,
    messages.ResultRefused: OpenAISession._result_refused,
    messages.Answering: OpenAISession._answering,
    messages.Speech: OpenAISession._speech,
    TranscriptDelta: OpenAISession._transcript,
    TextDelta: OpenAISession._text,
    TurnOpened: OpenAISession._turn_opened,
    TurnClosed: OpenAISession._turn_closed,
    FunctionCall: OpenAISession._function_call,
    SettleTimeout: OpenAISession._settle_timeout,
    **dict.fromkeys(
        (
            messages.Unopened,
            messages.Interrupted,
            messages.Lagging,
            messages.Committed,
            FunctionDelta,
            FunctionFailed,
            FunctionApplied,
            OnHold,
            Done,
            Cancelled,
        )
    ),
}
