// The wire of /v1/realtime: messages, and samples as base64 of little-endian PCM16. No browser needed.

export const INPUT_RATE_HZ = 16000;
export const OUTPUT_RATE_HZ = 22050;
export const FRAME_SECONDS = 0.08;
export const INPUT_FRAME_SAMPLES = 1280;
export const OUTPUT_FRAME_SAMPLES = 1764;
const INPUT_SCALE = 32768; // of what the server hears: PCM as files have it
const OUTPUT_SCALE = 32767; // of what the server speaks

/** The message that begins a conversation; an empty prompt is left to the model. */
export function sessionUpdate({ systemPrompt, seed, pushToTalk }) {
  const session = systemPrompt === "" ? { seed } : { system_prompt: systemPrompt, seed };
  session.extensions = true; // events of tools, and turns
  if (pushToTalk) session.turns = "application";
  return { type: "session.update", session };
}

export function append(pcm) {
  return { type: "input_audio_buffer.append", audio: toBase64(pcm), sample_rate: INPUT_RATE_HZ };
}

/** A browser cannot set a header on a WebSocket: the key travels as a subprotocol. */
export function subprotocols(key) {
  return key === "" ? ["realtime"] : ["realtime", `openai-insecure-api-key.${key}`];
}

/** Whether a key can be sent as a subprotocol at all. */
export function isSendable(key) {
  return /^[!#$%&'*+.^_`|~0-9A-Za-z-]*$/.test(key);
}

/** Whether session.created offers what this page hears and speaks. */
export function isUnderstood(session) {
  const { input_audio_format: input, output_audio_format: output } = session ?? {};
  return (
    input?.type === "pcm16" && input.sample_rate === INPUT_RATE_HZ &&
    output?.type === "pcm16" && output.sample_rate === OUTPUT_RATE_HZ
  );
}

/** Float samples (S,) -> Int16Array (S,): clipped, then rounded. */
export function toPcm(samples) {
  const clipped = (value) => Math.max(-INPUT_SCALE, Math.min(INPUT_SCALE - 1, value));
  return Int16Array.from(samples, (sample) => Math.round(clipped(sample * INPUT_SCALE)));
}

/** Int16Array (S,) of the server -> float samples (S,). */
export function toFloat(pcm) {
  return Float32Array.from(pcm, (value) => value / OUTPUT_SCALE);
}

export function toBase64(pcm) {
  const bytes = new Uint8Array(2 * pcm.length);
  const view = new DataView(bytes.buffer);
  pcm.forEach((value, index) => view.setInt16(2 * index, value, true));
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

export function fromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Int16Array.from({ length: bytes.length >> 1 }, (_, index) => view.getInt16(2 * index, true));
}
