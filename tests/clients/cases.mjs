// The calls of JavaScript clients, as `cases.py` has those of Python: `node cases.mjs BASE`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [base] = process.argv.slice(2);
const ask = "What is the weather in Rome?";
const final = "It is 21 degrees in Rome.";
const cat = z.object({ name: z.string(), age: z.number() });
const provider = createOpenAICompatible({
  name: "twolane",
  baseURL: `${base}/v1`,
  supportsStructuredOutputs: true,
});
const weather = tool({
  description: "Weather now",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (assert.equal(city, "Rome"), "21 degrees"),
});
const turn = { model: provider("parrot"), prompt: ask, tools: { weather }, stopWhen: stepCountIs(3) };
const cases = {
  "ai generateObject": async () => {
    const made = await generateObject({ model: turn.model, schema: cat, prompt: "Make a cat" });
    assert.deepEqual(made.object, { name: "Tom", age: 3 });
  },
  "ai a turn with a tool": async () => assert.equal((await generateText(turn)).text, final),
  "ai a streamed turn": async () => assert.equal(await streamText(turn).text, final),
  "openai zod": async () => {
    const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
    const made = await client.chat.completions.parse({
      model: "parrot",
      messages: [{ role: "user", content: "Make a cat" }],
      response_format: zodResponseFormat(cat, "cat"),
    });
    assert.deepEqual(made.choices[0].message.parsed, { name: "Tom", age: 3 });
  },
  "openai responses": async () => {
    const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
    const made = await client.responses.create({ model: "parrot", input: "Make a cat" });
    assert.equal(JSON.parse(made.output_text).name, "Tom");
  },
};

let failed = 0;
for (const [name, run] of Object.entries(cases)) {
  const [client] = name.split(" ");
  const { version } = JSON.parse(readFileSync(`node_modules/${client}/package.json`));
  try {
    await run();
    console.log(`${client} (npm) ${version} | ${name} | works`);
  } catch (error) {
    failed += 1;
    console.log(`${client} (npm) ${version} | ${name} | FAILS: ${error}`);
  }
}
process.exit(failed);
