// Clients of npm against a scripted model; the counterpart of sdks.py, which says what the model does.
//
//     node sdks.mjs CLIENT URL MODEL
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const [, , CLIENT, URL, MODEL] = process.argv;
const HELLO = "Hello, client: 日本 🙂.", ANSWER = "The sum is 42.", RESULT = "42", ARGUMENTS = { a: 17, b: 25 };
const QUESTION = [{ role: "user", content: "What is 17 + 25?" }];
const SCHEMA = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] };
const FUNCTION = { name: "add", description: "Adds.", parameters: SCHEMA };
const CHAT_TOOLS = [{ type: "function", function: FUNCTION }];

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

async function until(isSo) {
  for (let tries = 0; !(await isSo()); tries++) {
    assert(tries < 1200, "it does not end");
    await new Promise((go) => setTimeout(go, 50));
  }
}

const openai = async () => {
  const { default: OpenAI } = await import("openai");
  return new OpenAI({ baseURL: `${URL}/v1`, apiKey: "any", maxRetries: 0 });
};
const anthropic = async () => {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  return new Anthropic({ baseURL: URL, apiKey: "any", maxRetries: 0 });
};
const ollama = async () => {
  const { Ollama } = await import("ollama");
  return new Ollama({ host: URL });
};
const vercel = async () => {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const model = createOpenAICompatible({ name: "russet", baseURL: `${URL}/v1`, apiKey: "any", includeUsage: true })(MODEL);
  return { ...(await import("ai")), model };
};

