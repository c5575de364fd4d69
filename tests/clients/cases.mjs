// The calls of JavaScript clients, as `cases.py` has those of Python: `node cases.mjs BASE`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool as langchainTool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { embed, generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { OpenAI as LlamaOpenAI } from "@llamaindex/openai";
import { agent } from "@llamaindex/workflow";
import { tool as llamaTool } from "llamaindex";
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
const chatOpenAI = () =>
  new ChatOpenAI({
    model: "parrot",
    apiKey: "none",
    maxRetries: 0,
    configuration: { baseURL: `${base}/v1` },
  });
const turn = { model: provider("parrot"), prompt: ask, tools: { weather }, stopWhen: stepCountIs(3) };
const cases = {
  "ai generateObject": async () => {
    const made = await generateObject({ model: turn.model, schema: cat, prompt: "Make a cat" });
    assert.deepEqual(made.object, { name: "Tom", age: 3 });
  },
  "ai a turn with a tool": async () => assert.equal((await generateText(turn)).text, final),
  "ai a streamed turn": async () => assert.equal(await streamText(turn).text, final),
  "ai Output.object": async () => {
    const given = { model: turn.model, prompt: "Make a cat" };
    const made = await generateText({ ...given, experimental_output: Output.object({ schema: cat }) });
    assert.deepEqual(made.experimental_output, { name: "Tom", age: 3 });
  },
  "ai embed is refused": async () => {
    const model = provider.textEmbeddingModel("parrot");
    await assert.rejects(embed({ model, value: "a", maxRetries: 0 }), { statusCode: 501 });
  },
  "@langchain/openai structured output": async () => {
    for (const [method, ask] of [
      ["jsonSchema", "Make a cat"],
      ["jsonMode", "Make a cat"],
      ["functionCalling", "Call a cat"],
    ]) {
      const model = chatOpenAI().withStructuredOutput(cat, { name: "Cat", method });
      assert.deepEqual(await model.invoke(ask), { name: "Tom", age: 3 });
    }
  },
  "@langchain/openai a turn with a tool": async () => {
    const known = langchainTool(async () => "21 degrees", {
      name: "weather",
      description: "Weather now",
      schema: z.object({ city: z.string() }),
    });
    const model = chatOpenAI().bindTools([known]);
    const first = await model.invoke([new HumanMessage(ask)]);
    const [call] = first.tool_calls;
    assert.deepEqual(call.args, { city: "Rome" });
    const said = new ToolMessage({ content: await known.invoke(call.args), tool_call_id: call.id });
    assert.equal((await model.invoke([new HumanMessage(ask), first, said])).text, final);
  },
  "llamaindex an agent, a stream and a schema": async () => {
    const options = { model: "parrot", apiKey: "none", baseURL: `${base}/v1`, maxRetries: 0 };
    const llm = new LlamaOpenAI(options);
    const known = llamaTool({
      name: "weather",
      description: "Weather now",
      parameters: z.object({ city: z.string() }),
      execute: async ({ city }) => (assert.equal(city, "Rome"), "21 degrees"),
    });
    assert.equal((await agent({ llm, tools: [known] }).run(ask)).data.result, final);
    let said = "";
    const messages = [{ role: "user", content: "21 degrees" }];
    for await (const piece of await llm.chat({ messages, stream: true })) said += piece.delta;
    assert.equal(said, final);
    const asked = [{ role: "user", content: "Make a cat" }];
    const made = await llm.chat({ messages: asked, responseFormat: cat });
    assert.deepEqual(JSON.parse(made.message.content), { name: "Tom", age: 3 });
  },
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
