// The package `ai` with `@ai-sdk/openai-compatible`.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { DESCRIBE, HELLO, MEASURE, MODEL, Place, URL, WEATHER, schema, tell, weather } from "./shared.js";

const provider = createOpenAICompatible({
  name: "dynamo",
  baseURL: `${URL}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const tools = { weather: tool({ description: "The weather.", inputSchema: jsonSchema(schema), execute: weather }) };

const steps = { model, tools, stopWhen: stepCountIs(3) };
const output = Output.object({ schema: Place });

const stream = [];
for await (const text of streamText({ model, prompt: HELLO }).textStream) stream.push(text);
tell({
  chat: (await generateText({ model, prompt: HELLO })).text,
  stream,
  tools: (await generateText({ ...steps, prompt: WEATHER })).text,
  structured: (await generateText({ model, prompt: DESCRIBE, output })).output,
  structured_after_call: (await generateText({ ...steps, prompt: MEASURE, output })).output,
  structured_object: (await generateObject({ model, prompt: DESCRIBE, schema: Place })).object,
  structured_stream: await streamText({ model, prompt: DESCRIBE, output }).output,
  streamed_tools: await streamText({ ...steps, prompt: WEATHER }).text,
});
