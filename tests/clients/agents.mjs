// One question to a RealtimeSession of @openai/agents-realtime; prints what it saw as one JSON object.
//
// node agents.mjs URL QUESTION.pcm [SECOND.pcm]: PCM16 at 24 kHz; the second one is said into the answer to the first.
import { readFileSync } from 'node:fs';
import { RealtimeAgent, RealtimeSession, tool } from '@openai/agents-realtime';
import { z } from 'zod';

const PIECE = 4800; // bytes, 100 ms
const [url, ...paths] = process.argv.slice(2);
const [question, second] = paths.map((path) => readFileSync(path));
const seen = { calls: [], heard: [], answers: [], statuses: [], audio: [], interrupted: 0, truncated: [], errors: [] };

const weather = tool({
  name: 'get_weather',
  description: 'The weather in a city.',
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => (seen.calls.push(city), '{"weather": "sunny"}'),
});
const agent = new RealtimeAgent({ name: 'assistant', instructions: 'Be brief.', tools: [weather] });
const session = new RealtimeSession(agent, { transport: 'websocket', model: 'any' });

async function say(recording) {
  for (let at = 0; at < recording.length; at += PIECE) {
    session.sendAudio(new Uint8Array(recording.subarray(at, at + PIECE)).buffer);
    await new Promise((done) => setTimeout(done, 100));
  }
}

let bytes = 0, words = '', speak;
const speaking = new Promise((done) => { speak = done; });
session.on('audio', (event) => { bytes += event.data.byteLength; if (bytes > 0.4 * 48000) speak(); });
session.on('audio_interrupted', () => { seen.interrupted += 1; });
session.on('error', (event) => seen.errors.push(String(event.error?.message ?? JSON.stringify(event.error))));
session.transport.on('audio_transcript_delta', (event) => { words += event.delta; });
const over = new Promise((done) => {
  session.transport.on('*', (event) => {
    if (event.type === 'conversation.item.input_audio_transcription.completed') seen.heard.push(event.transcript);
    if (event.type === 'conversation.item.truncated') seen.truncated.push(event.audio_end_ms);
    if (event.type !== 'response.done') return;
    seen.statuses.push(event.response.status);
    if (event.response.output.some((item) => item.type === 'function_call')) return;
    seen.answers.push(words);
    seen.audio.push(bytes / 48000);
    [bytes, words] = [0, ''];
    if (seen.answers.length === paths.length) done();
  });
});

await session.connect({ apiKey: 'none', url: `${url}?model=any` });
await say(question);
if (second) { await speaking; await say(second); }
await over;
await new Promise((done) => setTimeout(done, 200)); // the library's own bookkeeping
seen.history = session.history.map((item) => item.role ?? item.type);
session.close();
console.log(JSON.stringify(seen));
process.exit(0);
