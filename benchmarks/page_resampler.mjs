// The page's resampler over an hour of a 440 Hz tone: samples missing at the end, and the error against the ideal tone.
// node benchmarks/page_resampler.mjs [seconds]

import { toneError } from "../tests/page/tone.mjs";

const seconds = Number(process.argv[2] ?? 3600);
const cases = [44100, 48000].flatMap((rate) => [128, 441, 1024].map((block) => [rate, 16000, block]));
cases.push([22050, 44100, 1764], [22050, 48000, 1764]);

console.log("from Hz  to Hz  block  missing  error dB  largest error");
for (const [from, to, block] of cases) {
  const { missing, errorDb, worst } = toneError(from, to, block, seconds);
  const cells = [from, to, block, missing, errorDb.toFixed(1), worst.toExponential(1)];
  console.log(cells.map((cell, index) => String(cell).padStart([7, 6, 6, 8, 9, 14][index])).join(" "));
}