const CLIENTS = {
  "openai-node": ["openai", {
    async models() {
      assert((await all(await (await openai()).models.list())).some((model) => model.id === MODEL));
    },
    async chat_stream() {
      const stream = await (await openai()).chat.completions.create({ model: MODEL, messages: QUESTION, stream: true });
      assert.equal((await all(stream)).map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), HELLO);
    },
    async chat_tools() {
      const client = await openai(), asked = { model: MODEL, tools: CHAT_TOOLS };
      const message = (await client.chat.completions.create({ ...asked, messages: QUESTION })).choices[0].message;
      assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), ARGUMENTS);
      const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: RESULT };
      const answer = await client.chat.completions.create({ ...asked, messages: [...QUESTION, message, result] });
      assert.equal(answer.choices[0].message.content, ANSWER);
    },
    async chat_runner() {
      const tool = { type: "function", function: { ...FUNCTION, parse: JSON.parse, function: ({ a, b }) => String(a + b) } };
      const runner = (await openai()).chat.completions.runTools({ model: MODEL, messages: QUESTION, tools: [tool], stream: true });
      assert.equal(await runner.finalContent(), ANSWER);
    },
    async responses_stream() {
      const stream = await (await openai()).responses.create({ model: MODEL, input: "Hi", stream: true });
      const events = await all(stream);
      assert.equal(events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta).join(""), HELLO);
      assert.equal(events.at(-1).type, "response.completed");
    },
    async responses_tools() {
      const client = await openai(), tools = [{ type: "function", strict: false, ...FUNCTION }];
      const first = await client.responses.create({ model: MODEL, input: QUESTION, tools });
      const call = first.output.find((item) => item.type === "function_call");
      const result = { type: "function_call_output", call_id: call.call_id, output: RESULT };
      const second = await client.responses.create({ model: MODEL, input: [...QUESTION, ...first.output, result], tools });
      assert.equal(second.output_text, ANSWER);
    },
    async batch_of_a_file() {
      const client = await openai(), url = "/v1/chat/completions";
      const line = { custom_id: "a", method: "POST", url, body: { model: MODEL, messages: QUESTION } };
      const file = await client.files.create({ file: new File([JSON.stringify(line)], "lines.jsonl"), purpose: "batch" });
      const made = await client.batches.create({ input_file_id: file.id, endpoint: url, completion_window: "24h" });
      await until(async () => (await client.batches.retrieve(made.id)).status === "completed");
      const { output_file_id } = await client.batches.retrieve(made.id);
      const answer = JSON.parse(await (await client.files.content(output_file_id)).text());
      assert.equal(answer.response.body.choices[0].message.content, HELLO);
    },
  }],
  "anthropic-node": ["@anthropic-ai/sdk", {
    async messages_stream() {
      const stream = (await anthropic()).messages.stream({ model: MODEL, max_tokens: 100, messages: QUESTION });
      assert.equal(await stream.finalText(), HELLO);
    },
    async tools() {
      const client = await anthropic();
      const asked = { model: MODEL, max_tokens: 200, tools: [{ name: "add", description: "Adds.", input_schema: SCHEMA }] };
      const first = await client.messages.stream({ ...asked, messages: QUESTION }).finalMessage();
      const call = first.content.find((block) => block.type === "tool_use");
      assert.deepEqual([call.input, first.stop_reason], [ARGUMENTS, "tool_use"]);
      const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: RESULT }] };
      const turns = [...QUESTION, { role: "assistant", content: first.content }, result];
      assert.equal((await client.messages.create({ ...asked, messages: turns })).content[0].text, ANSWER);
    },
    async count_tokens() {
      const client = await anthropic();
      assert((await client.messages.countTokens({ model: MODEL, messages: QUESTION })).input_tokens > 5);
    },
    async batches() {
      const { batches } = (await anthropic()).messages;
      const params = { model: MODEL, max_tokens: 100, messages: QUESTION };
      const made = await batches.create({ requests: ["a", "b"].map((custom_id) => ({ custom_id, params })) });
      await until(async () => (await batches.retrieve(made.id)).processing_status === "ended");
      const results = await all(await batches.results(made.id));
      assert.deepEqual(results.map((one) => one.result.message.content[0].text), [HELLO, HELLO]);
    },
  }],
  "ollama-js": ["ollama", {
    async lists() {
      assert((await (await ollama()).list()).models.some((model) => model.name.startsWith(MODEL)));
    },
    async chat_stream() {
      const parts = await all(await (await ollama()).chat({ model: MODEL, messages: QUESTION, stream: true }));
      assert.equal(parts.map((part) => part.message.content).join(""), HELLO);
    },
    async tools() {
      const client = await ollama(), asked = { model: MODEL, tools: CHAT_TOOLS };
      const { message } = await client.chat({ ...asked, messages: QUESTION });
      assert.deepEqual(message.tool_calls[0].function.arguments, ARGUMENTS);
      const turns = [...QUESTION, message, { role: "tool", tool_name: "add", content: RESULT }];
      assert.equal((await client.chat({ ...asked, messages: turns })).message.content, ANSWER);
    },
  }],
  "ai-sdk": ["ai", {
    async generate_text() {
      const { generateText, model } = await vercel();
      assert.equal((await generateText({ model, prompt: "Hi", maxRetries: 0 })).text, HELLO);
    },
    async stream_text() {
      const { streamText, model } = await vercel();
      const result = streamText({ model, prompt: "Hi", maxRetries: 0 });
      assert.equal((await all(result.textStream)).join(""), HELLO);
      assert((await result.usage).outputTokens > 0);
    },
    async tools_in_steps() {
      const { streamText, tool, stepCountIs, jsonSchema, model } = await vercel();
      const add = tool({ description: "Adds.", inputSchema: jsonSchema(SCHEMA), execute: async ({ a, b }) => a + b });
      const result = streamText({ model, messages: QUESTION, tools: { add }, stopWhen: stepCountIs(3), maxRetries: 0 });
      await all(result.textStream);
      assert.equal(await result.text, ANSWER);
    },
  }],
};

const [name, checks] = CLIENTS[CLIENT];
const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
const report = { version, passed: [], failed: [] };
for (const [check, run] of Object.entries(checks)) {
  try {
    await run();
    report.passed.push(check);
  } catch (error) {
    report.failed.push(`${check}: ${String(error.stack ?? error).slice(0, 1500)}`);
  }
}
console.log(JSON.stringify(report));
process.exit(0);
