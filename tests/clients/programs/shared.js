// What all programs ask, each in the words of its library.
import { z } from "zod";

export const URL = process.argv[2];
export const MODEL = "mock-model";
export const HELLO = "Say hello.";
export const WEATHER = "How is the weather in Oslo?";
export const DESCRIBE = "Describe Oslo.";
export const MEASURE = "Measure Bergen.";
export const Place = z.object({ name: z.string(), degrees: z.number() });
export const schema = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

export const weather = ({ city }) => `${city.length + 3} degrees in ${city}`;
export const tell = (found) => console.log(JSON.stringify(found));
