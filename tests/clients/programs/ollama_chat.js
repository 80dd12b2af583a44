// The package `ollama` of npm.
import { Ollama } from "ollama";
import { z } from "zod";
import { DESCRIBE, HELLO, MODEL, Place, URL, WEATHER, schema, tell, weather } from "./shared.js";

const client = new Ollama({ host: URL });
const asks = (content) => ({ model: MODEL, messages: [{ role: "user", content }] });
const tools = [{ type: "function", function: { name: "weather", description: "Tells the weather.", parameters: schema } }];

const streamed = async (request) => {
  const parts = [];
  for await (const part of await client.chat({ ...request, stream: true })) parts.push(part.message);
  return parts;
};
const answered = async (ask) => {
  const { model, messages } = asks(WEATHER);
  const asked = await ask({ model, messages, tools });
  messages.push(...asked);
  for (const call of asked.flatMap((message) => message.tool_calls ?? []))
    messages.push({ role: "tool", tool_name: call.function.name, content: weather(call.function.arguments) });
  return (await ask({ model, messages, tools })).map((message) => message.content).join("");
};

const chat = await client.chat(asks(HELLO));
const described = await client.chat({ ...asks(DESCRIBE), format: z.toJSONSchema(Place) });
tell({
  chat: chat.message.content,
  stream: (await streamed(asks(HELLO))).map((message) => message.content),
  tools: await answered(async (request) => [(await client.chat(request)).message]),
  streamed_tools: await answered(streamed),
  structured: Place.parse(JSON.parse(described.message.content)),
});
