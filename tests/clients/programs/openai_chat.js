// The package `openai` of npm, over chat completions.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { DESCRIBE, HELLO, MODEL, Place, URL, WEATHER, schema, tell, weather } from "./shared.js";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const asks = (content) => ({ model: MODEL, messages: [{ role: "user", content }] });

const chat = await client.chat.completions.create(asks(HELLO));
const stream = [];
for await (const chunk of await client.chat.completions.create({ ...asks(HELLO), stream: true }))
  stream.push(chunk.choices[0]?.delta.content ?? "");
const runner = client.chat.completions.runTools({
  ...asks(WEATHER),
  stream: true,
  tools: [{ type: "function", function: { name: "weather", parameters: schema, function: weather, parse: JSON.parse } }],
});
const described = await client.chat.completions.parse({
  ...asks(DESCRIBE),
  response_format: zodResponseFormat(Place, "place"),
});
tell({
  chat: chat.choices[0].message.content,
  stream,
  tools: await runner.finalContent(),
  structured: described.choices[0].message.parsed,
});
