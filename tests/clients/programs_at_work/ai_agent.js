// The package `ai` with the provider of OpenAI and its defaults: the Responses API.
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, asked, goOn, both] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const path = z.string();

const tools = {
  read_file: tool({
    description: "Reads a file.",
    inputSchema: z.object({ path }),
    execute: ({ path }) => readFileSync(path, "utf8"),
  }),
  edit_file: tool({
    description: "Replaces a text in a file.",
    inputSchema: z.object({ path, old: z.string(), new: z.string() }),
    execute: (given) => {
      writeFileSync(given.path, readFileSync(given.path, "utf8").replace(given.old, () => given.new));
      return "replaced";
    },
  }),
  run_command: tool({
    description: "Runs a command of the shell.",
    inputSchema: z.object({ command: z.string() }),
    execute: ({ command }) => execSync(command, { encoding: "utf8" }) || "no output",
  }),
};

const ended = async (model, messages) => {
  const failures = [];
  const result = streamText({
    model: provider(model),
    messages,
    tools,
    stopWhen: stepCountIs(6),
    onError: ({ error }) => failures.push(error),
  });
  const text = await result.text;
  if (failures.length) throw failures[0];
  return [text, [...messages, ...(await result.responseMessages)]];
};

const user = (content) => ({ role: "user", content });
const [task, history] = await ended(name, [user(asked)]);
console.log(JSON.stringify({ task }));
const [resumed] = await ended(name, [...history, user(goOn)]);
console.log(JSON.stringify({ resumed }));
const [twice] = await ended(`${name}-both`, [user(both)]);
console.log(JSON.stringify({ both: twice }));
