// The package `ai` with `@ai-sdk/openai` as it comes: the Responses API, which stores by default, and items that are
// named instead of sent again.
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { DESCRIBE, HELLO, MEASURE, MODEL, Place, URL, WEATHER, schema, tell, weather } from "./shared.js";

const model = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" })(MODEL);
const tools = { weather: tool({ description: "The weather.", inputSchema: jsonSchema(schema), execute: weather }) };
const steps = { model, tools, stopWhen: stepCountIs(3) };
const output = Output.object({ schema: Place });

const stream = [];
for await (const text of streamText({ model, prompt: HELLO }).textStream) stream.push(text);
const asked = [{ role: "user", content: WEATHER }];
const streamed = streamText({ ...steps, messages: asked });
const answer = await streamed.text;
const messages = [...asked, ...(await streamed.response).messages, { role: "user", content: HELLO }];
tell({
  chat: (await generateText({ model, prompt: HELLO })).text,
  stream,
  tools: (await generateText({ ...steps, prompt: WEATHER })).text,
  structured: (await generateText({ model, prompt: DESCRIBE, output })).output,
  structured_after_call: (await generateText({ ...steps, prompt: MEASURE, output })).output,
  structured_object: (await generateObject({ model, prompt: DESCRIBE, schema: Place })).object,
  structured_stream: await streamText({ model, prompt: DESCRIBE, output }).output,
  streamed_tools: answer,
  resumed: (await generateText({ ...steps, messages })).text,
});
