// The package `ai` with `@ai-sdk/openai-compatible`.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { DESCRIBE, HELLO, MODEL, Place, URL, WEATHER, schema, tell, weather } from "./shared.js";

const provider = createOpenAICompatible({
  name: "dynamo",
  baseURL: `${URL}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const tools = { weather: tool({ description: "The weather.", inputSchema: jsonSchema(schema), execute: weather }) };

const stream = [];
for await (const text of streamText({ model, prompt: HELLO }).textStream) stream.push(text);
tell({
  chat: (await generateText({ model, prompt: HELLO })).text,
  stream,
  tools: (await generateText({ model, prompt: WEATHER, tools, stopWhen: stepCountIs(3) })).text,
  structured: (await generateText({ model, prompt: DESCRIBE, output: Output.object({ schema: Place }) })).output,
  streamed_tools: await streamText({ model, prompt: WEATHER, tools, stopWhen: stepCountIs(3) }).text,
});
