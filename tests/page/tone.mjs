// A tone through a resampler in blocks: what its tests and benchmarks/page_resampler.mjs measure.

import { Resampler } from "../../server/static/resampler.js";

export const TONE_HZ = 440;
const EDGE_SECONDS = 0.01; // where the tone begins and ends, which no filter can foresee

/** `seconds` of the tone in blocks: {missing samples, error in dB of the tone, the largest error}. */
export function toneError(fromHz, toHz, blockSamples, seconds) {
  const resampler = new Resampler(fromHz, toHz);
  const total = Math.round(fromHz * seconds);
  const wanted = Math.round((total * toHz) / fromHz);
  const edge = Math.round(EDGE_SECONDS * toHz);
  const block = new Float32Array(blockSamples);
  let given = 0;
  let power = 0;
  let worst = 0;
  const check = (output) => {
    for (const sample of output) {
      if (given >= edge && given < wanted - edge) {
        const error = sample - tone(given, toHz);
        power += error * error;
        worst = Math.max(worst, Math.abs(error));
      }
      given += 1;
    }
  };
  for (let start = 0; start < total; start += blockSamples) {
    const count = Math.min(blockSamples, total - start);
    for (let index = 0; index < count; index++) block[index] = tone(start + index, fromHz);
    check(resampler.push(block.subarray(0, count)));
  }
  check(resampler.flush());
  const meanSquare = power / (wanted - 2 * edge);
  return { missing: wanted - given, errorDb: 10 * Math.log10(meanSquare / 0.5), worst };
}

/** Sample `index` of the tone; whole turns are taken off first, for an hour's sake. */
export function tone(index, rateHz) {
  return Math.sin(2 * Math.PI * (((index % rateHz) * TONE_HZ) % rateHz) / rateHz);
}
