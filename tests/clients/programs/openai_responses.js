// The package `openai` of npm, over the Responses API.
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { DESCRIBE, HELLO, MODEL, Place, URL, WEATHER, schema, tell, weather } from "./shared.js";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const tools = [{ type: "function", name: "weather", parameters: schema, strict: true }];

const chat = await client.responses.create({ model: MODEL, instructions: "Be kind.", input: HELLO });
const stream = [];
for await (const event of await client.responses.create({ model: MODEL, input: HELLO, stream: true }))
  if (event.type === "response.output_text.delta") stream.push(event.delta);
const input = [{ role: "user", content: WEATHER }];
const asked = await client.responses.stream({ model: MODEL, input, tools }).finalResponse();
input.push(...asked.output);
for (const call of asked.output.filter((item) => item.type === "function_call"))
  input.push({ type: "function_call_output", call_id: call.call_id, output: weather(JSON.parse(call.arguments)) });
const answered = await client.responses.create({ model: MODEL, input, tools });
const described = await client.responses.parse({
  model: MODEL,
  input: DESCRIBE,
  text: { format: zodTextFormat(Place, "place") },
});
tell({ chat: chat.output_text, stream, tools: answered.output_text, structured: described.output_parsed });
