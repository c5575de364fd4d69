// What llama.cpp does with a GGUF file on CPU threads, for cpu.py:
// `node llama_cpp.mjs PACKAGES FILE THREADS OUTPUT SECONDS PROMPT EVERY` prints a JSON object.
// PACKAGES is the folder in which `npm install node-llama-cpp@3.22` was run.
import {readFileSync} from "node:fs";
import {resolve} from "node:path";
import {pathToFileURL} from "node:url";

const [packages, modelPath] = process.argv.slice(2, 4);
const [threads, output, seconds, length, every] = process.argv.slice(4).map(Number);
const entry = resolve(packages, "node_modules/node-llama-cpp/dist/index.js");
const {getLlama} = await import(pathToFileURL(entry));
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const vocabulary = Math.min(model.fileInfo.metadata.tokenizer.ggml.tokens.length, 40000);
const low = Math.min(1000, vocabulary / 2);
const found = {};
let drawn = 1;

function prompt(count) {
  return Array.from({length: count}, () => {
    drawn = (drawn * 48271) % 2147483647;
    return Math.floor(low + drawn % (vocabulary - low));
  });
}

async function generate(sequence, count, tokens, times = []) {
  await sequence.clearHistory();
  const options = {temperature: 0, yieldEogToken: true};
  for await (const _ of sequence.evaluate(prompt(count), options)) {
    times.push(performance.now() / 1e3);
    if (times.length >= tokens) break;
  }
  return times;
}

async function withSequences(count, use) {
  const context = await model.createContext(
    {contextSize: 2048, sequences: count, threads, batchSize: 512});
  await use(Array.from({length: count}, () => context.getSequence()));
  await context.dispose();
}

async function decode(sequences) {
  await generate(sequences[0], 64, 4);
  const all = await Promise.all(sequences.map(each => generate(each, 64, output)));
  const first = Math.min(...all.map(times => times[0]));
  const last = Math.max(...all.map(times => times.at(-1)));
  const n = sequences.length;
  found[`${n} streams, tokens/s`] = n * (output - 1) / (last - first);
  if (n > 1) return;
  const pss = readFileSync("/proc/self/smaps_rollup", "utf8").match(/^Pss: +(\d+)/m)[1];
  found["memory (MiB)"] = pss / 1024;
}

async function prefill(sequences) {
  for (const count of [512, 1500]) {
    await sequences[0].clearHistory();
    const began = performance.now();
    await sequences[0].evaluateWithoutGeneratingNewTokens(prompt(count));
    found[`prefill of ${count}, tokens/s`] = count / (performance.now() - began) * 1e3;
  }
}

async function beside(sequences) {
  const streams = sequences.slice(1).map(() => []);
  const running = sequences.slice(1).map((each, i) => generate(each, 50, 1950, streams[i]));
  const began = performance.now() / 1e3;
  while (performance.now() / 1e3 - began < seconds) {
    await generate(sequences[0], length, 8);
    const rest = every - (performance.now() / 1e3 - began) % every;
    await new Promise(done => setTimeout(done, rest * 1e3));
  }
  const gaps = streams.flatMap(
    times => times.slice(1).map((at, i) => at - times[i]).filter((_, i) => times[i] > began));
  gaps.sort((a, b) => a - b);
  found["P99 gap beside prompts (ms)"] = gaps[Math.floor(gaps.length * 0.99)] * 1e3;
  console.log(JSON.stringify(found));
  process.exit(0);  // the streams may still run
  await running;
}

for (const count of [1, 4, 16]) await withSequences(count, decode);
await withSequences(1, prefill);
await withSequences(5, beside);
