// OpenAI's Agents SDK for JavaScript: a question, and the words of the answer.
//
// npm install @openai/agents-realtime zod
// mlx-voicechat serve -m tiny
// node agents_realtime.mjs [ws://127.0.0.1:8080/v1/realtime]
import { readFileSync } from 'node:fs';
import { RealtimeAgent, RealtimeSession } from '@openai/agents-realtime';

const url = process.argv[2] ?? 'ws://127.0.0.1:8080/v1/realtime';
const question = readFileSync(new URL('question_24khz.wav', import.meta.url)).subarray(44); // behind the header

const agent = new RealtimeAgent({ name: 'assistant', instructions: 'Be brief.' });
const session = new RealtimeSession(agent, { transport: 'websocket', model: 'any' });
session.transport.on('audio_transcript_delta', (event) => process.stdout.write(event.delta));
session.transport.on('turn_done', () => { console.log(); session.close(); });
await session.connect({ apiKey: 'none', url: `${url}?model=any` });
session.sendAudio(new Uint8Array(question).buffer);
