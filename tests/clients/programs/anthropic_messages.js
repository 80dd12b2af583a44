// The package `@anthropic-ai/sdk`, with its tool runner.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { DESCRIBE, HELLO, MODEL, Place, URL, WEATHER, schema, tell, weather } from "./shared.js";

const client = new Anthropic({ baseURL: URL, apiKey: "none" });
const asks = (content) => ({ model: MODEL, max_tokens: 200, messages: [{ role: "user", content }] });

const chat = await client.messages.create(asks(HELLO));
const stream = [];
await client.messages.stream(asks(HELLO)).on("text", (text) => stream.push(text)).finalMessage();
const answered = await client.beta.messages.toolRunner({
  ...asks(WEATHER),
  stream: false,
  tools: [betaTool({ name: "weather", description: "The weather.", inputSchema: schema, run: weather })],
});
const described = await client.messages.parse({
  ...asks(DESCRIBE),
  output_config: { format: zodOutputFormat(Place) },
});
tell({
  chat: chat.content[0].text,
  stream,
  tools: answered.content[0].text,
  structured: described.parsed_output,
});
